"""Forward: an embedding, then a transformer block a kernel, each up to the next q, k and v."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.backends.kernels.inputs import IMAGES, row_patches, row_words
from transformer_nfn.zoo.training.backends.kernels.shared import (
    LOG2E,
    STATS,
    batch_now,
    dropped,
    layer_norm,
    operand,
    rows_from,
)


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
def project(
    x, to_q, to_k, to_v, z_ptr, qkv_ptr, stat_ptr, row, here, D: tl.constexpr,
    SAVE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """LayerNorm of the rows ``x``, numbered ``row``, and their q, k and v.

    ``stat_ptr`` is each row's own place.
    """
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    d = tl.arange(0, D)
    real = here[:, None]
    normed, rstd = layer_norm(x, D)
    z = operand(normed, DT, PREC)
    if SAVE:
        tl.store(z_ptr + row[:, None] * D + d[None, :], z, mask=real)
        tl.store(stat_ptr, rstd, mask=here)
    to = qkv_ptr + row[:, None] * (3 * D) + d[None, :]
    q = tl.dot(z, to_q, input_precision=PREC)
    tl.store(to, operand(q, DT, PREC), mask=real)
    k = tl.dot(z, to_k, input_precision=PREC)
    tl.store(to + D, operand(k, DT, PREC), mask=real)
    v = tl.dot(z, to_v, input_precision=PREC)
    tl.store(to + 2 * D, operand(v, DT, PREC), mask=real)


@triton.jit
def embed(
    z_ptr, qkv_ptr, stat_ptr, patch_ptr, w_ptr, bits_ptr, step_ptr, steps_ptr, length_ptr,
    scale_ptr, order_ptr, sample_ptr, pattern_ptr, vector_ptr, position_ptr, crop_ptr, B, ROWS,
    STEPS, SAMPLES, WIDE, white,
    W: tl.constexpr, QKV: tl.constexpr, EW: tl.constexpr, EB: tl.constexpr,
    SITES: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, PADDING: tl.constexpr, SOURCE: tl.constexpr, TRAIN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """From the samples themselves to the first block's q, k and v, on rows as they lie."""
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    step, L = batch_now(step_ptr, steps_ptr, length_ptr, m, STEPS)
    if L == 0:
        return
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    d = tl.arange(0, D)
    first = m.to(tl.int64) * ROWS
    w = w_ptr + m.to(tl.int64) * W
    order = order_ptr + m.to(tl.int64) * SAMPLES + step * B
    crop = crop_ptr + (m * STEPS + step) * 2
    scale = tl.load(scale_ptr + m)
    bits_ptr += m.to(tl.int64) * SITES * ROWS
    to_q, to_k, to_v = projections(w + QKV, D, DT, PREC)
    if SOURCE == IMAGES:
        p = tl.arange(0, PP)
        we = tl.load(w + EW + p[:, None] * D + d[None, :], mask=(p < P)[:, None], other=0.0)
        we = operand(we, DT, PREC)
        bias = tl.load(w + EB + d)[None, :]
    stop = tl.minimum(chunk * S + S, B) * L
    for begin in range(chunk * S * L, stop, R):
        row, here, n, t = rows_from(begin, stop, L, R)
        real = here[:, None]
        place = t[:, None] * D + d[None, :]
        x = tl.load(position_ptr + place, mask=real, other=0.0)
        if SOURCE == IMAGES:
            patches = row_patches(
                sample_ptr, order, pattern_ptr, n, t, here, crop, WIDE, white, P, PP, PADDING,
                TRAIN,
            )  # fmt: skip
            patches = operand(patches, DT, PREC)
            if TRAIN:
                to = patch_ptr + (first + row)[:, None] * PP + p[None, :]
                tl.store(to, patches, mask=real)
            x += tl.dot(patches, we, input_precision=PREC) + bias
        else:
            x += row_words(sample_ptr, order, vector_ptr, n, t, here, WIDE, D)
        if TRAIN:
            x = dropped(x * scale, tl.load(bits_ptr + row, mask=here, other=0), D)
        stat = stat_ptr + (first + n * L) * STATS + 2 * L + t
        project(
            x, to_q, to_k, to_v, z_ptr, qkv_ptr, stat, first + row, here, D, TRAIN, PREC
        )


@triton.jit
def attend(
    q_ptr, k_ptr, rows, keys, hidden, lse_ptr, real, D: tl.constexpr, SAVE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One head: ``softmax(q kᵀ) v``; stores the logarithm (base 2) of each row's sum.

    ``hidden`` is −∞ for keys that are not there, else 0; v lies ``D`` after k.
    """
    DT: tl.constexpr = q_ptr.dtype.element_ty
    factor: tl.constexpr = LOG2E / (D // 2) ** 0.5
    q = tl.load(q_ptr, mask=rows, other=0.0)
    k = tl.load(k_ptr, mask=keys, other=0.0)
    v = tl.load(k_ptr + D, mask=keys, other=0.0)
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
    qkv_ptr, a_ptr, y_ptr, stat_ptr, next_qkv_ptr, next_stat_ptr, out_ptr, pooled_ptr, w_ptr,
    bits_ptr, step_ptr, steps_ptr, length_ptr, scale_ptr, B, ROWS, STEPS,
    W: tl.constexpr, OUT: tl.constexpr, A: tl.constexpr, BA: tl.constexpr, BW: tl.constexpr,
    BB: tl.constexpr, NEXT: tl.constexpr, SITE: tl.constexpr, SITES: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, SHORTER: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, FF: tl.constexpr, LAST: tl.constexpr, TRAIN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Attention, dropout, LayerNorm, MLP, dropout of samples ``chunk·S …``.

    Rows of a network lie densely, ``length`` a sample; a program leaves networks to the launch
    whose ``T`` fits them (``SHORTER`` < length ≤ ``T``) and takes ``QUERIES`` tokens of a sample
    at a time, each with all its keys. The output is normalised; the last
    block means it over tokens, the others project it to the next block's q, k and v (``NEXT``:
    where those weights lie). What backward needs again is kept: the heads' outputs, what
    LayerNorms gave (``out``: the one after the block), and a row's numbers (``STATS``).
    """
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    _step, L = batch_now(step_ptr, steps_ptr, length_ptr, m, STEPS)
    if (L > T) | (L <= SHORTER):
        return
    DT: tl.constexpr = qkv_ptr.dtype.element_ty
    HD: tl.constexpr = D // 2
    u = tl.arange(0, T)
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
    if not LAST:
        to_q, to_k, to_v = projections(w + NEXT, D, DT, PREC)
    keys = (u < L)[:, None]
    hidden = tl.where(u < L, 0.0, float("-inf"))
    scale = tl.load(scale_ptr + m)
    first = m.to(tl.int64) * ROWS
    bits_ptr += (m.to(tl.int64) * SITES + SITE) * ROWS
    for n in range(chunk * S, tl.minimum(chunk * S + S, B)):
        begin = first + n * L
        k = qkv_ptr + (begin + u)[:, None] * (3 * D) + D + j[None, :]
        mean = tl.zeros((D,), tl.float32)
        for i in range(T // QUERIES):
            t = i * QUERIES + tl.arange(0, QUERIES)
            real = t < L
            mask = real[:, None]
            word = bits_ptr + n * L + t
            row = (begin + t)[:, None]
            at = t[:, None] * D + d[None, :]
            stat = stat_ptr + begin * STATS + t
            q = qkv_ptr + row * (3 * D) + j[None, :]
            a0 = attend(q, k, mask, keys, hidden, stat, real, D, TRAIN, PREC)
            a1 = attend(q + HD, k + HD, mask, keys, hidden, stat + L, real, D, TRAIN, PREC)
            y = tl.dot(a0, wo0, input_precision=PREC)
            y = tl.dot(a1, wo1, y, input_precision=PREC)
            if TRAIN:
                head = a_ptr + row * D + j[None, :]
                tl.store(head, a0, mask=mask)
                tl.store(head + HD, a1, mask=mask)
                y = dropped(y * scale, tl.load(word, mask=real, other=0), D)
            normed, rstd = layer_norm(y, D)
            z = operand(normed, DT, PREC)
            if TRAIN:
                tl.store(y_ptr + begin * D + at, z, mask=mask)
                tl.store(stat + 3 * L, rstd, mask=real)
            h = tl.dot(z, wa, input_precision=PREC) + ba[None, :]
            h = operand(tl.maximum(h, 0.0), DT, PREC)
            y = tl.dot(h, wb, input_precision=PREC) + bb[None, :]
            if TRAIN:
                y = dropped(y * scale, tl.load(word + ROWS, mask=real, other=0), D)
            if LAST:
                y, rstd = layer_norm(y, D)
                mean += tl.sum(tl.where(mask, y, 0.0), 0)
                if TRAIN:
                    tl.store(stat + 4 * L, rstd, mask=real)
                    tl.store(out_ptr + begin * D + at, operand(y, DT, PREC), mask=mask)
            else:
                follow = next_stat_ptr + begin * STATS + 2 * L + t
                project(
                    y, to_q, to_k, to_v, out_ptr, next_qkv_ptr, follow, begin + t, real, D,
                    TRAIN, PREC,
                )  # fmt: skip
        if LAST:
            tl.store(pooled_ptr + (m * B + n).to(tl.int64) * D + d, mean / L)
