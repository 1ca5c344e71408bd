"""One update of all weights of all networks, each by its own rule: `zoo.optimise.update`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def update(
    w_ptr, grad_ptr, first_ptr, second_ptr, coef_ptr, loss_ptr, hit_ptr, total_ptr, right_ptr,
    step_ptr, steps_ptr, B, STEPS, NETWORKS, CHUNKS: tl.constexpr, W: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Adds up the chunks' gradients in a fixed order and moves weights and moments.

    Networks whose epoch is over stay as they are. The mean loss and the hits of the step are
    added to what the epoch has so far.
    """
    m = tl.program_id(0)
    step = tl.load(step_ptr)
    if step >= tl.load(steps_ptr + m):
        return
    if tl.program_id(1) == 0:
        loss = tl.load(total_ptr + m)
        hits = tl.load(right_ptr + m)
        for chunk in tl.static_range(CHUNKS):
            loss += tl.load(loss_ptr + chunk * NETWORKS + m) / B
            hits += tl.load(hit_ptr + chunk * NETWORKS + m)
        tl.store(total_ptr + m, loss)
        tl.store(right_ptr + m, hits)
    i = tl.program_id(1) * N + tl.arange(0, N)
    here = i < W
    at = m.to(tl.int64) * W + i
    g = tl.zeros((N,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        row = (m + chunk * NETWORKS).to(tl.int64)
        g += tl.load(grad_ptr + row * W + i, mask=here, other=0.0)
    coef = coef_ptr + (m * STEPS + step) * 7
    b1 = tl.load(coef)
    c = tl.load(coef + 1)
    b2 = tl.load(coef + 2)
    alpha = tl.load(coef + 3)
    eps = tl.load(coef + 4)
    l2 = tl.load(coef + 5)
    eta = tl.load(coef + 6)
    p = tl.load(w_ptr + at, mask=here, other=0.0)
    g += l2 * p
    mean = b1 * tl.load(first_ptr + at, mask=here, other=0.0) + c * g
    square = b2 * tl.load(second_ptr + at, mask=here, other=0.0) + (1 - b2) * g * g
    tl.store(first_ptr + at, mean, mask=here)
    tl.store(second_ptr + at, square, mask=here)
    tl.store(w_ptr + at, p - eta * mean / (alpha * tl.sqrt(square) + eps), mask=here)
