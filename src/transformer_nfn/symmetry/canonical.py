"""One representative of every orbit: permuted axes in a fixed order, factors balanced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import Architecture
from transformer_nfn.spaces import Element, Weights, WeightSpace, fold
from transformer_nfn.spaces.actions import Permutation
from transformer_nfn.symmetry.factored import sources
from transformer_nfn.symmetry.rebasing import factor, unfactor
from transformer_nfn.symmetry.sources import in_float64, single


def canonical_form(target: Architecture | WeightSpace, U: Mapping[str, Tensor]) -> Weights:
    """A representative of the orbit of each network: equal for all members, to rounding.

    Shifted biases are folded away; every perm axis is sorted by a fixed linear key of the
    invariants at each index; the two factors of every product become those of its balanced
    singular value decomposition, ``U Σ^½`` and ``V Σ^½``, the largest entry of each column of U
    positive. The function does not change.

    It jumps where two keys or two singular values meet; for something continuous use
    `fingerprint`. If a product has less than full rank, the representative keeps the product
    (and the function) but may lie outside the orbit, in its closure.

    Args:
        target: the space of the weights, or their architecture.
        U: ``[batch, channels, *axes]`` or ``[*axes]``.

    Returns:
        Weights of the same shapes and dtype, computed in float64.
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
        plain, dual = (factor(space, ordered, axis, names) for names in tensors)
        balanced = space.axes[axis].action.balance(plain, dual)
        for names, rows in zip(tensors, balanced, strict=True):
            ordered = unfactor(space, ordered, axis, names, rows)
    return ordered


def _in_order(space: WeightSpace, weights: Weights) -> Weights:
    """The weights with every perm axis sorted by its key, outer axes first."""
    given = sources(space, weights, 0.0)
    base = space.group.identity(device=next(iter(weights.values())).device)
    perms = dict(base.perms)
    known: set[str] = set()
    permutation = Permutation()
    for axis in sorted(perms, key=lambda a: len(space.ancestors(a))):
        rows = [v.mT for s in given for v in s.views(space, axis, known, sort=True)]
        if rows:
            index = permutation.order(rows)
            given = [s.reorder(space, axis, index) for s in given]
            # The parents are in order already, but permutations are stored at where they were.
            here = Element(space, {**perms}, {}, {})
            perms[axis] = here.inverse().move_sites(index, axis) if space.ancestors(axis) else index
        known.add(axis)
    shuffle = Element(space, perms, base.linears, base.inverses, base.shifts)
    return shuffle.act(weights)
