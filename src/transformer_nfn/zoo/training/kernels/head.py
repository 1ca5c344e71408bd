"""Kernels of the classifier with loss and gradient, and of the weight update."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.kernels.shared import (
    batch_now,
    dropped,
    gradient_of,
    inside,
    layer_norm_backward,
    mask_words,
    masks_of,
    network_of,
    operand,
    rows_from,
)


@triton.jit
def classify(outcome, grads, w_ptr, clock, samples, sizes, limit, CONST: tl.constexpr):
    """Summed loss and hits of a chunk of samples; in training also the gradient of the mean.

    Samples from number ``limit`` of the split on are ignored.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    C: tl.constexpr = CONST.C
    offset: tl.constexpr = CONST.layout.classifier
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    B = sizes.batch
    s = chunk * S + tl.arange(0, S)
    d = tl.arange(0, CONST.DD)
    c = tl.arange(0, CONST.CC)
    wide = inside(d, D, CONST.DD)
    square = wide[:, None] & wide[None, :]
    w = w_ptr + m.to(tl.int64) * CONST.layout.size
    there = (s < B) & (step * B + s < limit)
    real = there[:, None] & wide[None, :]
    known = (c < C)[None, :]
    both = wide[:, None] & known
    at = (m * B + s).to(tl.int64)[:, None] * D + d[None, :]
    at_2 = d[:, None] * C + c[None, :]
    pooled = tl.load(outcome.pooled + at, mask=real, other=0.0)
    w1 = tl.load(w + offset.W_1 + d[:, None] * D + d[None, :], mask=square, other=0.0)
    w2 = tl.load(w + offset.W_2 + at_2, mask=both, other=0.0)
    b1 = tl.load(w + offset.b_1 + d, mask=wide, other=0.0)
    pre = tl.dot(pooled, w1, input_precision="ieee") + b1[None, :]
    h = tl.maximum(pre, 0.0)
    logit = tl.dot(h, w2, input_precision="ieee")
    logit += tl.load(w + offset.b_2 + c, mask=c < C, other=0.0)[None, :]
    logit = tl.where(known, logit, float("-inf"))
    order = clock.order + m.to(tl.int64) * sizes.samples + step * B
    sample = tl.load(order + s, mask=there, other=0)
    label = tl.load(samples.labels + sample, mask=there, other=0).to(tl.int32)
    top = tl.max(logit, 1)
    e = tl.exp(logit - top[:, None])
    total = tl.sum(e, 1)
    right = c[None, :] == label[:, None]
    loss = top + tl.log(total) - tl.sum(tl.where(right, logit, 0.0), 1)
    hit = there & (tl.argmax(logit, 1) == label)
    out = chunk * sizes.networks + m
    tl.store(outcome.loss + out, tl.sum(tl.where(there, loss, 0.0), 0))
    tl.store(outcome.hits + out, tl.sum(hit.to(tl.float32), 0))
    if CONST.train:
        grad = gradient_of(grads, sizes, chunk, m, CONST)
        dlogit = (e / total[:, None] - tl.where(right, 1.0, 0.0)) / B
        dlogit = tl.where(there[:, None] & known, dlogit, 0.0)
        g2 = tl.dot(tl.trans(h), dlogit, input_precision="ieee")
        tl.store(grad + offset.W_2 + at_2, g2, mask=both)
        tl.store(grad + offset.b_2 + c, tl.sum(dlogit, 0), mask=c < C)
        dh = tl.where(pre > 0, tl.dot(dlogit, tl.trans(w2), input_precision="ieee"), 0.0)
        g1 = tl.dot(tl.trans(pooled), dh, input_precision="ieee")
        tl.store(grad + offset.W_1 + d[:, None] * D + d[None, :], g1, mask=square)
        tl.store(grad + offset.b_1 + d, tl.sum(dh, 0), mask=wide)
        dpooled = tl.dot(dh, tl.trans(w1), input_precision="ieee") / L
        tl.store(grads.pooled + at, dpooled, mask=real)


@triton.jit
def spread(
    acts, next_acts, grads, dropout, clock, sizes, CONST: tl.constexpr, ROWS: tl.constexpr
):
    """Gradient of the last MLP's output and bias from that of the mean token.

    Between them are the last LayerNorm, with output ``next_acts.z``, and dropout.
    """
    S: tl.constexpr = CONST.S
    D: tl.constexpr = CONST.D
    DD: tl.constexpr = CONST.DD
    PREC: tl.constexpr = CONST.products
    LAST: tl.constexpr = len(CONST.layout.blocks) - 1
    m = network_of(tl.program_id(0), clock, sizes, CONST)
    chunk = tl.program_id(1)
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = next_acts.z.dtype.element_ty
    d = tl.arange(0, DD)
    wide = inside(d, D, DD)
    first = m.to(tl.int64) * sizes.rows
    scale = tl.load(dropout.scale + m)
    masks = masks_of(dropout, sizes, m, 2 * LAST + 2, CONST)
    gb = tl.zeros((ROWS, DD), tl.float32)
    stop = tl.minimum(chunk * S + S, sizes.batch) * L
    for begin in range(chunk * S * L, stop, ROWS):
        row, here, n, t = rows_from(begin, stop, L, ROWS)
        real = here[:, None] & wide[None, :]
        at = (first + row)[:, None] * D + d[None, :]
        z = tl.load(next_acts.z + at, mask=real, other=0.0).to(tl.float32)
        stat = acts.stats + (first + n * L) * CONST.stats + (CONST.H + 2) * L + t
        rstd = tl.load(stat, mask=here, other=0.0)
        kept = mask_words(masks, row, here, sizes, CONST)
        mean = (m * sizes.batch + n).to(tl.int64)[:, None] * D + d[None, :]
        dmean = tl.load(grads.pooled + mean, mask=real, other=0.0)
        dout = dropped(layer_norm_backward(dmean, z, rstd * scale, CONST), kept, CONST)
        gb += dout
        tl.store(grads.x + at, operand(dout, DT, PREC), mask=real)
    grad = gradient_of(grads, sizes, chunk, m, CONST)
    tl.store(grad + CONST.layout.blocks[LAST].b_B + d, tl.sum(gb, 0), mask=wide)


@triton.jit
def update(
    w_ptr, progress, grads, outcome, clock, sizes, CONST: tl.constexpr, CHUNKS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Sum the chunks' gradients in a fixed order, and update weights and moments.

    Networks whose epoch has ended are unchanged. The mean loss and the hits of the step are added
    to those of the epoch.
    """
    W: tl.constexpr = CONST.layout.size
    m = tl.program_id(0)
    step = tl.load(clock.step)
    if step >= tl.load(clock.steps + m):
        return
    if tl.program_id(1) == 0:
        loss = tl.load(progress.loss + m)
        hits = tl.load(progress.hits + m)
        for chunk in tl.static_range(CHUNKS):
            loss += tl.load(outcome.loss + chunk * sizes.networks + m) / sizes.batch
            hits += tl.load(outcome.hits + chunk * sizes.networks + m)
        tl.store(progress.loss + m, loss)
        tl.store(progress.hits + m, hits)
    i = tl.program_id(1) * N + tl.arange(0, N)
    here = i < W
    at = m.to(tl.int64) * W + i
    g = tl.zeros((N,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        row = (m + chunk * sizes.networks).to(tl.int64)
        g += tl.load(grads.weights + row * W + i, mask=here, other=0.0)
    coef = clock.coef + (m * sizes.steps + step) * 7
    b1 = tl.load(coef)
    c = tl.load(coef + 1)
    b2 = tl.load(coef + 2)
    alpha = tl.load(coef + 3)
    eps = tl.load(coef + 4)
    l2 = tl.load(coef + 5)
    eta = tl.load(coef + 6)
    p = tl.load(w_ptr + at, mask=here, other=0.0)
    g += l2 * p
    mean = b1 * tl.load(progress.first + at, mask=here, other=0.0) + c * g
    square = b2 * tl.load(progress.second + at, mask=here, other=0.0) + (1 - b2) * g * g
    tl.store(progress.first + at, mean, mask=here)
    tl.store(progress.second + at, square, mask=here)
    tl.store(w_ptr + at, p - eta * mean / (alpha * tl.sqrt(square) + eps), mask=here)
