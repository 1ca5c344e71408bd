"""Which rows carry an axis, and which element of its action takes one network's to another's?"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.spaces.actions import Solution


def factor(space: WeightSpace, weights: Weights, axis: str, *, dual: bool) -> Tensor:
    """Everything that carries a linear axis plain (or dual), side by side.

    Returns:
        ``[*ancestors, rows, n]``; no rows if nothing carries it so.
    """
    sites = space.ancestors(axis)
    n = space.axes[axis].size
    parts = []
    for name, spec in space.tensors.items():
        if axis in spec.axes and (axis in spec.dual) == dual and name not in space.shifted:
            order = [spec.position(a) for a in sites]
            at = spec.position(axis)
            rest = [d for d in range(len(spec.axes)) if d not in (*order, at)]
            value = weights[name].permute(*order, *rest, at)
            parts.append(value.reshape(*value.shape[: len(sites)], -1, n))
    if parts:
        return torch.cat(parts, -2)
    shape = [space.axes[a].size for a in sites]
    sample = next(iter(weights.values()))
    return sample.new_zeros(*shape, 0, n)


def unfactor(
    space: WeightSpace, weights: Weights, axis: str, rows: Tensor, *, dual: bool
) -> Weights:
    """The weights with what carries a linear axis plain (or dual) replaced; undoes `factor`."""
    sites = space.ancestors(axis)
    out = dict(weights)
    start = 0
    for name, spec in space.tensors.items():
        if axis in spec.axes and (axis in spec.dual) == dual and name not in space.shifted:
            order = [*(spec.position(a) for a in sites)]
            at = spec.position(axis)
            order += [d for d in range(len(spec.axes)) if d not in (*order, at)] + [at]
            shape = [space.shape(name)[d] for d in order]
            count = prod(shape[len(sites) : -1])
            part = rows[..., start : start + count, :].reshape(shape)
            out[name] = part.permute(*(order.index(d) for d in range(len(order))))
            start += count
    return out


def solve_axis(
    space: WeightSpace, axis: str, U: Weights, V: Weights, unit: float
) -> Solution | None:
    """The element of one axis that takes the rows of ``U`` to those of ``V`` at every site.

    None if no element does it even nearly (the ranks differ).
    """
    plain = tuple(factor(space, w, axis, dual=False) for w in (U, V))
    dual = tuple(factor(space, w, axis, dual=True) for w in (U, V))
    return space.axes[axis].action.solve((plain[0], plain[1]), (dual[0], dual[1]), unit)
