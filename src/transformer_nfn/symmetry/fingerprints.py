"""A short vector that all members of an orbit share and that moves little when weights do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import Architecture
from transformer_nfn.spaces import Product, Weights, WeightSpace
from transformer_nfn.spaces.invariants import factors
from transformer_nfn.symmetry.sketch import directions, multiply_sketches, sketch
from transformer_nfn.symmetry.sources import folded, in_float64, sorted_along

DIRECTIONS = 8
NUMBERS = 32
LARGEST = 1 << 20
"""Numbers of a fingerprint at most."""


def fingerprint(
    target: Architecture | WeightSpace, U: Mapping[str, Tensor], *, size: int = 64
) -> Tensor:
    """A vector of ``size`` numbers that no group element can change.

    Every invariant (a tensor that no matrix acts on, or a product) is projected onto a few fixed
    directions along its free axes, sorted along its perm axes, and projected once more. Sorting
    is blind to order and moves no more than its input, so nothing jumps: a small change of the
    weights is a small change of the fingerprint. A product is projected factor by factor, and
    never formed along its free axes.

    Args:
        target: the space of the weights; or an architecture, whose enlarged group does not change
            the fingerprint either if it has one.
        U: ``[batch, 1, *axes]`` or ``[*axes]``.
        size: how many numbers.

    Returns:
        ``[batch, size]`` or ``[size]``, float64; the same on every machine, to rounding.
    """
    if isinstance(target, Architecture):
        space = target.enlarged or target.space
        target.space.check(U, lead=None)
        U = target.in_enlarged(U)
    else:
        space = target
        space.check(U, lead=None)
    if not 1 <= size <= LARGEST:
        raise SpaceError(f"the size of a fingerprint must be from 1 to {LARGEST:,}, found {size}")
    name, first = next((n, U[n]) for n in space.tensors)
    lead = first.shape[: first.ndim - len(space.tensors[name].axes)]
    if len(lead) > 1 and lead[1:].numel() != 1:
        raise SpaceError(f"a fingerprint is of networks with one channel, found {lead[1]}")
    # One tensor after the other becomes float64, when its turn comes.
    weights = folded(
        space, {n: U[n].detach().reshape(-1, *space.shape(n)) for n in space.tensors}
    )
    parts = [_tensor_numbers(space, n, weights[n]) for n in space.entry_tensors]
    parts += [_product_numbers(space, weights, p) for p in space.products]
    if not parts:
        raise SpaceError(f"space '{space.name}' has no invariants to take a fingerprint of")
    joined = torch.cat(parts, -1)
    out: Tensor = joined @ directions("all", joined.shape[-1], size, joined) / size**0.5
    return out.reshape(*lead[:1], size)


def _tensor_numbers(space: WeightSpace, name: str, value: Tensor) -> Tensor:
    """``[batch, *axes] → [batch, NUMBERS]``, blind to the order of perm axes."""
    axes = space.tensors[name].axes
    moved = space.permuted_dims(axes)
    free = [1 + d for d in range(len(axes)) if d not in moved]
    kept = [axes[d] for d in sorted(moved)]
    value = sketch(value.double(), free, DIRECTIONS, f"{name} free") / DIRECTIONS**0.5
    return _sorted_numbers(space, name, value, kept)


def _product_numbers(space: WeightSpace, weights: Weights, product: Product) -> Tensor:
    """The same of a product, its free axes projected in each factor by itself."""
    sites = space.ancestors(product.over)
    wide = in_float64(weights, space.derivation.made_of(product.plain, product.dual))
    sides, kept = [], list(sites)
    for side, name, factor in zip(
        ("plain", "dual"), (product.plain, product.dual), factors(space, wide, product), strict=True
    ):
        own = [a for a in space.spec(name).axes if a not in (*sites, product.over)]
        moved = space.permuted_dims(own)
        free = [1 + len(sites) + d for d in range(len(own)) if d not in moved]
        kept += [own[d] for d in sorted(moved)]
        # [batch, *sites, *perm axes, pieces, k, directions]
        sides.append(sketch(factor, free, DIRECTIONS, f"{product.name} {side}"))
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    front = "".join(next(letters) for _ in (0, *sites))
    own_x, own_y = ("".join(next(letters) for _ in range(x.ndim - len(front) - 3)) for x in sides)
    # Entries of a product are sums over the contracted axis: back to the scale of one.
    scale = (max(x.shape[-1] for x in sides) * space.axes[product.over].size) ** -0.5
    words = front + own_x, front + own_y
    value = multiply_sketches(scale * sides[0], sides[1], words, front + own_x + own_y)
    return _sorted_numbers(space, product.name, value.flatten(-2), kept)


def _sorted_numbers(
    space: WeightSpace, name: str, value: Tensor, axes: Sequence[str]
) -> Tensor:
    """``[batch, *axes, features] → [batch, NUMBERS]``, every axis being permuted."""
    # Inner axes are sorted first: each moves on its own only while its parent stands still.
    for d in space.innermost_first(axes):
        value = sorted_along(value, 1 + d)
    dims = range(1, value.ndim)
    numbers: Tensor = sketch(value, dims, NUMBERS, f"{name} sorted") / NUMBERS**0.5
    return numbers
