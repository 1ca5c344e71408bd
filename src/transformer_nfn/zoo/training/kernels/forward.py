"""Forward kernels: the embedding, then one kernel per transformer block (wide ones: two)."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.kernels.shared import (
    LOG2E,
    batch_now,
    dropped,
    hash_word,
    inside,
    layer_norm,
    mask_words,
    masks_of,
    network_of,
    operand,
    rows_from,
    weight,
)


@triton.jit
def row_patches(samples, order_ptr, crop_ptr, n, t, here, CONST: tl.constexpr):
    """Patches ``t`` of images ``n``, randomly cropped in training; white is 1, black −1."""
    P: tl.constexpr = CONST.P
    wide = samples.wide
    p = tl.arange(0, CONST.PP)
    there = here[:, None] & (p < P)[None, :]
    start = tl.load(order_ptr + n, mask=here, other=0).to(tl.int64) * (wide * wide)
    if CONST.train:
        word = hash_word(n, tl.load(crop_ptr), tl.load(crop_ptr + 1))
        shifts: tl.constexpr = 2 * CONST.padding + 1
        start += (((word & 0xFFFF) * shifts) >> 16).to(tl.int64) * wide
        start += (((word >> 16) * shifts) >> 16).to(tl.int64)
    else:
        start += CONST.padding * (wide + 1)
    # The offset of a pixel is that of its patch plus that within a patch.
    start += tl.load(samples.table + t * P, mask=here, other=0)
    within = tl.load(samples.table + p, mask=p < P, other=0)
    pixels = tl.load(samples.stored + start[:, None] + within[None, :], mask=there, other=0)
    return tl.where(there, pixels.to(tl.float32) * (2.0 / samples.white) - 1.0, 0.0)


@triton.jit
def row_words(samples, order_ptr, n, t, here, CONST: tl.constexpr):
    """Word vectors ``t`` of texts ``n``; zero past the end of a text."""
    sample = tl.load(order_ptr + n, mask=here, other=0).to(tl.int64)
    there = here & (t < samples.wide)
    token = tl.load(samples.stored + sample * samples.wide + t, mask=there, other=0).to(tl.int64)
    d = tl.arange(0, CONST.DD)
    at = token[:, None] * CONST.D + d[None, :]
    known = inside(d, CONST.D, CONST.DD)[None, :]
    return tl.load(samples.table + at, mask=here[:, None] & known, other=0.0)


@triton.jit
def projections(w_ptr, DT: tl.constexpr, CONST: tl.constexpr):
    """The weights to q, to k and to v, as operands."""
    D: tl.constexpr = CONST.D
    PREC: tl.constexpr = CONST.products
    d = tl.arange(0, CONST.DD)
    known = inside(d, D, CONST.DD)
    at = w_ptr + d[:, None] * (3 * D) + d[None, :]
    to_q = weight(at, known, known, DT, PREC)
    to_k = weight(at + D, known, known, DT, PREC)
    to_v = weight(at + 2 * D, known, known, DT, PREC)
    return to_q, to_k, to_v


@triton.jit
def project(x, weights, acts, stat_ptr, row, here, CONST: tl.constexpr):
    """LayerNorm of the rows ``x``, numbered ``row``, and their q, k and v by `projections`.

    ``stat_ptr`` has an address per row.
    """
    D: tl.constexpr = CONST.D
    PREC: tl.constexpr = CONST.products
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    to_q, to_k, to_v = weights
    d = tl.arange(0, CONST.DD)
    real = here[:, None] & inside(d, D, CONST.DD)[None, :]
    normed, rstd = layer_norm(x, CONST)
    z = operand(normed, DT, PREC)
    if CONST.train:
        tl.store(acts.z + row[:, None] * D + d[None, :], z, mask=real)
        tl.store(stat_ptr, rstd, mask=here)
    to = acts.qkv + row[:, None] * (3 * D) + d[None, :]
    q = tl.dot(z, to_q, input_precision=PREC)
    tl.store(to, operand(q, DT, PREC), mask=real)
    k = tl.dot(z, to_k, input_precision=PREC)
    tl.store(to + D, operand(k, DT, PREC), mask=real)
    v = tl.dot(z, to_v, input_precision=PREC)
    tl.store(to + 2 * D, operand(v, DT, PREC), mask=real)


@triton.jit
def embed(
    acts, patch_ptr, w_ptr, dropout, clock, samples, sizes, CONST: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Embed the samples and compute q, k and v of the first block."""
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    H: tl.constexpr = CONST.H
    PP: tl.constexpr = CONST.PP
    PREC: tl.constexpr = CONST.products
    IMAGES: tl.constexpr = CONST.P > 0
    m = network_of(tl.program_id(0), clock, sizes, CONST)
    chunk = tl.program_id(1)
    step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    d = tl.arange(0, CONST.DD)
    wide = inside(d, D, CONST.DD)
    first = m.to(tl.int64) * sizes.rows
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    order = clock.order + m.to(tl.int64) * sizes.samples + step * sizes.batch
    crop = clock.crop + (m * sizes.steps + step) * 2
    scale = tl.load(dropout.scale + m)
    masks = masks_of(dropout, sizes, m, 0, CONST)
    weights = projections(w + CONST.layout.blocks[0].W_QKV, DT, CONST)
    if IMAGES:
        offset: tl.constexpr = CONST.layout.embedding
        p = tl.arange(0, PP)
        known = (p < CONST.P)[:, None] & wide[None, :]
        we = tl.load(w + offset.W + p[:, None] * D + d[None, :], mask=known, other=0.0)
        we = operand(we, DT, PREC)
        bias = tl.load(w + offset.b + d, mask=wide, other=0.0)[None, :]
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, ROWS):
        row, here, n, t = rows_from(begin, stop, L, ROWS)
        place = t[:, None] * D + d[None, :]
        x = tl.load(samples.positions + place, mask=here[:, None] & wide[None, :], other=0.0)
        if IMAGES:
            patches = row_patches(samples, order, crop, n, t, here, CONST)
            patches = operand(patches, DT, PREC)
            if CONST.train:
                to = patch_ptr + (first + row)[:, None] * PP + p[None, :]
                tl.store(to, patches, mask=here[:, None])
            x += tl.dot(patches, we, input_precision=PREC) + bias
        else:
            x += row_words(samples, order, n, t, here, CONST)
        if CONST.train:
            x = dropped(x * scale, mask_words(masks, row, here, sizes, CONST), CONST)
        stat = acts.stats + (first + n * L) * CONST.stats + H * L + t
        project(x, weights, acts, stat, first + row, here, CONST)


@triton.jit
def attend(q_ptr, k_ptr, rows, keys, hidden, lse_ptr, real, CONST: tl.constexpr):
    """One head: ``softmax(q kᵀ) v``; stores the base-2 logarithm of each row's sum.

    ``hidden`` is −∞ for padded keys, else 0; v lies ``D`` after k.
    """
    D: tl.constexpr = CONST.D
    PREC: tl.constexpr = CONST.products
    DT: tl.constexpr = q_ptr.dtype.element_ty
    factor: tl.constexpr = LOG2E / CONST.J**0.5
    q = tl.load(q_ptr, mask=rows, other=0.0)
    k = tl.load(k_ptr, mask=keys, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PREC) * factor + hidden[None, :]
    top = tl.max(s, 1)
    p = tl.exp2(s - top[:, None])
    total = tl.sum(p, 1)
    if CONST.train:
        tl.store(lse_ptr, top + tl.log2(total), mask=real)
    # Read late, v takes the place of q and k in shared memory.
    v = tl.load(k_ptr + D, mask=keys, other=0.0)
    a = tl.dot(operand(p, DT, PREC), v, input_precision=PREC) / total[:, None]
    return operand(a, DT, PREC)


@triton.jit
def block_forward(
    acts, next_acts, pooled_ptr, w_ptr, dropout, clock, sizes, CONST: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Attention, dropout, LayerNorm, MLP, dropout of images ``chunk·S …``.

    Rows of a network are dense. It processes ``QUERIES`` tokens of an image at a time with all
    keys. The output is normalised; the last block averages it over tokens, the others project it
    to the next block's q, k and v. Stored for backward: the heads' outputs, the outputs of
    LayerNorms (``next_acts.z``: of the one after the block), and the ``stats``.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    DD: tl.constexpr = CONST.DD
    F: tl.constexpr = CONST.F
    H: tl.constexpr = CONST.H
    J: tl.constexpr = CONST.J
    T: tl.constexpr = CONST.TT
    PREC: tl.constexpr = CONST.products
    TRAIN: tl.constexpr = CONST.train
    LAST: tl.constexpr = len(CONST.layout.blocks) == BLOCK + 1
    offset: tl.constexpr = CONST.layout.blocks[BLOCK]
    # What does not fit the chip at once is read where it is used, at an address plus a zero unknown
    # to the compiler, which else reads it before the loop: keys and values of many heads, and
    # weights that are split for three products.
    LARGE: tl.constexpr = (DD > 32) or (H * CONST.JJ > 32)
    RELOAD: tl.constexpr = (PREC == "tf32x3") and (DD > 32)
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    # By this range the compiler knows most tokens of the tile to be there.
    if (L > T) | (L < CONST.T):
        return
    B = sizes.batch
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    u = tl.arange(0, T)
    d = tl.arange(0, DD)
    j = tl.arange(0, CONST.JJ)
    f = tl.arange(0, CONST.FF)
    wide = inside(d, D, DD)
    entry = inside(j, J, CONST.JJ)
    neuron = inside(f, F, CONST.FF)
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    out_of = w + offset.W_O + j[:, None] * D + d[None, :]
    wo = ()
    for head in tl.static_range(H):
        part = weight(out_of + head * J * D, entry, wide, DT, PREC)
        wo += (part,)  # type: ignore[assignment]
    into_a = w + offset.W_A + d[:, None] * F + f[None, :]
    into_b = w + offset.W_B + f[:, None] * D + d[None, :]
    if not RELOAD:
        wa = weight(into_a, wide, neuron, DT, PREC)
    ba = tl.load(w + offset.b_A + f, mask=neuron, other=0.0)
    if not RELOAD:
        wb = weight(into_b, neuron, wide, DT, PREC)
    bb = tl.load(w + offset.b_B + d, mask=wide, other=0.0)
    if not (LAST or RELOAD):
        weights = projections(w + CONST.layout.blocks[BLOCK + 1].W_QKV, DT, CONST)
    keys = (u < L)[:, None] & entry[None, :]
    hidden = tl.where(u < L, 0.0, float("-inf"))
    scale = tl.load(dropout.scale + m)
    first = m.to(tl.int64) * sizes.rows
    masks = masks_of(dropout, sizes, m, 1 + 2 * BLOCK, CONST)
    for n in range(chunk * S, tl.minimum(chunk * S + S, B)):
        begin = first + n * L
        k = acts.qkv + (begin + u)[:, None] * (3 * D) + D + j[None, :]
        mean = tl.zeros((DD,), tl.float32)
        for i in range(T // QUERIES):
            t = i * QUERIES + tl.arange(0, QUERIES)
            real = t < L
            again = i * sizes.zero
            mask = real[:, None] & wide[None, :]
            rows = real[:, None] & entry[None, :]
            word = masks + n * L
            row = (begin + t)[:, None]
            at = t[:, None] * D + d[None, :]
            stat = acts.stats + begin * CONST.stats + t
            q = acts.qkv + row * (3 * D) + j[None, :]
            keys_at = k
            if LARGE:
                keys_at += again
            a = ()
            for head in tl.static_range(H):
                lse = stat + head * L
                out = attend(q + head * J, keys_at + head * J, rows, keys, hidden, lse, real, CONST)
                a += (out,)  # type: ignore[assignment]
            y = tl.zeros((QUERIES, DD), tl.float32)
            for head in tl.static_range(H):
                y = tl.dot(a[head], wo[head], y, input_precision=PREC)
            if TRAIN:
                to = acts.a + row * D + j[None, :]
                for head in tl.static_range(H):
                    tl.store(to + head * J, a[head], mask=rows)
                y = dropped(y * scale, mask_words(word, t, real, sizes, CONST), CONST)
            normed, rstd = layer_norm(y, CONST)
            z = operand(normed, DT, PREC)
            if TRAIN:
                tl.store(acts.y + begin * D + at, z, mask=mask)
                tl.store(stat + (H + 1) * L, rstd, mask=real)
            if RELOAD:
                wa = weight(into_a + again, wide, neuron, DT, PREC)
            h = tl.dot(z, wa, input_precision=PREC) + ba[None, :]
            h = operand(tl.maximum(h, 0.0), DT, PREC)
            if RELOAD:
                wb = weight(into_b + again, neuron, wide, DT, PREC)
            y = tl.dot(h, wb, input_precision=PREC) + bb[None, :]
            if TRAIN:
                word += sizes.rows * CONST.words
                y = dropped(y * scale, mask_words(word, t, real, sizes, CONST), CONST)
            if LAST:
                y, rstd = layer_norm(y, CONST)
                mean += tl.sum(tl.where(mask, y, 0.0), 0)
                if TRAIN:
                    tl.store(stat + (H + 2) * L, rstd, mask=real)
                    tl.store(next_acts.z + begin * D + at, operand(y, DT, PREC), mask=mask)
            else:
                if RELOAD:
                    into_next = w + CONST.layout.blocks[BLOCK + 1].W_QKV + again
                    weights = projections(into_next, DT, CONST)
                follow = next_acts.stats + begin * CONST.stats + H * L + t
                project(y, weights, next_acts, follow, begin + t, real, CONST)
        if LAST:
            tl.store(pooled_ptr + (m * B + n).to(tl.int64) * D + d, mean / L, mask=wide)


@triton.jit
def attention_forward(acts, clock, sizes, CONST: tl.constexpr, QUERIES: tl.constexpr):
    """Outputs of a head for images ``chunk·S …``, ``QUERIES`` tokens at a time.

    With `rows_forward` it does in training what `block_forward` does, for tokens so wide that both
    together leave few programs to a multiprocessor. As in `attention_backward` the heads of a
    network are neighbours in the grid.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    T: tl.constexpr = CONST.TT
    m = tl.program_id(0) // CONST.H
    head = tl.program_id(0) % CONST.H
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    # By this range the compiler knows most tokens of the tile to be there.
    if (L > T) | (L < CONST.T):
        return
    u = tl.arange(0, T)
    j = head * CONST.J + tl.arange(0, CONST.JJ)
    entry = inside(tl.arange(0, CONST.JJ), CONST.J, CONST.JJ)[None, :]
    keys = (u < L)[:, None] & entry
    hidden = tl.where(u < L, 0.0, float("-inf"))
    first = m.to(tl.int64) * sizes.rows
    for n in range(chunk * S, tl.minimum(chunk * S + S, sizes.batch)):
        begin = first + n * L
        k = acts.qkv + (begin + u)[:, None] * (3 * D) + D + j[None, :]
        for i in range(T // QUERIES):
            t = i * QUERIES + tl.arange(0, QUERIES)
            real = t < L
            rows = real[:, None] & entry
            q = acts.qkv + (begin + t)[:, None] * (3 * D) + j[None, :]
            lse = acts.stats + begin * CONST.stats + head * L + t
            # See `block_forward`.
            a = attend(q, k + i * sizes.zero, rows, keys, hidden, lse, real, CONST)
            tl.store(acts.a + (begin + t)[:, None] * D + j[None, :], a, mask=rows)


@triton.jit
def rows_forward(
    acts, next_acts, pooled_ptr, w_ptr, dropout, clock, sizes, CONST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The part of `block_forward` after the heads' outputs, ``ROWS`` at a time."""
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    DD: tl.constexpr = CONST.DD
    F: tl.constexpr = CONST.F
    H: tl.constexpr = CONST.H
    PREC: tl.constexpr = CONST.products
    TRAIN: tl.constexpr = CONST.train
    LAST: tl.constexpr = len(CONST.layout.blocks) == BLOCK + 1
    RELOAD: tl.constexpr = (PREC == "tf32x3") and (DD > 32)  # see `block_forward`
    offset: tl.constexpr = CONST.layout.blocks[BLOCK]
    m = network_of(tl.program_id(0), clock, sizes, CONST)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.a.dtype.element_ty
    d = tl.arange(0, DD)
    f = tl.arange(0, CONST.FF)
    s = tl.arange(0, S)
    wide = inside(d, D, DD)
    neuron = inside(f, F, CONST.FF)
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    wo = weight(w + offset.W_O + d[:, None] * D + d[None, :], wide, wide, DT, PREC)
    into_a = w + offset.W_A + d[:, None] * F + f[None, :]
    into_b = w + offset.W_B + f[:, None] * D + d[None, :]
    if not RELOAD:
        wa = weight(into_a, wide, neuron, DT, PREC)
        wb = weight(into_b, neuron, wide, DT, PREC)
    ba = tl.load(w + offset.b_A + f, mask=neuron, other=0.0)
    bb = tl.load(w + offset.b_B + d, mask=wide, other=0.0)
    if LAST:
        mean = tl.zeros((S, DD), tl.float32)
    elif not RELOAD:
        weights = projections(w + CONST.layout.blocks[BLOCK + 1].W_QKV, DT, CONST)
    scale = tl.load(dropout.scale + m)
    first = m.to(tl.int64) * sizes.rows
    masks = masks_of(dropout, sizes, m, 1 + 2 * BLOCK, CONST)
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, ROWS):
        row, here, n, t = rows_from(begin, stop, L, ROWS)
        again = begin * sizes.zero
        real = here[:, None] & wide[None, :]
        at = (first + row)[:, None] * D + d[None, :]
        stat = (first + n * L) * CONST.stats + t
        a = tl.load(acts.a + at, mask=real, other=0.0)
        y = tl.dot(a, wo, input_precision=PREC)
        if TRAIN:
            y = dropped(y * scale, mask_words(masks, row, here, sizes, CONST), CONST)
        normed, rstd = layer_norm(y, CONST)
        z = operand(normed, DT, PREC)
        if TRAIN:
            tl.store(acts.y + at, z, mask=real)
            tl.store(acts.stats + stat + (H + 1) * L, rstd, mask=here)
        if RELOAD:
            wa = weight(into_a + again, wide, neuron, DT, PREC)
        h = tl.dot(z, wa, input_precision=PREC) + ba[None, :]
        h = operand(tl.maximum(h, 0.0), DT, PREC)
        if RELOAD:
            wb = weight(into_b + again, neuron, wide, DT, PREC)
        y = tl.dot(h, wb, input_precision=PREC) + bb[None, :]
        if TRAIN:
            word = masks + sizes.rows * CONST.words
            y = dropped(y * scale, mask_words(word, row, here, sizes, CONST), CONST)
        if LAST:
            normed, rstd = layer_norm(y, CONST)
            z = operand(normed, DT, PREC)
            if TRAIN:
                tl.store(acts.stats + stat + (H + 2) * L, rstd, mask=here)
                tl.store(next_acts.z + at, z, mask=real)
            sample = (n - chunk * S)[None, :] == s[:, None]
            mean = tl.dot(sample.to(DT), z, mean, input_precision=PREC)
        else:
            if RELOAD:
                into_next = w + CONST.layout.blocks[BLOCK + 1].W_QKV + again
                weights = projections(into_next, DT, CONST)
            follow = next_acts.stats + stat + H * L
            project(y, weights, next_acts, follow, first + row, here, CONST)
    if LAST:
        s = chunk * S + s
        to = pooled_ptr + (m * sizes.batch + s).to(tl.int64)[:, None] * D + d[None, :]
        tl.store(to, mean / L, mask=(s < sizes.batch)[:, None] & wide[None, :])
