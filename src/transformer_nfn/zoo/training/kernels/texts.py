"""Attention of texts, of any length: some queries and some keys at a time.

The probabilities are recomputed in backward, once along the queries and once transposed, so that no
matrix is transposed on the chip.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.kernels.shared import (
    LOG2E,
    batch_now,
    inside,
    network_of,
    operand,
)


@triton.jit
def text_attention_forward(
    acts, clock, sizes, CONST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """Outputs of a head for ``SAMPLES`` texts of a network; see `forward.attend`.

    The largest score and the sum of a row are those of the keys seen so far.
    """
    D: tl.constexpr = CONST.D
    J: tl.constexpr = CONST.J
    JJ: tl.constexpr = CONST.JJ
    PREC: tl.constexpr = CONST.products
    factor: tl.constexpr = LOG2E / J**0.5
    m = network_of(tl.program_id(0) // CONST.H, clock, sizes, CONST)
    head = tl.program_id(0) % CONST.H
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    begin = tl.program_id(1) * SAMPLES
    j = head * J + tl.arange(0, JJ)[None, :]
    entry = inside(tl.arange(0, JJ), J, JJ)[None, :]
    for n in range(begin, tl.minimum(begin + SAMPLES, sizes.batch)):
        first = m.to(tl.int64) * sizes.rows + n * L
        for start in range(0, L, QUERIES):
            t = start + tl.arange(0, QUERIES)
            real = t < L
            mask = real[:, None] & entry
            q = tl.load(acts.qkv + (first + t)[:, None] * (3 * D) + j, mask=mask, other=0.0)
            top = tl.full((QUERIES,), float("-inf"), tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            a = tl.zeros((QUERIES, JJ), tl.float32)
            for i in range(0, L, KEYS):
                u = i + tl.arange(0, KEYS)
                there = u < L
                k_ptr = acts.qkv + (first + u)[:, None] * (3 * D) + D + j
                k = tl.load(k_ptr, mask=there[:, None] & entry, other=0.0)
                v = tl.load(k_ptr + D, mask=there[:, None] & entry, other=0.0)
                s = tl.dot(q, tl.trans(k), input_precision=PREC)
                s = tl.where(there[None, :], s, float("-inf"))
                higher = tl.maximum(top, tl.max(s, 1))
                shrink = tl.exp2((top - higher) * factor)
                p = tl.exp2(s * factor - (higher * factor)[:, None])
                total = total * shrink + tl.sum(p, 1)
                a = tl.dot(operand(p, DT, PREC), v, a * shrink[:, None], input_precision=PREC)
                top = higher
            a = operand(a / total[:, None], DT, PREC)
            tl.store(acts.a + (first + t)[:, None] * D + j, a, mask=mask)
            if CONST.train:
                lse = acts.stats + first * CONST.stats + head * L + t
                tl.store(lse, top * factor + tl.log2(total), mask=real)


@triton.jit
def text_attention_backward(
    acts, grads, clock, sizes, CONST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """Gradient of a head's q, k and v from that of its outputs, for ``SAMPLES`` texts.

    Scalar products of each output and its gradient, computed with the gradient of q, are stored
    for that of k and v.
    """
    D: tl.constexpr = CONST.D
    J: tl.constexpr = CONST.J
    JJ: tl.constexpr = CONST.JJ
    PREC: tl.constexpr = CONST.products
    root: tl.constexpr = 1.0 / J**0.5
    factor: tl.constexpr = LOG2E / J**0.5
    m = network_of(tl.program_id(0) // CONST.H, clock, sizes, CONST)
    head = tl.program_id(0) % CONST.H
    _step, L = batch_now(clock, sizes, m)
    if L == 0:
        return
    DT: tl.constexpr = acts.qkv.dtype.element_ty
    begin = tl.program_id(1) * SAMPLES
    j = head * J + tl.arange(0, JJ)[None, :]
    entry = inside(tl.arange(0, JJ), J, JJ)[None, :]
    for n in range(begin, tl.minimum(begin + SAMPLES, sizes.batch)):
        first = m.to(tl.int64) * sizes.rows + n * L
        lse_ptr = acts.stats + first * CONST.stats + head * L
        delta_ptr = lse_ptr + (CONST.H + 3) * L
        for start in range(0, L, QUERIES):
            t = start + tl.arange(0, QUERIES)
            mask = (t < L)[:, None] & entry
            row = (first + t)[:, None]
            q = tl.load(acts.qkv + row * (3 * D) + j, mask=mask, other=0.0)
            da = tl.load(grads.a + row * D + j, mask=mask, other=0.0)
            a = tl.load(acts.a + row * D + j, mask=mask, other=0.0)
            lse = tl.load(lse_ptr + t, mask=t < L, other=0.0)
            delta = tl.sum(da.to(tl.float32) * a.to(tl.float32), 1) * root
            tl.store(delta_ptr + t, delta, mask=t < L)
            dq = tl.zeros((QUERIES, JJ), tl.float32)
            for i in range(0, L, KEYS):
                u = i + tl.arange(0, KEYS)
                there = u < L
                k_ptr = acts.qkv + (first + u)[:, None] * (3 * D) + D + j
                k = tl.load(k_ptr, mask=there[:, None] & entry, other=0.0)
                v = tl.load(k_ptr + D, mask=there[:, None] & entry, other=0.0)
                s = tl.dot(q, tl.trans(k), input_precision=PREC)
                p = tl.where(there[None, :], tl.exp2(s * factor - lse[:, None]), 0.0)
                dp = tl.dot(da, tl.trans(v), input_precision=PREC)
                ds = operand(p * (dp * root - delta[:, None]), DT, PREC)
                dq = tl.dot(ds, k, dq, input_precision=PREC)
            tl.store(grads.qkv + row * (3 * D) + j, operand(dq, DT, PREC), mask=mask)
        tl.debug_barrier()
        for i in range(0, L, KEYS):
            u = i + tl.arange(0, KEYS)
            mask = (u < L)[:, None] & entry
            at = (first + u)[:, None] * (3 * D) + D + j
            k = tl.load(acts.qkv + at, mask=mask, other=0.0)
            v = tl.load(acts.qkv + at + D, mask=mask, other=0.0)
            dk = tl.zeros((KEYS, JJ), tl.float32)
            dv = tl.zeros((KEYS, JJ), tl.float32)
            for start in range(0, L, QUERIES):
                t = start + tl.arange(0, QUERIES)
                there = t < L
                row = (first + t)[:, None]
                q = tl.load(acts.qkv + row * (3 * D) + j, mask=there[:, None] & entry, other=0.0)
                da = tl.load(grads.a + row * D + j, mask=there[:, None] & entry, other=0.0)
                lse = tl.load(lse_ptr + t, mask=there, other=0.0)
                delta = tl.load(delta_ptr + t, mask=there, other=0.0)
                s = tl.dot(k, tl.trans(q), input_precision=PREC)
                p = tl.exp2(s * factor - lse[None, :])
                dv = tl.dot(operand(p, DT, PREC), da, dv, input_precision=PREC)
                dp = tl.dot(v, tl.trans(da), input_precision=PREC)
                ds = operand(p * (dp * root - delta[None, :]), DT, PREC)
                dk = tl.dot(ds, q, dk, input_precision=PREC)
            tl.store(grads.qkv + at, operand(dk, DT, PREC), mask=mask)
            tl.store(grads.qkv + at + D, operand(dv, DT, PREC), mask=mask)
