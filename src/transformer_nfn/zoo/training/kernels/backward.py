"""Backward kernels: three per transformer block (four if wide), which sum gradients on the chip.

The MLP with the output projection, and the projections to q, k and v, process rows regardless of
samples. Between them, attention processes a sample at a time and recomputes its probabilities,
transposed, from the logarithms of the row sums, so that only one matrix is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.kernels.shared import (
    LOG2E,
    batch_now,
    dropped,
    gradient_of,
    halved,
    inside,
    layer_norm_backward,
    mask_words,
    masks_of,
    network_of,
    operand,
    rows_from,
    weight,
)


@triton.jit
def neurons(w_ptr, i, known, DT: tl.constexpr, CONST: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of neurons ``i`` of a block's MLP: to them, from them and their biases.

    ``known`` are those that the network has.
    """
    D: tl.constexpr = CONST.D
    F: tl.constexpr = CONST.F
    PREC: tl.constexpr = CONST.products
    offset: tl.constexpr = CONST.layout.blocks[BLOCK]
    d = tl.arange(0, CONST.DD)
    wide = inside(d, D, CONST.DD)
    wa = weight(w_ptr + offset.W_A + d[:, None] * F + i[None, :], wide, known, DT, PREC)
    wb = weight(w_ptr + offset.W_B + i[:, None] * D + d[None, :], known, wide, DT, PREC)
    return wa, wb, tl.load(w_ptr + offset.b_A + i, mask=known, other=0.0)


@triton.jit
def added(total, product):
    """Sum of ``total`` and a product, apart from the product.

    Accumulated in tensor cores instead, a product that nothing else in a loop waits for would stay
    in flight, and the assembler would then serialise all products of the loop.
    """
    return tl.fma(product, 1.0, total)


@triton.jit
def rows_backward(
    acts, grads, w_ptr, dropout, clock, sizes, CONST: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, NEURONS: tl.constexpr,
):  # fmt: skip
    """Gradient of the heads' outputs ``a`` from that of the MLP's output, ``ROWS`` at a time.

    If the MLP has at most ``NEURONS`` it sums the gradients of their weights too. Else it takes so
    many at a time and leaves these to `mlp_gradients`: registers hold them for few neurons only.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    DD: tl.constexpr = CONST.DD
    F: tl.constexpr = CONST.F
    N: tl.constexpr = min(NEURONS, CONST.FF)
    PARTS: tl.constexpr = (F + N - 1) // N
    PREC: tl.constexpr = CONST.products
    offset: tl.constexpr = CONST.layout.blocks[BLOCK]
    m = network_of(tl.program_id(0), clock, sizes, CONST)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.a.dtype.element_ty
    d = tl.arange(0, DD)
    f = tl.arange(0, N)
    wide = inside(d, D, DD)
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    wo = weight(w + offset.W_O + d[:, None] * D + d[None, :], wide, wide, DT, PREC)
    go = tl.zeros((DD, DD), tl.float32)
    weights = ()
    for part in tl.static_range(PARTS):
        i = part * N + f
        known = inside(i, F, (part + 1) * N)
        weights += (neurons(w, i, known, DT, CONST, BLOCK),)  # type: ignore[assignment]
    if PARTS == 1:
        ga = tl.zeros((N, DD), tl.float32)
        gb = tl.zeros((N, DD), tl.float32)
        gba = halved(tl.zeros((ROWS, N), tl.float32))
    scale = tl.load(dropout.scale + m)
    first = m.to(tl.int64) * sizes.rows
    masks = masks_of(dropout, sizes, m, 1 + 2 * BLOCK, CONST)
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, ROWS):
        row, here, n, t = rows_from(begin, stop, L, ROWS)
        real = here[:, None] & wide[None, :]
        at = (first + row)[:, None] * D + d[None, :]
        dout = tl.load(grads.x + at, mask=real, other=0.0)
        z = tl.load(acts.y + at, mask=real, other=0.0)
        a = tl.load(acts.a + at, mask=real, other=0.0)
        stat = acts.stats + (first + n * L) * CONST.stats + (CONST.H + 1) * L + t
        rstd = tl.load(stat, mask=here, other=0.0)
        kept = mask_words(masks, row, here, sizes, CONST)
        dy = tl.zeros((ROWS, DD), tl.float32)
        for part in tl.static_range(PARTS):
            wa, wb, ba = weights[part]  # type: ignore[var-annotated]
            h = tl.dot(z, wa, input_precision=PREC)
            dh = tl.dot(dout, tl.trans(wb), input_precision=PREC)
            if PARTS == 1:
                h += ba[None, :]
                dh = tl.where(h > 0, dh, 0.0)
                gba += halved(dh)
            else:
                dh = tl.where(h > -ba[None, :], dh, 0.0)
            dh = operand(dh, DT, PREC)
            if PARTS == 1:
                h = operand(tl.maximum(h, 0.0), DT, PREC)
                gb = tl.dot(tl.trans(h), dout, gb, input_precision=PREC)
                ga = tl.dot(tl.trans(dh), z, ga, input_precision=PREC)
            dy = tl.dot(dh, tl.trans(wa), dy, input_precision=PREC)
        dy = layer_norm_backward(dy, z.to(tl.float32), rstd * scale, CONST)
        dy = operand(dropped(dy, kept, CONST), DT, PREC)
        go = tl.dot(tl.trans(a), dy, go, input_precision=PREC)
        da = tl.dot(dy, tl.trans(wo), input_precision=PREC)
        tl.store(grads.a + at, operand(da, DT, PREC), mask=real)
    grad = gradient_of(grads, sizes, chunk, m, CONST)
    # Adding a zero unknown to the compiler, which else keeps these addresses through the loop.
    d += sizes.zero
    wide = inside(d, D, DD)
    square = wide[:, None] & wide[None, :]
    tl.store(grad + offset.W_O + d[:, None] * D + d[None, :], go, mask=square)
    if PARTS == 1:
        f += sizes.zero
        known = inside(f, F, N)
        both = known[:, None] & wide[None, :]
        tl.store(grad + offset.W_A + d[None, :] * F + f[:, None], ga, mask=both)
        tl.store(grad + offset.W_B + f[:, None] * D + d[None, :], gb, mask=both)
        tl.store(grad + offset.b_A + f, tl.sum(gba, 0), mask=known)


@triton.jit
def mlp_gradients(
    acts, grads, w_ptr, clock, sizes, CONST: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, NEURONS: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights of ``NEURONS`` neurons of an MLP from that of its output.

    The neurons of a network are neighbours in the grid, because they read the same rows.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    DD: tl.constexpr = CONST.DD
    F: tl.constexpr = CONST.F
    PARTS: tl.constexpr = (F + NEURONS - 1) // NEURONS
    PREC: tl.constexpr = CONST.products
    offset: tl.constexpr = CONST.layout.blocks[BLOCK]
    m = network_of(tl.program_id(0) // PARTS, clock, sizes, CONST)
    part = tl.program_id(0) % PARTS
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.y.dtype.element_ty
    d = tl.arange(0, DD)
    f = part * NEURONS + tl.arange(0, NEURONS)
    wide = inside(d, D, DD)
    known = f < F
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    wa = weight(w + offset.W_A + d[None, :] * F + f[:, None], known, wide, DT, PREC)
    wb = weight(w + offset.W_B + f[:, None] * D + d[None, :], known, wide, DT, PREC)
    ba = tl.load(w + offset.b_A + f, mask=known, other=0.0)[:, None]
    ga = tl.zeros((NEURONS, DD), tl.float32)
    gb = tl.zeros((NEURONS, DD), tl.float32)
    gba = tl.zeros((NEURONS,), tl.float32)
    first = m.to(tl.int64) * sizes.rows
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        real = (row < stop)[:, None] & wide[None, :]
        at = (first + row)[:, None] * D + d[None, :]
        dout = tl.load(grads.x + at, mask=real, other=0.0)
        z = tl.load(acts.y + at, mask=real, other=0.0)
        # Transposed, with neurons as rows, h and dh are operands from registers.
        h = tl.dot(wa, tl.trans(z), input_precision=PREC)
        dh = tl.dot(wb, tl.trans(dout), input_precision=PREC)
        dh = tl.where(h > -ba, dh, 0.0)
        gba += tl.sum(dh, 1)
        h = operand(tl.maximum(h, -ba) + ba, DT, PREC)
        gb = added(gb, tl.dot(h, dout, input_precision=PREC))
        ga = added(ga, tl.dot(operand(dh, DT, PREC), z, input_precision=PREC))
    grad = gradient_of(grads, sizes, chunk, m, CONST)
    # Adding a zero unknown to the compiler, which else keeps these addresses through the loop.
    d += sizes.zero
    f += sizes.zero
    known = f < F
    both = known[:, None] & inside(d, D, DD)[None, :]
    tl.store(grad + offset.W_A + d[None, :] * F + f[:, None], ga, mask=both)
    tl.store(grad + offset.W_B + f[:, None] * D + d[None, :], gb, mask=both)
    tl.store(grad + offset.b_A + f, gba, mask=known)


@triton.jit
def keys_backward(
    dq, q, da, delta, lse, qkv_ptr, grad_ptr, near, known, CONST: tl.constexpr, CUT: tl.constexpr
):
    """Store the gradient of some keys and values of a head, and add theirs to that of q.

    ``near`` are the keys that the sample has; with ``CUT`` some of the others are among these.
    """
    D: tl.constexpr = CONST.D
    PREC: tl.constexpr = CONST.products
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    root: tl.constexpr = 1.0 / CONST.J**0.5
    part = near & known
    k = tl.load(qkv_ptr + D, mask=part, other=0.0)
    v = tl.load(qkv_ptr + 2 * D, mask=part, other=0.0)
    s = tl.dot(k, tl.trans(q), input_precision=PREC)
    prob = tl.exp2(s * (LOG2E * root) - lse[None, :])
    if CUT:
        prob = tl.where(near, prob, 0.0)
    dv = tl.dot(operand(prob, DT, PREC), da, input_precision=PREC)
    tl.store(grad_ptr + 2 * D, operand(dv, DT, PREC), mask=part)
    dprob = tl.dot(v, tl.trans(da), input_precision=PREC)
    ds = operand(prob * (dprob * root - delta[None, :]), DT, PREC)
    dk = tl.dot(ds, q, input_precision=PREC)
    tl.store(grad_ptr + D, operand(dk, DT, PREC), mask=part)
    return tl.dot(tl.trans(ds), k, dq, input_precision=PREC)


@triton.jit
def attention_backward(acts, grads, clock, sizes, CONST: tl.constexpr, KEYS: tl.constexpr):
    """Gradient of a head's q, k and v from that of its outputs, for images, ``KEYS`` at a time.

    The heads of a network are neighbours in the grid, because memory transactions span parts of
    a row that belong to several.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    J: tl.constexpr = CONST.J
    JJ: tl.constexpr = CONST.JJ
    T: tl.constexpr = CONST.TT
    PREC: tl.constexpr = CONST.products
    m = tl.program_id(0) // CONST.H
    head = tl.program_id(0) % CONST.H
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    # By this range the compiler knows most tokens of the tile to be there.
    if (L > T) | (L < CONST.T):
        return
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    root: tl.constexpr = 1.0 / J**0.5
    t = tl.arange(0, T)
    u = tl.arange(0, KEYS)
    known = inside(tl.arange(0, JJ), J, JJ)[None, :]
    j = head * J + tl.arange(0, JJ)
    real = t < L
    mask = real[:, None] & known
    first = m.to(tl.int64) * sizes.rows
    for n in range(chunk * S, tl.minimum(chunk * S + S, sizes.batch)):
        begin = first + n * L
        at = (begin + t)[:, None] * (3 * D) + j[None, :]
        q = tl.load(acts.qkv + at, mask=mask, other=0.0)
        out_of = (begin + t)[:, None] * D + j[None, :]
        da = tl.load(grads.a + out_of, mask=mask, other=0.0)
        a = tl.load(acts.a + out_of, mask=mask, other=0.0)
        delta = tl.sum(da.to(tl.float32) * a.to(tl.float32), 1) * root
        lse = tl.load(acts.stats + begin * CONST.stats + head * L + t, mask=real, other=0.0)
        dq = tl.zeros((T, JJ), tl.float32)
        for i in tl.static_range(T // KEYS):
            to = (begin + i * KEYS + u)[:, None] * (3 * D) + j[None, :]
            near = (i * KEYS + u < L)[:, None]
            dq = keys_backward(
                dq, q, da, delta, lse, acts.qkv + to, grads.qkv + to, near, known, CONST,
                (i + 1) * KEYS > CONST.T,
            )  # fmt: skip
        tl.store(grads.qkv + at, operand(dq, DT, PREC), mask=mask)


@triton.jit
def projections_backward(
    acts, grads, patch_ptr, w_ptr, dropout, clock, sizes, CONST: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of the block's input before dropout, from that of q, k and v.

    It also gives the gradient of the last bias of the block before or, for images, of the
    embedding's weights; word vectors have no weights.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    DD: tl.constexpr = CONST.DD
    # From width 33 on, q, k and v one by one, which are padded less than all three together.
    PARTS: tl.constexpr = 1 if DD <= 32 else 3
    E: tl.constexpr = 3 * D // PARTS
    EE: tl.constexpr = CONST.DDD if DD <= 32 else DD
    PP: tl.constexpr = CONST.PP
    PREC: tl.constexpr = CONST.products
    IMAGES: tl.constexpr = (BLOCK == 0) and (CONST.P > 0)
    WORDS: tl.constexpr = (BLOCK == 0) and (CONST.P == 0)
    W_QKV: tl.constexpr = CONST.layout.blocks[BLOCK].W_QKV
    m = network_of(tl.program_id(0), clock, sizes, CONST)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.z.dtype.element_ty
    d = tl.arange(0, DD)
    c = tl.arange(0, EE)
    wide = inside(d, D, DD)
    known = inside(c, E, EE)
    first = m.to(tl.int64) * sizes.rows
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    into = ()
    g = ()
    for part in tl.static_range(PARTS):
        to = w + W_QKV + part * E + d[None, :] * (3 * D) + c[:, None]
        into += (weight(to, known, wide, DT, PREC),)  # type: ignore[assignment]
        g += (tl.zeros((EE, DD), tl.float32),)  # type: ignore[assignment]
    if not WORDS:
        scale = tl.load(dropout.scale + m)
        masks = masks_of(dropout, sizes, m, 2 * BLOCK, CONST)
        gb = halved(tl.zeros((ROWS, DD), tl.float32))
    if IMAGES:
        p = tl.arange(0, PP)
        ge = tl.zeros((DD, PP), tl.float32)
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, ROWS):
        row, here, n, t = rows_from(begin, stop, L, ROWS)
        real = here[:, None] & wide[None, :]
        at = (first + row)[:, None] * D + d[None, :]
        z = tl.load(acts.z + at, mask=real, other=0.0)
        dz = tl.zeros((ROWS, DD), tl.float32)
        sums = g
        g = ()
        for part in tl.static_range(PARTS):
            dqkv = grads.qkv + part * E + (first + row)[:, None] * (3 * D) + c[None, :]
            dqkv = tl.load(dqkv, mask=here[:, None] & known[None, :], other=0.0)
            more = tl.dot(tl.trans(dqkv), z, sums[part], input_precision=PREC)
            g += (more,)  # type: ignore[assignment]
            if not WORDS:
                dz = tl.dot(dqkv, into[part], dz, input_precision=PREC)
        if not WORDS:
            stat = acts.stats + (first + n * L) * CONST.stats + CONST.H * L + t
            rstd = tl.load(stat, mask=here, other=0.0)
            kept = mask_words(masks, row, here, sizes, CONST)
            dx = layer_norm_backward(dz, z.to(tl.float32), rstd * scale, CONST)
            dx = dropped(dx, kept, CONST)
            gb += halved(dx)
        if BLOCK > 0:
            tl.store(grads.x + at, operand(dx, DT, PREC), mask=real)
        if IMAGES:
            patches = patch_ptr + (first + row)[:, None] * PP + p[None, :]
            patches = tl.load(patches, mask=here[:, None], other=0.0)
            dx = tl.trans(operand(dx, DT, PREC))
            ge = added(ge, tl.dot(dx, patches, input_precision=PREC))
    grad = gradient_of(grads, sizes, chunk, m, CONST)
    # Adding a zero unknown to the compiler, which else keeps these addresses through the loop.
    d += sizes.zero
    c += sizes.zero
    wide = inside(d, D, DD)
    square = known[:, None] & wide[None, :]
    for part in tl.static_range(PARTS):
        to = grad + W_QKV + part * E + d[None, :] * (3 * D) + c[:, None]
        tl.store(to, g[part], mask=square)
    if BLOCK > 0:
        tl.store(grad + CONST.layout.blocks[BLOCK - 1].b_B + d, tl.sum(gb, 0), mask=wide)
    if IMAGES:
        offset: tl.constexpr = CONST.layout.embedding
        tl.store(grad + offset.b + d, tl.sum(gb, 0), mask=wide)
        square = wide[:, None] & (p < CONST.P)[None, :]
        tl.store(grad + offset.W + p[None, :] * D + d[:, None], ge, mask=square)
