"""Device functions that all kernels share, and the kernel that draws dropout masks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def network_of(program, clock, sizes, CONST: tl.constexpr):
    """The network of a program: in training on texts, those with the longest batches first."""
    if (CONST.P > 0) or not CONST.train:
        return program
    step = tl.load(clock.step)
    at = clock.ranked + step * sizes.networks + program
    return tl.load(at, mask=step < sizes.steps, other=0)


@triton.jit
def batch_now(clock, sizes, m, ahead=0):
    """The step (plus ``ahead``), and the tokens per sample of network ``m``: 0 past its epoch."""
    step = tl.load(clock.step) + ahead
    on = step < tl.load(clock.steps + m)
    return step, tl.load(clock.lengths + m * sizes.steps + step, mask=on, other=0)


@triton.jit
def masks_of(dropout, sizes, m, SITE: tl.constexpr, CONST: tl.constexpr):
    """Pointer to the mask words of network ``m`` at a dropout site."""
    return dropout.bits + (m.to(tl.int64) * CONST.sites + SITE) * sizes.rows * CONST.words


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
def halved(x):
    """Half as many rows with the same sum: row ``r`` plus row ``r + 8``, of the same thread."""
    R: tl.constexpr = x.shape[0] // 16
    pairs = tl.reshape(x, (R, 2, 8, x.shape[1]))
    return tl.reshape(tl.sum(pairs, 1), (8 * R, x.shape[1]))


@triton.jit
def inside(i, N: tl.constexpr, NN: tl.constexpr):
    """Which of the numbers ``i``, all below ``NN``, are below ``N``.

    If all are, it is a constant, which the compiler drops from loads and stores.
    """
    if N >= NN:
        return tl.full(i.shape, 1, tl.int1)
    return i < N


@triton.jit
def operand(x, DT: tl.constexpr, PREC: tl.constexpr):
    """``x`` as an operand of tensor cores, rounded to tf32, which they would truncate."""
    if (tl.float32 == DT) and (PREC == "tf32"):
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x.to(DT)


@triton.jit
def weight(at, rows, columns, DT: tl.constexpr, PREC: tl.constexpr):
    """The matrix of weights at ``at`` as an operand, zero but for its ``rows`` and ``columns``."""
    known = rows[:, None] & columns[None, :]
    return operand(tl.load(at, mask=known, other=0.0), DT, PREC)


@triton.jit
def hash_word(position, key0, key1):
    """A 32-bit word for a key and a position, equal to `randomness.words`."""
    x = tl.cast(position, tl.uint32) * 0x9E3779B9 + key0.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ key1.to(tl.uint32)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def mask_words(masks, row, here, sizes, CONST: tl.constexpr):
    """The mask words of each row: of its first 32 entries and, if it has more, of the others."""
    first = tl.load(masks + row, mask=here, other=0)
    if CONST.words == 1:
        return first, first
    return first, tl.load(masks + sizes.rows + row, mask=here, other=0)


@triton.jit
def dropped(x, words, CONST: tl.constexpr):
    """``x`` with zeros where the mask words of a row have no bit: dropout without its scale."""
    d = tl.arange(0, CONST.DD)[None, :]
    bits = words[0][:, None]
    if CONST.words > 1:
        bits = tl.where(d < 32, bits, words[1][:, None])
        d = d & 31
    keep = (bits >> d) & 1
    return tl.where(keep != 0, x, 0.0)


@triton.jit
def layer_norm(x, CONST: tl.constexpr):
    """Normalised rows of ``x``, zero past its width, and their reciprocal standard deviation."""
    D: tl.constexpr = CONST.D
    known = inside(tl.arange(0, CONST.DD), D, CONST.DD)[None, :]
    centred = tl.where(known, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / D + 1e-5)
    return centred * rstd[:, None], rstd


@triton.jit
def layer_norm_backward(dy, normed, rstd, CONST: tl.constexpr):
    """Gradient of the input of `layer_norm`."""
    D: tl.constexpr = CONST.D
    known = inside(tl.arange(0, CONST.DD), D, CONST.DD)[None, :]
    along = tl.sum(dy * normed, 1) / D
    dx = rstd[:, None] * (dy - (tl.sum(dy, 1) / D)[:, None] - normed * along[:, None])
    return tl.where(known, dx, 0.0)


@triton.jit
def dropout_bits(
    bits_ptr, threshold_ptr, clock, sizes, CONST: tl.constexpr, AHEAD: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Draw mask words: bit ``c`` of a row is whether `randomness.keep_mask` keeps entry ``c``.

    The words of the entries from 32 on follow those of all rows.
    """
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
    more = bits
    at = bits_ptr + (m.to(tl.int64) * CONST.sites + site) * sizes.rows * CONST.words + row
    here = row < sizes.batch * L
    if threshold == 0:
        tl.store(at, bits - 1, mask=here)
        if CONST.words > 1:
            tl.store(at + sizes.rows, bits - 1, mask=here)
        return
    for half in tl.static_range(D // 2):
        word = hash_word(number + half, key0, key1)
        low = (word & 0xFFFF).to(tl.int32) >= threshold
        high = (word >> 16).to(tl.int32) >= threshold
        bits = bits | (low.to(tl.int32) << half)
        if half + D // 2 < 32:
            bits = bits | (high.to(tl.int32) << (half + D // 2))
        else:
            more = more | (high.to(tl.int32) << (half + D // 2 - 32))
    tl.store(at, bits, mask=here)
    if CONST.words > 1:
        tl.store(at + sizes.rows, more, mask=here)
