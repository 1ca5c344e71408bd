"""One update of all weights of all networks, each by its own rule: `optimise.update`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(
    w_ptr, progress, grads, outcome, clock, sizes, CONST: tl.constexpr, CHUNKS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Adds up the chunks' gradients in a fixed order and moves weights and moments.

    Networks whose epoch is over stay as they are. The mean loss and the hits of the step are
    added to what the epoch has so far.
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
