"""How elements given for each site line up with the tensor they act on."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from transformer_nfn.spaces.actions.base import Place


def spread(x: Tensor, part: Tensor, place: Place) -> Tensor:
    """``x`` repeated along the batch where it has one network for many elements."""
    if place.sites and place.sites[0] == 0 and x.shape[0] == 1 and part.shape[0] > 1:
        return x.expand(part.shape[0], *x.shape[1:])
    return x


def line_up(part: Tensor, dims: tuple[int, ...], ndim: int) -> Tensor:
    """``part`` with its first axes at ``dims`` of a tensor of ``ndim`` axes, size 1 elsewhere.

    ``[*first, *rest] → [*ndim axes, *rest]``; as it is where broadcasting does the same.
    """
    if dims == tuple(range(ndim - len(dims), ndim)):
        return part
    shape = [1] * ndim
    for i, dim in enumerate(dims):
        shape[dim] = part.shape[i]
    rest = part.shape[len(dims) :]
    if any(first > then for first, then in pairwise(dims)):
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        part = part.permute(*order, *range(len(dims), part.ndim))
    return part.reshape(*shape, *rest)
