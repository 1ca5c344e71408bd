"""Forward kernels: the embedding, then one kernel per transformer block."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.kernels.shared import (
    LOG2E,
    STATS,
    batch_now,
    dropped,
    hash_word,
    layer_norm,
    masks_of,
    operand,
    rows_from,
)


@triton.jit
def row_patches(samples, order_ptr, crop_ptr, n, t, here, CONST: tl.constexpr):
    """Patches ``t`` of images ``n``, randomly cropped in training; white is 1, black −1."""
    P: tl.constexpr = CONST.P
    wide = samples.wide
    p = tl.arange(0, CONST.PP)
    inside = here[:, None] & (p < P)[None, :]
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
    pixels = tl.load(samples.stored + start[:, None] + within[None, :], mask=inside, other=0)
    return tl.where(inside, pixels.to(tl.float32) * (2.0 / samples.white) - 1.0, 0.0)


@triton.jit
def row_words(samples, order_ptr, n, t, here, D: tl.constexpr):
    """Word vectors ``t`` of texts ``n``; zero past the end of a text."""
    sample = tl.load(order_ptr + n, mask=here, other=0).to(tl.int64)
    there = here & (t < samples.wide)
    token = tl.load(samples.stored + sample * samples.wide + t, mask=there, other=0).to(tl.int64)
    at = token[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(samples.table + at, mask=here[:, None], other=0.0)


@triton.jit
def projections(w_ptr, D: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """The weights to q, to k and to v, as operands."""
    d = tl.arange(0, D)
    at = w_ptr + d[:, None] * (3 * D) + d[None, :]
    to_q = operand(tl.load(at), DT, PREC)
    to_k = operand(tl.load(at + D), DT, PREC)
    to_v = operand(tl.load(at + 2 * D), DT, PREC)
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
    d = tl.arange(0, D)
    real = here[:, None]
    normed, rstd = layer_norm(x, D)
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
def embed(acts, patch_ptr, w_ptr, dropout, clock, samples, sizes, CONST: tl.constexpr):
    """Embed the samples and compute q, k and v of the first block."""
    S: tl.constexpr = CONST.S
    R: tl.constexpr = CONST.R
    D: tl.constexpr = CONST.D
    PP: tl.constexpr = CONST.PP
    PREC: tl.constexpr = CONST.products
    IMAGES: tl.constexpr = CONST.P > 0
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    d = tl.arange(0, D)
    first = m.to(tl.int64) * sizes.rows
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    order = clock.order + m.to(tl.int64) * sizes.samples + step * sizes.batch
    crop = clock.crop + (m * sizes.steps + step) * 2
    scale = tl.load(dropout.scale + m)
    masks = masks_of(dropout, sizes, m, 0, CONST)
    weights = projections(w + CONST.layout.blocks[0].W_QKV, D, DT, PREC)
    if IMAGES:
        offset: tl.constexpr = CONST.layout.embedding
        p = tl.arange(0, PP)
        known = (p < CONST.P)[:, None]
        we = tl.load(w + offset.W + p[:, None] * D + d[None, :], mask=known, other=0.0)
        we = operand(we, DT, PREC)
        bias = tl.load(w + offset.b + d)[None, :]
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, R):
        row, here, n, t = rows_from(begin, stop, L, R)
        real = here[:, None]
        place = t[:, None] * D + d[None, :]
        x = tl.load(samples.positions + place, mask=real, other=0.0)
        if IMAGES:
            patches = row_patches(samples, order, crop, n, t, here, CONST)
            patches = operand(patches, DT, PREC)
            if CONST.train:
                to = patch_ptr + (first + row)[:, None] * PP + p[None, :]
                tl.store(to, patches, mask=real)
            x += tl.dot(patches, we, input_precision=PREC) + bias
        else:
            x += row_words(samples, order, n, t, here, D)
        if CONST.train:
            x = dropped(x * scale, tl.load(masks + row, mask=here, other=0), D)
        stat = acts.stats + (first + n * L) * STATS + 2 * L + t
        project(x, weights, acts, stat, first + row, here, CONST)


@triton.jit
def attend(q_ptr, k_ptr, rows, keys, hidden, lse_ptr, real, CONST: tl.constexpr):
    """One head: ``softmax(q kᵀ) v``; stores the base-2 logarithm of each row's sum.

    ``hidden`` is −∞ for padded keys, else 0; v lies ``D`` after k.
    """
    D: tl.constexpr = CONST.D
    PREC: tl.constexpr = CONST.products
    DT: tl.constexpr = q_ptr.dtype.element_ty
    factor: tl.constexpr = LOG2E / (D // 2) ** 0.5
    q = tl.load(q_ptr, mask=rows, other=0.0)
    k = tl.load(k_ptr, mask=keys, other=0.0)
    v = tl.load(k_ptr + D, mask=keys, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PREC) * factor + hidden[None, :]
    top = tl.max(s, 1)
    p = tl.exp2(s - top[:, None])
    total = tl.sum(p, 1)
    if CONST.train:
        tl.store(lse_ptr, top + tl.log2(total), mask=real)
    a = tl.dot(operand(p, DT, PREC), v, input_precision=PREC) / total[:, None]
    return operand(a, DT, PREC)


@triton.jit
def block_forward(
    acts, next_acts, pooled_ptr, w_ptr, dropout, clock, sizes, CONST: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Attention, dropout, LayerNorm, MLP, dropout of samples ``chunk·S …``.

    Rows of a network are dense, ``length`` per sample. A launch processes the networks that fit
    its tile (``TILE.shorter`` < length ≤ ``TILE.tokens``), ``QUERIES`` tokens of a sample at a
    time with all keys. The output is normalised; the last block averages it over tokens, the
    others project it to the next block's q, k and v. Stored for backward: the heads' outputs,
    the outputs of LayerNorms (``next_acts.z``: of the one after the block), and ``STATS``.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    FF: tl.constexpr = CONST.FF
    T: tl.constexpr = TILE.tokens
    SHORTER: tl.constexpr = TILE.shorter
    PREC: tl.constexpr = CONST.products
    TRAIN: tl.constexpr = CONST.train
    LAST: tl.constexpr = len(CONST.layout.blocks) == BLOCK + 1
    offset: tl.constexpr = CONST.layout.blocks[BLOCK]
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if (L > T) | (L <= SHORTER):
        return
    B = sizes.batch
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    HD: tl.constexpr = D // 2
    u = tl.arange(0, T)
    d = tl.arange(0, D)
    j = tl.arange(0, HD)
    f = tl.arange(0, FF)
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    out_of = w + offset.W_O + j[:, None] * D + d[None, :]
    wo0 = operand(tl.load(out_of), DT, PREC)
    wo1 = operand(tl.load(out_of + HD * D), DT, PREC)
    wa = operand(tl.load(w + offset.W_A + d[:, None] * FF + f[None, :]), DT, PREC)
    ba = tl.load(w + offset.b_A + f)
    wb = operand(tl.load(w + offset.W_B + f[:, None] * D + d[None, :]), DT, PREC)
    bb = tl.load(w + offset.b_B + d)
    if not LAST:
        weights = projections(w + CONST.layout.blocks[BLOCK + 1].W_QKV, D, DT, PREC)
    keys = (u < L)[:, None]
    hidden = tl.where(u < L, 0.0, float("-inf"))
    scale = tl.load(dropout.scale + m)
    first = m.to(tl.int64) * sizes.rows
    masks = masks_of(dropout, sizes, m, 1 + 2 * BLOCK, CONST)
    for n in range(chunk * S, tl.minimum(chunk * S + S, B)):
        begin = first + n * L
        k = acts.qkv + (begin + u)[:, None] * (3 * D) + D + j[None, :]
        mean = tl.zeros((D,), tl.float32)
        for i in range(T // QUERIES):
            t = i * QUERIES + tl.arange(0, QUERIES)
            real = t < L
            mask = real[:, None]
            word = masks + n * L + t
            row = (begin + t)[:, None]
            at = t[:, None] * D + d[None, :]
            stat = acts.stats + begin * STATS + t
            q = acts.qkv + row * (3 * D) + j[None, :]
            a0 = attend(q, k, mask, keys, hidden, stat, real, CONST)
            a1 = attend(q + HD, k + HD, mask, keys, hidden, stat + L, real, CONST)
            y = tl.dot(a0, wo0, input_precision=PREC)
            y = tl.dot(a1, wo1, y, input_precision=PREC)
            if TRAIN:
                head = acts.a + row * D + j[None, :]
                tl.store(head, a0, mask=mask)
                tl.store(head + HD, a1, mask=mask)
                y = dropped(y * scale, tl.load(word, mask=real, other=0), D)
            normed, rstd = layer_norm(y, D)
            z = operand(normed, DT, PREC)
            if TRAIN:
                tl.store(acts.y + begin * D + at, z, mask=mask)
                tl.store(stat + 3 * L, rstd, mask=real)
            h = tl.dot(z, wa, input_precision=PREC) + ba[None, :]
            h = operand(tl.maximum(h, 0.0), DT, PREC)
            y = tl.dot(h, wb, input_precision=PREC) + bb[None, :]
            if TRAIN:
                y = dropped(y * scale, tl.load(word + sizes.rows, mask=real, other=0), D)
            if LAST:
                y, rstd = layer_norm(y, D)
                mean += tl.sum(tl.where(mask, y, 0.0), 0)
                if TRAIN:
                    tl.store(stat + 4 * L, rstd, mask=real)
                    tl.store(next_acts.z + begin * D + at, operand(y, DT, PREC), mask=mask)
            else:
                follow = next_acts.stats + begin * STATS + 2 * L + t
                project(y, weights, next_acts, follow, begin + t, real, CONST)
        if LAST:
            tl.store(pooled_ptr + (m * B + n).to(tl.int64) * D + d, mean / L)
