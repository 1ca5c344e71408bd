"""Device functions that all kernels share, and the kernel that draws dropout masks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Numbers per row of a block stored for backward: the log-sums of both heads, then the reciprocal
# deviations of its input, of the MLP's input and, in the last block, of its output.
STATS = tl.constexpr(5)


@triton.jit
def batch_now(clock, sizes, m, ahead=0):
    """The step (plus ``ahead``), and the tokens per sample of network ``m``: 0 past its epoch."""
    step = tl.load(clock.step) + ahead
    on = step < tl.load(clock.steps + m)
    return step, tl.load(clock.lengths + m * sizes.steps + step, mask=on, other=0)


@triton.jit
def masks_of(dropout, sizes, m, SITE: tl.constexpr, CONST: tl.constexpr):
    """Pointer to the mask words of network ``m`` at a dropout site."""
    return dropout.bits + (m.to(tl.int64) * CONST.sites + SITE) * sizes.rows


@triton.jit
def gradient_of(grads, sizes, chunk, m, CONST: tl.constexpr):
    """Pointer to a chunk's weight gradient of network ``m``."""
    return grads.weights + (chunk.to(tl.int64) * sizes.networks + m) * CONST.layout.size


@triton.jit
def rows_from(begin, stop, L, R: tl.constexpr):
    """``R`` consecutive rows: numbers, validity, samples and tokens."""
    row = begin + tl.arange(0, R)
    n = row // L
    return row, row < stop, n, row - n * L


@triton.jit
def operand(x, DT: tl.constexpr, PREC: tl.constexpr):
    """``x`` as an operand of tensor cores, rounded to tf32, which they would truncate."""
    if (tl.float32 == DT) and (PREC == "tf32"):
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x.to(DT)


@triton.jit
def hash_word(position, key0, key1):
    """A 32-bit word for a key and a position, equal to `randomness.words`."""
    x = tl.cast(position, tl.uint32) * 0x9E3779B9 + key0.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ key1.to(tl.uint32)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropped(x, bits, D: tl.constexpr):
    """``x`` with zeros where the mask word of a row has no bit: dropout without its scale."""
    keep = (bits[:, None] >> tl.arange(0, D)[None, :]) & 1
    return tl.where(keep != 0, x, 0.0)


@triton.jit
def layer_norm(x, D: tl.constexpr):
    """Normalised rows of ``x``, and their reciprocal standard deviation."""
    centred = x - (tl.sum(x, 1) / D)[:, None]
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + 1e-5)
    return centred * rstd[:, None], rstd


@triton.jit
def layer_norm_backward(dy, normed, rstd, D: tl.constexpr):
    """Gradient of the input of `layer_norm`."""
    along = tl.sum(dy * normed, 1) / D
    return rstd[:, None] * (dy - (tl.sum(dy, 1) / D)[:, None] - normed * along[:, None])


@triton.jit
def dropout_bits(
    bits_ptr, threshold_ptr, clock, sizes, CONST: tl.constexpr, AHEAD: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Draw mask words: bit ``c`` of a row is whether `randomness.keep_mask` keeps entry ``c``."""
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
