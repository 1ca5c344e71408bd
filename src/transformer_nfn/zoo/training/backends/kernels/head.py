"""The end of the network: two linear maps on the mean token, loss and hits, and their gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.backends.kernels.shared import (
    STATS,
    batch_now,
    dropped,
    layer_norm_backward,
    operand,
    rows_from,
)


@triton.jit
def classify(
    pooled_ptr, dpooled_ptr, order_ptr, label_ptr, w_ptr, grad_ptr, loss_ptr, hit_ptr,
    step_ptr, steps_ptr, length_ptr, B, SAMPLES, STEPS, NETWORKS, LIMIT,
    W: tl.constexpr, W1: tl.constexpr, B1: tl.constexpr, W2: tl.constexpr, B2: tl.constexpr,
    S: tl.constexpr, D: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Summed loss and hits of a chunk of samples; in training also the gradients of the mean.

    Samples from number ``LIMIT`` of the split on do not count.
    """
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    step, L = batch_now(step_ptr, steps_ptr, length_ptr, m, STEPS)
    if L == 0:
        return
    s = chunk * S + tl.arange(0, S)
    d = tl.arange(0, D)
    c = tl.arange(0, CP)
    w = w_ptr + m.to(tl.int64) * W
    there = (s < B) & (step * B + s < LIMIT)
    known = (c < C)[None, :]
    at = (m * B + s).to(tl.int64)[:, None] * D + d[None, :]
    at_2 = d[:, None] * C + c[None, :]
    pooled = tl.load(pooled_ptr + at, mask=there[:, None], other=0.0)
    w1 = tl.load(w + W1 + d[:, None] * D + d[None, :])
    w2 = tl.load(w + W2 + at_2, mask=known, other=0.0)
    pre = tl.dot(pooled, w1, input_precision="ieee") + tl.load(w + B1 + d)[None, :]
    h = tl.maximum(pre, 0.0)
    logit = tl.dot(h, w2, input_precision="ieee")
    logit += tl.load(w + B2 + c, mask=c < C, other=0.0)[None, :]
    logit = tl.where(known, logit, float("-inf"))
    order = order_ptr + m.to(tl.int64) * SAMPLES + step * B
    sample = tl.load(order + s, mask=there, other=0)
    label = tl.load(label_ptr + sample, mask=there, other=0).to(tl.int32)
    top = tl.max(logit, 1)
    e = tl.exp(logit - top[:, None])
    total = tl.sum(e, 1)
    right = c[None, :] == label[:, None]
    loss = top + tl.log(total) - tl.sum(tl.where(right, logit, 0.0), 1)
    hit = there & (tl.argmax(logit, 1) == label)
    out = chunk * NETWORKS + m
    tl.store(loss_ptr + out, tl.sum(tl.where(there, loss, 0.0), 0))
    tl.store(hit_ptr + out, tl.sum(hit.to(tl.float32), 0))
    if TRAIN:
        grad = grad_ptr + (chunk.to(tl.int64) * NETWORKS + m) * W
        dlogit = (e / total[:, None] - tl.where(right, 1.0, 0.0)) / B
        dlogit = tl.where(there[:, None] & known, dlogit, 0.0)
        g2 = tl.dot(tl.trans(h), dlogit, input_precision="ieee")
        tl.store(grad + W2 + at_2, g2, mask=known)
        tl.store(grad + B2 + c, tl.sum(dlogit, 0), mask=c < C)
        dh = tl.where(pre > 0, tl.dot(dlogit, tl.trans(w2), input_precision="ieee"), 0.0)
        g1 = tl.dot(tl.trans(pooled), dh, input_precision="ieee")
        tl.store(grad + W1 + d[:, None] * D + d[None, :], g1)
        tl.store(grad + B1 + d, tl.sum(dh, 0))
        dpooled = tl.dot(dh, tl.trans(w1), input_precision="ieee") / L
        tl.store(dpooled_ptr + at, dpooled, mask=there[:, None])


@triton.jit
def spread(
    z_ptr, dpooled_ptr, dout_ptr, stat_ptr, grad_ptr, bits_ptr, step_ptr, steps_ptr, length_ptr,
    scale_ptr, B, ROWS, STEPS, NETWORKS,
    W: tl.constexpr, BB: tl.constexpr, SITE: tl.constexpr, SITES: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """From the gradient of the mean token to that of the last MLP's output, and of its bias.

    Between them lie the last LayerNorm, which gave ``z``, and dropout.
    """
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    _step, L = batch_now(step_ptr, steps_ptr, length_ptr, m, STEPS)
    if L == 0:
        return
    DT: tl.constexpr = z_ptr.dtype.element_ty
    d = tl.arange(0, D)
    first = m.to(tl.int64) * ROWS
    scale = tl.load(scale_ptr + m)
    bits_ptr += (m.to(tl.int64) * SITES + SITE) * ROWS
    gb = tl.zeros((R, D), tl.float32)
    stop = tl.minimum(chunk * S + S, B) * L
    for begin in range(chunk * S * L, stop, R):
        row, here, n, t = rows_from(begin, stop, L, R)
        real = here[:, None]
        at = (first + row)[:, None] * D + d[None, :]
        z = tl.load(z_ptr + at, mask=real, other=0.0).to(tl.float32)
        rstd = tl.load(stat_ptr + (first + n * L) * STATS + 4 * L + t, mask=here, other=0.0)
        kept = tl.load(bits_ptr + row, mask=here, other=0)
        mean = (m * B + n).to(tl.int64)[:, None] * D + d[None, :]
        dmean = tl.load(dpooled_ptr + mean, mask=real, other=0.0)
        dout = dropped(layer_norm_backward(dmean, z, rstd * scale, D), kept, D)
        gb += dout
        tl.store(dout_ptr + at, operand(dout, DT, PREC), mask=real)
    tl.store(grad_ptr + (chunk.to(tl.int64) * NETWORKS + m) * W + BB + d, tl.sum(gb, 0))
