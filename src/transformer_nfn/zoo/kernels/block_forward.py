"""A transformer block forward, in two kernels: rows to q, k and v, then the rest by samples."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.kernels.inputs import IMAGES, MEMORY, row_patches, row_words
from transformer_nfn.zoo.kernels.shared import (
    LOG2E,
    batch_now,
    dropped,
    layer_norm,
    operand,
)


@triton.jit
def projections_forward(
    x_ptr, z_ptr, qkv_ptr, stat_ptr, patch_ptr, w_ptr, bits_ptr, step_ptr, steps_ptr,
    length_ptr, scale_ptr, order_ptr, sample_ptr, pattern_ptr, vector_ptr, position_ptr,
    crop_ptr, B, ROWS, STEPS, SAMPLES, WIDE, white,
    W: tl.constexpr, QKV: tl.constexpr, EW: tl.constexpr, EB: tl.constexpr,
    SITES: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, PADDING: tl.constexpr, SOURCE: tl.constexpr, TRAIN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """LayerNorm and the projections to q, k and v, on rows as they lie.

    The first block of a network makes its input from the samples themselves: patches or words,
    embedded, with positions and dropout.
    """
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    step, L = batch_now(step_ptr, steps_ptr, length_ptr, m, STEPS)
    if L == 0:
        return
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    r = tl.arange(0, R)
    d = tl.arange(0, D)
    c = tl.arange(0, 4 * D)
    known = (c < 3 * D)[None, :]
    first = m.to(tl.int64) * ROWS
    w = w_ptr + m.to(tl.int64) * W
    into = tl.load(w + QKV + d[:, None] * (3 * D) + c[None, :], mask=known, other=0.0)
    into = operand(into, DT, PREC)
    if SOURCE != MEMORY:
        order = order_ptr + m.to(tl.int64) * SAMPLES + step * B
        crop = crop_ptr + (m * STEPS + step) * 2
        scale = tl.load(scale_ptr + m)
        bits_ptr += m.to(tl.int64) * SITES * ROWS
    if SOURCE == IMAGES:
        p = tl.arange(0, PP)
        we = tl.load(w + EW + p[:, None] * D + d[None, :], mask=(p < P)[:, None], other=0.0)
        we = operand(we, DT, PREC)
        bias = tl.load(w + EB + d)[None, :]
    stop = tl.minimum(chunk * S + S, B) * L
    for begin in range(chunk * S * L, stop, R):
        row = begin + r
        here = row < stop
        real = here[:, None]
        n = row // L
        t = row - n * L
        at = (first + row)[:, None] * D + d[None, :]
        if SOURCE == MEMORY:
            x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
        else:
            place = t[:, None] * D + d[None, :]
            x = tl.load(position_ptr + place, mask=real, other=0.0)
            if SOURCE == IMAGES:
                patches = row_patches(
                    sample_ptr, order, pattern_ptr, n, t, here, crop, WIDE, white, P, PP,
                    PADDING, TRAIN,
                )  # fmt: skip
                patches = operand(patches, DT, PREC)
                if TRAIN:
                    to = patch_ptr + (first + row)[:, None] * PP + p[None, :]
                    tl.store(to, patches, mask=real)
                x += tl.dot(patches, we, input_precision=PREC) + bias
            else:
                x += row_words(sample_ptr, order, vector_ptr, n, t, here, WIDE, D)
            if TRAIN:
                x = dropped(x, tl.load(bits_ptr + row, mask=here, other=0), scale, D)
        normed, rstd = layer_norm(x, D)
        z = operand(normed, DT, PREC)
        if TRAIN:
            tl.store(z_ptr + at, z, mask=real)
            tl.store(stat_ptr + (first + n * L) * 4 + 2 * L + t, rstd, mask=here)
        qkv = operand(tl.dot(z, into, input_precision=PREC), DT, PREC)
        to = qkv_ptr + (first + row)[:, None] * (3 * D) + c[None, :]
        tl.store(to, qkv, mask=real & known)


@triton.jit
def attend(
    qkv_ptr, mask, hidden, lse_ptr, real, D: tl.constexpr, SAVE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One head: ``softmax(q kᵀ) v``; stores the logarithm (base 2) of each row's sum.

    ``hidden`` is −∞ for tokens that are not there, else 0.
    """
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    factor: tl.constexpr = LOG2E / (D // 2) ** 0.5
    q = tl.load(qkv_ptr, mask=mask, other=0.0)
    k = tl.load(qkv_ptr + D, mask=mask, other=0.0)
    v = tl.load(qkv_ptr + 2 * D, mask=mask, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision=PREC) * factor + hidden[None, :]
    top = tl.max(s, 1)
    p = tl.exp2(s - top[:, None])
    total = tl.sum(p, 1)
    if SAVE:
        tl.store(lse_ptr, top + tl.log2(total), mask=real)
    a = tl.dot(operand(p, DT, PREC), v, input_precision=PREC) / total[:, None]
    return operand(a, DT, PREC)


@triton.jit
def block_forward(
    qkv_ptr, out_ptr, a_ptr, y_ptr, stat_ptr, pooled_ptr, w_ptr, bits_ptr, step_ptr, steps_ptr,
    length_ptr, scale_ptr, B, ROWS, STEPS,
    W: tl.constexpr, OUT: tl.constexpr, A: tl.constexpr, BA: tl.constexpr,
    BW: tl.constexpr, BB: tl.constexpr, SITE: tl.constexpr, SITES: tl.constexpr, S: tl.constexpr,
    T: tl.constexpr, SHORTER: tl.constexpr, D: tl.constexpr, FF: tl.constexpr,
    LAST: tl.constexpr, TRAIN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Attention, dropout, LayerNorm, MLP, dropout of samples ``chunk·S …``.

    Rows of a network lie densely, ``length`` a sample; a program leaves networks to the launch
    whose ``T`` fits them (``SHORTER`` < length ≤ ``T``). The last block also means its
    normalised output over tokens. What backward needs again is kept: the heads' outputs, the
    MLP's normalised input, and of each sample the logarithms of softmax's sums (two rows) and
    the reciprocal deviations of both LayerNorms (two rows).
    """
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    _step, L = batch_now(step_ptr, steps_ptr, length_ptr, m, STEPS)
    if (L > T) | (L <= SHORTER):
        return
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    HD: tl.constexpr = D // 2
    t = tl.arange(0, T)
    d = tl.arange(0, D)
    j = tl.arange(0, HD)
    f = tl.arange(0, FF)
    w = w_ptr + m.to(tl.int64) * W
    out_of = w + OUT + j[:, None] * D + d[None, :]
    wo0 = operand(tl.load(out_of), DT, PREC)
    wo1 = operand(tl.load(out_of + HD * D), DT, PREC)
    wa = operand(tl.load(w + A + d[:, None] * FF + f[None, :]), DT, PREC)
    ba = tl.load(w + BA + f)
    wb = operand(tl.load(w + BW + f[:, None] * D + d[None, :]), DT, PREC)
    bb = tl.load(w + BB + d)
    real = t < L
    mask = real[:, None]
    hidden = tl.where(real, 0.0, float("-inf"))
    scale = tl.load(scale_ptr + m)
    first = m.to(tl.int64) * ROWS
    bits_ptr += (m.to(tl.int64) * SITES + SITE) * ROWS
    at = t[:, None] * D + d[None, :]
    for n in range(chunk * S, tl.minimum(chunk * S + S, B)):
        begin = first + n * L
        word = bits_ptr + n * L + t
        row = (begin + t)[:, None]
        stat = stat_ptr + begin * 4 + t
        qkv = qkv_ptr + row * (3 * D) + j[None, :]
        a0 = attend(qkv, mask, hidden, stat, real, D, TRAIN, PREC)
        a1 = attend(qkv + HD, mask, hidden, stat + L, real, D, TRAIN, PREC)
        y = tl.dot(a0, wo0, input_precision=PREC)
        y = tl.dot(a1, wo1, y, input_precision=PREC)
        if TRAIN:
            head = a_ptr + row * D + j[None, :]
            tl.store(head, a0, mask=mask)
            tl.store(head + HD, a1, mask=mask)
            y = dropped(y, tl.load(word, mask=real, other=0), scale, D)
        normed, rstd = layer_norm(y, D)
        z = operand(normed, DT, PREC)
        if TRAIN:
            tl.store(y_ptr + begin * D + at, z, mask=mask)
            tl.store(stat + 3 * L, rstd, mask=real)
        h = tl.dot(z, wa, input_precision=PREC) + ba[None, :]
        h = operand(tl.maximum(h, 0.0), DT, PREC)
        y = tl.dot(h, wb, input_precision=PREC) + bb[None, :]
        if TRAIN:
            y = dropped(y, tl.load(word + ROWS, mask=real, other=0), scale, D)
        y = y.to(DT)
        if TRAIN or not LAST:
            tl.store(out_ptr + begin * D + at, y, mask=mask)
        if LAST:
            normed, _ = layer_norm(y.to(tl.float32), D)
            mean = tl.sum(tl.where(mask, normed, 0.0), 0) / L
            tl.store(pooled_ptr + (m * B + n).to(tl.int64) * D + d, mean)
