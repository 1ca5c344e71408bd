"""Dropout's masks for one step, drawn once: a word of 32 bits a row of 32 entries."""

from __future__ import annotations

import triton
import triton.language as tl

from transformer_nfn.zoo.training.backends.kernels.shared import batch_now, hash_word


@triton.jit
def dropout_bits(
    bits_ptr, threshold_ptr, clock, sizes, CONST: tl.constexpr, AHEAD: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Bit ``c`` of a row's word says whether `randomness.keep_mask` keeps entry ``c``."""
    D: tl.constexpr = CONST.D
    m = tl.program_id(0)
    site = tl.program_id(1)
    step, L = batch_now(clock, sizes, m, AHEAD)
    if L == 0:
        return
    row = tl.program_id(2) * N + tl.arange(0, N)
    threshold = tl.load(threshold_ptr + m)
    key = clock.drop + ((m * sizes.steps + step) * CONST.sites + site) * 2
    key0 = tl.load(key)
    key1 = tl.load(key + 1)
    number = ((row // L) * sizes.tokens + row % L) * (D // 2)
    bits = tl.zeros((N,), tl.int32)
    at = (m.to(tl.int64) * CONST.sites + site) * sizes.rows + row
    if threshold == 0:
        tl.store(bits_ptr + at, bits - 1, mask=row < sizes.batch * L)
        return
    for half in tl.static_range(D // 2):
        word = hash_word(number + half, key0, key1)
        low = (word & 0xFFFF).to(tl.int32) >= threshold
        high = (word >> 16).to(tl.int32) >= threshold
        bits = bits | (low.to(tl.int32) << half) | (high.to(tl.int32) << (half + D // 2))
    tl.store(bits_ptr + at, bits, mask=row < sizes.batch * L)
