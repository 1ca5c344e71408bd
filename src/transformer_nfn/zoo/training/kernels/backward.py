"""Backward kernels: three per transformer block, which sum gradients on the chip.

The MLP with the output projection, and the projections to q, k and v, process rows regardless of
samples. Between them, attention processes a sample at a time and recomputes its probabilities,
transposed, from the logarithms of the row sums, so that only one matrix is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.kernels.shared import (
    LOG2E,
    STATS,
    batch_now,
    dropped,
    gradient_of,
    layer_norm_backward,
    masks_of,
    operand,
    rows_from,
)


@triton.jit
def rows_backward(
    acts, grads, w_ptr, dropout, clock, sizes, CONST: tl.constexpr, BLOCK: tl.constexpr
):
    """Gradient of the heads' outputs ``a`` from that of the MLP's output."""
    S: tl.constexpr = CONST.S
    R: tl.constexpr = CONST.R
    D: tl.constexpr = CONST.D
    FF: tl.constexpr = CONST.FF
    PREC: tl.constexpr = CONST.products
    offset: tl.constexpr = CONST.layout.blocks[BLOCK]
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.a.dtype.element_ty
    d = tl.arange(0, D)
    f = tl.arange(0, FF)
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    wo = operand(tl.load(w + offset.W_O + d[:, None] * D + d[None, :]), DT, PREC)
    wa = operand(tl.load(w + offset.W_A + d[:, None] * FF + f[None, :]), DT, PREC)
    wb = operand(tl.load(w + offset.W_B + f[:, None] * D + d[None, :]), DT, PREC)
    ba = tl.load(w + offset.b_A + f)
    go = tl.zeros((D, D), tl.float32)
    ga = tl.zeros((FF, D), tl.float32)
    gb = tl.zeros((FF, D), tl.float32)
    gba = tl.zeros((R, FF), tl.float32)
    scale = tl.load(dropout.scale + m)
    first = m.to(tl.int64) * sizes.rows
    masks = masks_of(dropout, sizes, m, 1 + 2 * BLOCK, CONST)
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, R):
        row, here, n, t = rows_from(begin, stop, L, R)
        real = here[:, None]
        at = (first + row)[:, None] * D + d[None, :]
        dout = tl.load(grads.x + at, mask=real, other=0.0)
        z = tl.load(acts.y + at, mask=real, other=0.0)
        a = tl.load(acts.a + at, mask=real, other=0.0)
        rstd = tl.load(acts.stats + (first + n * L) * STATS + 3 * L + t, mask=here, other=0.0)
        kept = tl.load(masks + row, mask=here, other=0)
        h = tl.dot(z, wa, input_precision=PREC) + ba[None, :]
        dh = tl.dot(dout, tl.trans(wb), input_precision=PREC)
        dh = tl.where(h > 0, dh, 0.0)
        gba += dh
        dh = operand(dh, DT, PREC)
        h = operand(tl.maximum(h, 0.0), DT, PREC)
        gb = tl.dot(tl.trans(h), dout, gb, input_precision=PREC)
        ga = tl.dot(tl.trans(dh), z, ga, input_precision=PREC)
        dy = tl.dot(dh, tl.trans(wa), input_precision=PREC)
        dy = layer_norm_backward(dy, z.to(tl.float32), rstd * scale, D)
        dy = operand(dropped(dy, kept, D), DT, PREC)
        go = tl.dot(tl.trans(a), dy, go, input_precision=PREC)
        da = tl.dot(dy, tl.trans(wo), input_precision=PREC)
        tl.store(grads.a + at, operand(da, DT, PREC), mask=real)
    grad = gradient_of(grads, sizes, chunk, m, CONST)
    # Adding a zero unknown to the compiler, which else keeps these addresses through the loop.
    d += sizes.zero
    f += sizes.zero
    tl.store(grad + offset.W_O + d[:, None] * D + d[None, :], go)
    tl.store(grad + offset.W_A + d[None, :] * FF + f[:, None], ga)
    tl.store(grad + offset.W_B + f[:, None] * D + d[None, :], gb)
    tl.store(grad + offset.b_A + f, tl.sum(gba, 0))


@triton.jit
def attention_backward(
    acts, grads, clock, sizes, CONST: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr
):
    """Gradient of a head's q, k and v from that of its outputs, ``KEYS`` at a time.

    Both heads of a network are neighbours in the grid, because memory transactions span both
    halves of a row.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    T: tl.constexpr = TILE.tokens
    SHORTER: tl.constexpr = TILE.shorter
    PREC: tl.constexpr = CONST.products
    m = tl.program_id(0) // 2
    head = tl.program_id(0) % 2
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if (L > T) | (L <= SHORTER):
        return
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    HD: tl.constexpr = D // 2
    root: tl.constexpr = 1.0 / HD**0.5
    t = tl.arange(0, T)
    u = tl.arange(0, KEYS)
    j = head * HD + tl.arange(0, HD)
    real = t < L
    mask = real[:, None]
    first = m.to(tl.int64) * sizes.rows
    for n in range(chunk * S, tl.minimum(chunk * S + S, sizes.batch)):
        begin = first + n * L
        at = (begin + t)[:, None] * (3 * D) + j[None, :]
        q = tl.load(acts.qkv + at, mask=mask, other=0.0)
        out_of = (begin + t)[:, None] * D + j[None, :]
        da = tl.load(grads.a + out_of, mask=mask, other=0.0)
        a = tl.load(acts.a + out_of, mask=mask, other=0.0)
        delta = tl.sum(da.to(tl.float32) * a.to(tl.float32), 1) * root
        lse = tl.load(acts.stats + begin * STATS + head * L + t, mask=real, other=0.0)
        dq = tl.zeros((T, HD), tl.float32)
        for i in tl.static_range(T // KEYS):
            near = (i * KEYS + u < L)[:, None]
            to = (begin + i * KEYS + u)[:, None] * (3 * D) + j[None, :]
            k = tl.load(acts.qkv + to + D, mask=near, other=0.0)
            v = tl.load(acts.qkv + to + 2 * D, mask=near, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision=PREC)
            prob = tl.exp2(s * (LOG2E * root) - lse[None, :])
            if (i + 1) * KEYS > SHORTER + 1:
                prob = tl.where(near, prob, 0.0)
            dv = tl.dot(operand(prob, DT, PREC), da, input_precision=PREC)
            tl.store(grads.qkv + to + 2 * D, operand(dv, DT, PREC), mask=near)
            dprob = tl.dot(v, tl.trans(da), input_precision=PREC)
            ds = operand(prob * (dprob * root - delta[None, :]), DT, PREC)
            dk = tl.dot(ds, q, input_precision=PREC)
            tl.store(grads.qkv + to + D, operand(dk, DT, PREC), mask=near)
            dq = tl.dot(tl.trans(ds), k, dq, input_precision=PREC)
        tl.store(grads.qkv + at, operand(dq, DT, PREC), mask=mask)


@triton.jit
def projections_backward(
    acts, grads, patch_ptr, w_ptr, dropout, clock, sizes, CONST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of the block's input before dropout, from that of q, k and v.

    It also gives the gradient of the last bias of the block before or, for images, of the
    embedding's weights; word vectors have no weights.
    """
    S: tl.constexpr = CONST.S
    R: tl.constexpr = CONST.R
    D: tl.constexpr = CONST.D
    PP: tl.constexpr = CONST.PP
    PREC: tl.constexpr = CONST.products
    IMAGES: tl.constexpr = (BLOCK == 0) and (CONST.P > 0)
    WORDS: tl.constexpr = (BLOCK == 0) and (CONST.P == 0)
    W_QKV: tl.constexpr = CONST.layout.blocks[BLOCK].W_QKV
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.z.dtype.element_ty
    d = tl.arange(0, D)
    c = tl.arange(0, 4 * D)
    known = c < 3 * D
    first = m.to(tl.int64) * sizes.rows
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    into = tl.load(w + W_QKV + d[None, :] * (3 * D) + c[:, None], mask=known[:, None], other=0.0)
    into = operand(into, DT, PREC)
    g = tl.zeros((4 * D, D), tl.float32)
    if not WORDS:
        scale = tl.load(dropout.scale + m)
        masks = masks_of(dropout, sizes, m, 2 * BLOCK, CONST)
        gb = tl.zeros((R, D), tl.float32)
    if IMAGES:
        p = tl.arange(0, PP)
        ge = tl.zeros((D, PP), tl.float32)
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, R):
        row, here, n, t = rows_from(begin, stop, L, R)
        real = here[:, None]
        at = (first + row)[:, None] * D + d[None, :]
        dqkv = grads.qkv + (first + row)[:, None] * (3 * D) + c[None, :]
        dqkv = tl.load(dqkv, mask=real & known[None, :], other=0.0)
        z = tl.load(acts.z + at, mask=real, other=0.0)
        g = tl.dot(tl.trans(dqkv), z, g, input_precision=PREC)
        if not WORDS:
            rstd = tl.load(acts.stats + (first + n * L) * STATS + 2 * L + t, mask=here, other=0.0)
            kept = tl.load(masks + row, mask=here, other=0)
            dz = tl.dot(dqkv, into, input_precision=PREC)
            dx = layer_norm_backward(dz, z.to(tl.float32), rstd * scale, D)
            dx = dropped(dx, kept, D)
            gb += dx
        if BLOCK > 0:
            tl.store(grads.x + at, operand(dx, DT, PREC), mask=real)
        if IMAGES:
            patches = patch_ptr + (first + row)[:, None] * PP + p[None, :]
            patches = tl.load(patches, mask=real, other=0.0)
            dx = tl.trans(operand(dx, DT, PREC))
            ge = tl.dot(dx, patches, ge, input_precision=PREC)
    grad = gradient_of(grads, sizes, chunk, m, CONST)
    # Adding a zero unknown to the compiler, which else keeps these addresses through the loop.
    d += sizes.zero
    c += sizes.zero
    tl.store(grad + W_QKV + d[None, :] * (3 * D) + c[:, None], g, mask=known[:, None])
    if BLOCK > 0:
        tl.store(grad + CONST.layout.blocks[BLOCK - 1].b_B + d, tl.sum(gb, 0))
    if IMAGES:
        offset: tl.constexpr = CONST.layout.embedding
        tl.store(grad + offset.b + d, tl.sum(gb, 0))
        tl.store(grad + offset.W + p[None, :] * D + d[:, None], ge, mask=(p < CONST.P)[None, :])
