"""Counter-based randomness: hashes of a run's seed, the step and the position.

There is no state, so a run draws the same numbers on every device and with any neighbours. A key
of 64 bits is mixed from (seed, purpose, time) by splitmix64; words of 32 bits are mixed from the
key and a position by lowbias32.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUBSET, ORDER, CROP, DROPOUT = 1, 2, 3, 4
GOLDEN = 0x9E3779B97F4A7C15


def _signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _shift(x: Tensor, by: int, bits: int) -> Tensor:
    return (x >> by) & ((1 << (bits - by)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shift(x, 31, 64)


def keys(seeds: Tensor, purpose: int, time: Tensor | int) -> Tensor:
    """Keys of two 32-bit words per run, ``int32 [runs, 2]``, for one purpose at one time.

    Args:
        seeds: ``int64 [runs]``.
        purpose: what is drawn, such as `ORDER`; draws for different purposes are independent.
        time: the step or epoch of each run, an ``int64 [runs]`` or a number.

    >>> keys(torch.tensor([1, 2]), ORDER, 0).shape
    torch.Size([2, 2])
    """
    x = _mix64(seeds + _signed(GOLDEN * purpose, 64))
    now = torch.as_tensor(time, dtype=torch.int64, device=seeds.device) + 1
    x = _mix64(x + now * _signed(GOLDEN, 64))
    return torch.stack([x.to(torch.int32), (x >> 32).to(torch.int32)], dim=-1)


def words(key: Tensor, position: Tensor) -> Tensor:
    """One 32-bit word for each key and position: ``int32 [*key, *position]``.

    Args:
        key: ``int32 [..., 2]``.
        position: ``int32``, any shape.
    """
    shape = key.shape[:-1] + (1,) * position.ndim
    first = key[..., 0].reshape(shape)
    # A compiler would fold this constant into index arithmetic beyond 32 bits; adding a value
    # read from memory keeps it a product of 32-bit words.
    x = (position + (first & 0)) * _signed(0x9E3779B9, 32) + first
    x = (x ^ _shift(x, 16, 32)) * _signed(0x7FEB352D, 32)
    x = (x ^ _shift(x, 15, 32) ^ key[..., 1].reshape(shape)) * _signed(0x846CA68B, 32)
    return x ^ _shift(x, 16, 32)


def permutation(key: Tensor, n: int) -> Tensor:
    """A random permutation of ``n`` numbers for each key: ``int64 [*key, n]``.

    >>> permutation(keys(torch.tensor([0]), ORDER, 0), 5).sort().values
    tensor([[0, 1, 2, 3, 4]])
    """
    position = torch.arange(n, dtype=torch.int32, device=key.device)
    return words(key, position).argsort(dim=-1, stable=True)


def keep_mask(key: Tensor, threshold: Tensor, rows: Tensor, width: int) -> Tensor:
    """Entries that dropout keeps: ``bool [runs, *rows, width]``.

    One word serves two entries: its low half one of the first half of a row, its high half one of
    the second. An entry is dropped if its 16 bits are below ``threshold`` = 65536·p.

    Args:
        key: ``int32 [runs, 2]``.
        threshold: ``int32 [runs]``.
        rows: the number of each row, independent of padding.
        width: entries per row, even.
    """
    half = torch.arange(width // 2, dtype=torch.int32, device=key.device)
    word = words(key, rows.to(torch.int32)[..., None] * (width // 2) + half)
    both = torch.cat([word & 0xFFFF, _shift(word, 16, 32)], dim=-1)
    return both >= threshold.reshape(-1, *(1,) * (both.ndim - 1))


def dropout_threshold(p: Tensor) -> Tensor:
    """Thresholds of `keep_mask` for probabilities, ``int32``.

    >>> dropout_threshold(torch.tensor([0.0, 0.5]))
    tensor([    0, 32768], dtype=torch.int32)
    """
    return (p * 65536).round().to(torch.int32)


def run_seed(build_seed: int, run: int) -> int:
    """The seed of a run, 63 bits, from the build's seed and the run's number."""
    mixed = _mix(_mix(build_seed + GOLDEN) + (run + 1) * GOLDEN)
    return mixed & ((1 << 63) - 1)


def shared_seed(build_seed: int) -> int:
    """The seed that all runs of a build share; no single run has it."""
    return run_seed(build_seed, -1)


def _mix(x: int) -> int:
    # `_mix64` on Python integers.
    x &= (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
    return x ^ (x >> 31)
