"""Which rows carry an axis, and which element of its action takes one network's to another's?"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from transformer_nfn.spaces import Element, Weights, WeightSpace
from transformer_nfn.spaces.actions import Solution


def factor(space: WeightSpace, weights: Weights, axis: str, tensors: Sequence[str]) -> Tensor:
    """The rows of some tensors along an axis, side by side.

    Returns:
        ``[*ancestors, rows, n]``; no rows without tensors.
    """
    sites = space.ancestors(axis)
    n = space.axes[axis].size
    parts = []
    for name in tensors:
        value = weights[name].permute(_order(space, name, axis))
        parts.append(value.reshape(*value.shape[: len(sites)], -1, n))
    if parts:
        return torch.cat(parts, -2)
    shape = [space.axes[a].size for a in sites]
    sample = next(iter(weights.values()))
    return sample.new_zeros(*shape, 0, n)


def unfactor(
    space: WeightSpace, weights: Weights, axis: str, tensors: Sequence[str], rows: Tensor
) -> Weights:
    """The weights with the rows of some tensors replaced; undoes `factor`."""
    sites = len(space.ancestors(axis))
    out = dict(weights)
    start = 0
    for name in tensors:
        order = _order(space, name, axis)
        shape = [space.shape(name)[d] for d in order]
        count = prod(shape[sites:-1])
        part = rows[..., start : start + count, :].reshape(shape)
        out[name] = part.permute(*(order.index(d) for d in range(len(order))))
        start += count
    return out


def _order(space: WeightSpace, name: str, axis: str) -> list[int]:
    """Owners of the axis first, the axis last."""
    spec = space.tensors[name]
    sites = [spec.position(a) for a in space.ancestors(axis)]
    at = spec.position(axis)
    return [*sites, *(d for d in range(len(spec.axes)) if d not in (*sites, at)), at]


def solve_axes(
    space: WeightSpace, U: Weights, V: Weights, unit: float
) -> dict[str, Solution] | None:
    """For every axis on which matrices act, what takes ``U`` to ``V``, permutations being undone.

    A tensor with two such axes tells about one of them once the other is known.

    Returns:
        None if no element does it even nearly (the ranks differ), or none can be told.
    """
    solved: dict[str, Solution] = {}
    waiting = {a: _all_carriers(space, a) for a in space.rebased_axes}
    while waiting:
        ready = {
            a: [t for t in tensors if not (set(space.rebased(t)) - {a}) & waiting.keys()]
            for a, tensors in waiting.items()
        }
        able = [a for a in waiting if ready[a] or not waiting[a]]
        if not able:
            return None
        # Best where every tensor that carries the axis can be asked.
        axis = min(able, key=lambda a: (len(waiting[a]) - len(ready[a]), -len(ready[a])))
        plain, dual = (
            [factor(space, w, axis, [t for t in tensors if t in ready[axis]]) for w in (U, V)]
            for tensors in (space.carriers(axis, dual=d) for d in (False, True))
        )
        found = space.axes[axis].action.solve((plain[0], plain[1]), (dual[0], dual[1]), unit)
        if found is None:
            return None
        solved[axis] = found
        tensors = waiting.pop(axis)
        if any(t in space.twice_rebased for t in tensors):
            U = _moved(space, U, axis, found)
    return solved


def _all_carriers(space: WeightSpace, axis: str) -> list[str]:
    return [t for dual in (False, True) for t in space.carriers(axis, dual=dual)]


def _moved(space: WeightSpace, U: Weights, axis: str, found: Solution) -> Weights:
    base = space.group.identity(device=found.part.device)
    g = Element(
        space,
        base.perms,
        {**base.linears, axis: found.part},
        {**base.inverses, axis: found.inverse},
        base.shifts,
    )
    return {
        name: g.move_constant(w, name) if axis in space.tensors[name].axes else w
        for name, w in U.items()
    }
