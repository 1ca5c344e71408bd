"""A short vector that all members of an orbit share and that moves little when weights do."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import WeightSpace, fold, product

DIRECTIONS = 8
NUMBERS = 32


def fingerprint(space: WeightSpace, U: Mapping[str, Tensor], *, size: int = 64) -> Tensor:
    """A vector of ``size`` numbers that no group element can change.

    Every invariant (a tensor without linear axes, or a product) is projected onto a few fixed
    directions along its free axes, sorted along its perm axes, and projected once more. Sorting
    is blind to order and moves no more than its input, so nothing jumps: a small change of the
    weights is a small change of the fingerprint.

    Args:
        space: the space of the weights.
        U: ``[batch, 1, *axes]`` or ``[*axes]``.
        size: how many numbers.

    Returns:
        ``[batch, size]`` or ``[size]``, float64; the same on every machine, to rounding.
    """
    space.check(U, lead=None)
    if size < 1:
        raise SpaceError(f"the size of a fingerprint must be positive, found {size}")
    name, first = next((n, U[n]) for n in space.tensors)
    lead = first.shape[: first.ndim - len(space.tensors[name].axes)]
    if len(lead) > 1 and lead[1:].numel() != 1:
        raise SpaceError(f"a fingerprint is of networks with one channel, found {lead[1]}")
    weights = fold(
        space,
        {n: U[n].detach().reshape(-1, *space.shape(n)).double() for n in space.tensors},
    )
    parts = [
        _project(space, n, weights[n], space.tensors[n].axes) for n in space.entry_tensors
    ]
    for p in space.products:
        # Entries of a product are sums over the contracted axis: back to the scale of one.
        value = product(space, weights, p) / space.axes[p.over].size ** 0.5
        parts.append(_project(space, p.name, value, p.axes))
    if not parts:
        raise SpaceError(f"space '{space.name}' has no invariants to take a fingerprint of")
    joined = torch.cat(parts, -1)
    out = joined @ _directions("all", joined.shape[-1], size, joined)
    return out.reshape(*lead[:1], size)


def _project(space: WeightSpace, name: str, value: Tensor, axes: tuple[str, ...]) -> Tensor:
    """``[batch, *axes, *rest] → [batch, NUMBERS]``, blind to the order of perm axes."""
    perm = [d for d, a in enumerate(axes) if space.is_permuted(a)]
    # Inner axes are sorted first: each moves on its own only while its parent stands still.
    perm.sort(key=lambda d: -len(space.ancestors(axes[d])))
    free = [d for d in range(value.ndim - 1) if d not in perm]
    value = value.permute(0, *[d + 1 for d in perm], *[d + 1 for d in free])
    if free:
        value = value.flatten(1 + len(perm))
        value = value @ _directions(f"{name} free", value.shape[-1], DIRECTIONS, value)
    for d in range(len(perm)):
        value = value.sort(dim=1 + d).values
    flat = value.flatten(1)
    return flat @ _directions(f"{name} sorted", flat.shape[-1], NUMBERS, flat)


def _directions(key: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """Fixed pseudo-random directions ``[rows, columns]``, the same on every machine."""
    state = np.random.RandomState(zlib.crc32(key.encode()))
    noise = state.standard_normal((rows, columns)) / columns**0.5
    return torch.as_tensor(noise, dtype=like.dtype, device=like.device)
