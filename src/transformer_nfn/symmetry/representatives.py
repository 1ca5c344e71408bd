"""Representatives of orbits: the canonical form, and a continuous fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import Architecture
from transformer_nfn.spaces import Element, Product, Weights, WeightSpace, fold
from transformer_nfn.spaces.actions import Permutation
from transformer_nfn.spaces.weights import factors
from transformer_nfn.symmetry.element_search import rows_along, with_rows_along
from transformer_nfn.symmetry.sources import (
    directions,
    folded,
    in_float64,
    multiply_sketches,
    single,
    sketch,
    sorted_along,
    sources,
)

DIRECTIONS = 8
NUMBERS = 32
LARGEST = 1 << 20
"""Largest size of a fingerprint."""


def canonical_form(target: Architecture | WeightSpace, U: Mapping[str, Tensor]) -> Weights:
    """A representative of the orbit of each network, equal for all members up to rounding.

    Shifted biases are folded away; every perm axis is sorted by a fixed linear key of the
    invariants at each index; the two factors of every product become those of its balanced
    singular value decomposition, ``U Σ^½`` and ``V Σ^½``, the largest entry of each column of U
    positive. The function does not change.

    The form is discontinuous where two keys or two singular values meet; `fingerprint` is
    continuous. If a product is rank deficient, the representative keeps the product (and the
    function) but may lie outside the orbit, in its closure.

    Args:
        U: ``[batch, channels, *axes]`` or ``[*axes]``.

    Returns:
        Weights of the same shapes and dtype, computed in float64.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(6, 2, 2, 3)
    >>> U = space.randn(1, dtype=torch.float64)
    >>> V = space.group.random(max_condition=10).act(U)
    >>> torch.allclose(canonical_form(space, U)["W_Q"], canonical_form(space, V)["W_Q"])
    True
    """
    space = target.space if isinstance(target, Architecture) else target
    space.check(U, lead=None)
    for tensor in space.twice_rebased:
        raise SpaceError(
            f"a canonical form needs tensors with at most one axis on which matrices act, "
            f"'{tensor}' carries {' and '.join(map(repr, space.rebased(tensor)))}"
        )
    name, first = next((n, U[n]) for n in space.tensors)
    lead = first.shape[: first.ndim - len(space.tensors[name].axes)]
    flat = {n: w.reshape(-1, *space.shape(n)) for n, w in U.items()}
    forms = [
        _canonical(space, in_float64(single(space, {n: w[i] for n, w in flat.items()})))
        for i in range(lead.numel())
    ]
    return {
        n: (torch.stack([f[n] for f in forms]) if forms else flat[n])
        .reshape(*lead, *space.shape(n))
        .to(first.dtype)
        for n in space.tensors
    }


def _canonical(space: WeightSpace, weights: Weights) -> Weights:
    folded = fold(space, weights)
    ordered = _in_order(space, folded)
    for axis in space.rebased_axes:
        tensors = [space.carriers(axis, dual=dual) for dual in (False, True)]
        plain, dual = (rows_along(space, ordered, axis, names) for names in tensors)
        balanced = space.axes[axis].action.balance(plain, dual)
        for names, rows in zip(tensors, balanced, strict=True):
            ordered = with_rows_along(space, ordered, axis, names, rows)
    return ordered


def _in_order(space: WeightSpace, weights: Weights) -> Weights:
    """The weights with every perm axis sorted by its key, outer axes first."""
    invariants = sources(space, weights, 0.0)
    base = space.group.identity(device=next(iter(weights.values())).device)
    perms = dict(base.perms)
    known: set[str] = set()
    permutation = Permutation()
    for axis in sorted(perms, key=lambda a: len(space.ancestors(a))):
        rows = [v.mT for s in invariants for v in s.views(space, axis, known, sort=True)]
        if rows:
            index = permutation.order(rows)
            invariants = [s.reorder(space, axis, index) for s in invariants]
            # The parents are in order already, but permutations are stored at their old indices.
            here = Element(space, {**perms}, {}, {})
            perms[axis] = here.inverse().move_sites(index, axis) if space.ancestors(axis) else index
        known.add(axis)
    return replace(base, perms=perms).act(weights)


def fingerprint(
    target: Architecture | WeightSpace, U: Mapping[str, Tensor], *, size: int = 64
) -> Tensor:
    """A vector of ``size`` numbers, invariant under the group and continuous in the weights.

    Every invariant (a tensor on which no matrix acts, or a product) is projected onto a few fixed
    directions along its free axes, sorted along its perm axes, and projected once more. Sorting is
    invariant to order and 1-Lipschitz, so a small change of the weights is a small change of the
    fingerprint. A product is projected factor by factor and never formed along its free axes.

    Args:
        target: the space of the weights, or an architecture; the fingerprint is then also
            invariant under its enlarged group, if it has one.
        U: ``[batch, 1, *axes]`` or ``[*axes]``.

    Returns:
        ``[batch, size]`` or ``[size]``, float64; the same on every machine up to rounding.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(6, 2, 2, 3)
    >>> U = space.randn(1, dtype=torch.float64)
    >>> V = space.group.random(max_condition=10).act(U)
    >>> torch.allclose(fingerprint(space, U), fingerprint(space, V))
    True
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
    # Tensors are converted to float64 one at a time, when used.
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
    """``[batch, *axes] → [batch, NUMBERS]``, invariant to the order of perm axes."""
    axes = space.tensors[name].axes
    moved = space.permuted_dims(axes)
    free = [1 + d for d in range(len(axes)) if d not in moved]
    kept = [axes[d] for d in sorted(moved)]
    value = sketch(value.double(), free, DIRECTIONS, f"{name} free") / DIRECTIONS**0.5
    return _sorted_numbers(space, name, value, kept)


def _product_numbers(space: WeightSpace, weights: Weights, product: Product) -> Tensor:
    """The same for a product, its free axes projected in each factor separately."""
    sites = space.ancestors(product.over)
    wide = in_float64(weights, space.derivation.made_of(product.plain, product.dual))
    sides, kept = [], list(sites)
    for side, name, factor in zip(
        ("plain", "dual"), (product.plain, product.dual), factors(space, wide, product), strict=True
    ):
        rest = [a for a in space.spec(name).axes if a not in (*sites, product.over)]
        moved = space.permuted_dims(rest)
        free = [1 + len(sites) + d for d in range(len(rest)) if d not in moved]
        kept += [rest[d] for d in sorted(moved)]
        # [batch, *sites, *perm axes, pieces, k, directions]
        sides.append(sketch(factor, free, DIRECTIONS, f"{product.name} {side}"))
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    front = "".join(next(letters) for _ in (0, *sites))
    x_axes, y_axes = ("".join(next(letters) for _ in range(x.ndim - len(front) - 3)) for x in sides)
    # Entries of a product are sums over the contracted axis; normalise to unit scale.
    scale = (max(x.shape[-1] for x in sides) * space.axes[product.over].size) ** -0.5
    words = front + x_axes, front + y_axes
    value = multiply_sketches(scale * sides[0], sides[1], words, front + x_axes + y_axes)
    return _sorted_numbers(space, product.name, value.flatten(-2), kept)


def _sorted_numbers(
    space: WeightSpace, name: str, value: Tensor, axes: Sequence[str]
) -> Tensor:
    """``[batch, *axes, features] → [batch, NUMBERS]``; every axis is permuted."""
    # Inner axes are sorted first, while their parents are still in order.
    for d in space.innermost_first(axes):
        value = sorted_along(value, 1 + d)
    dims = range(1, value.ndim)
    numbers: Tensor = sketch(value, dims, NUMBERS, f"{name} sorted") / NUMBERS**0.5
    return numbers
