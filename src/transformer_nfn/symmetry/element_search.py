"""The group element that takes one network to another.

Permutations are found by matching, matrices by solving. Every perm axis gets a *signature*: for
each index, all invariant numbers at it, with axes of unknown order sorted (sorting is invariant to
order and 1-Lipschitz). Rows are matched, the axis is put in order, and the next axis has more
features. Then each axis with matrices is solved for. No tensor is named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from transformer_nfn.spaces import Element, Weights, WeightSpace, fold
from transformer_nfn.spaces.actions import Solution
from transformer_nfn.symmetry.sources import Source

ROUNDS = 4
FAR_APART = 0.3


@dataclass(frozen=True)
class Alignment:
    """Permutations that take the sources of one network closest to those of another.

    Attributes:
        perms: for each perm axis the indices gathered, ``[*ancestors, n]``.
        sources: of the first network, in that order.
        certain: False if other permutations may fit as well.
    """

    perms: dict[str, Tensor]
    sources: list[Source]
    certain: bool


def align_permutations(space: WeightSpace, U: list[Source], V: list[Source]) -> Alignment:
    """Align ``U`` with ``V``, axis by axis, the outermost first."""
    device = U[0].device if U else None
    perms = dict(space.group.identity(device=device).perms)
    order = sorted(perms, key=lambda a: len(space.ancestors(a)))
    known: set[str] = set()
    best: tuple[float, dict[str, Tensor], list[Source]] | None = None
    for _ in range(ROUNDS):
        settled = True
        for axis in order:
            match = _match_axis(space, axis, U, V, known)
            known.add(axis)
            if match is None:
                settled = settled and space.axes[axis].size == 1
                continue
            settled = settled and match.certain
            perms[axis] = _compose(space, axis, perms, match.index)
            U = [source.reorder(space, axis, match.index) for source in U]
            if match.distance > FAR_APART:
                return Alignment(perms, U, certain=False)
        if settled and best is None:
            return Alignment(perms, U, certain=True)
        score = max((u.gap(v).ratio for u, v in zip(U, V, strict=True)), default=0.0)
        if best is None or score < best[0]:
            best = (score, dict(perms), U)
        if score <= 1.0 or settled:
            break
    assert best is not None
    return Alignment(best[1], best[2], certain=settled)


@dataclass(frozen=True)
class _Match:
    """Matching of one axis: the indices, whether every row has a clear nearest row, and the
    remaining relative distance (signatures are 1-Lipschitz in the weights, so a large distance
    proves that the networks are far apart)."""

    index: Tensor
    certain: bool
    distance: float


def _match_axis(
    space: WeightSpace, axis: str, U: list[Source], V: list[Source], known: set[str]
) -> _Match | None:
    """Match ``axis`` of ``U`` to that of ``V``; None if nothing carries it.

    Views that need no sorting are tried first and suffice where every index has a clear match.
    """
    match = None
    for sort in (False, True):
        left, right = (
            [view for source in side for view in source.views(space, axis, known, sort=sort)]
            for side in (U, V)
        )
        match = _match_views(space, axis, left, right) if left else match
        if match is not None and match.certain:
            return match
    return match


def _match_views(space: WeightSpace, axis: str, U: list[Tensor], V: list[Tensor]) -> _Match:
    left, right = [], []
    for a, b in zip(U, V, strict=True):
        # Every view has equal weight.
        scale = max(float(a.norm()), float(b.norm()), 1e-300)
        left.append(a / scale)
        right.append(b / scale)
    x, y = torch.cat(left, -1).mT, torch.cat(right, -1).mT
    none = x[..., :0, :]
    solved = space.axes[axis].action.solve((x, y), (none, none), 0.0)
    assert solved is not None
    gathered = x.take_along_dim(solved.part.unsqueeze(-2), -1)
    distance = float((gathered - y).norm()) / max(float(y.norm()), 1e-300)
    return _Match(solved.part, solved.certain, distance)


def _compose(space: WeightSpace, axis: str, perms: dict[str, Tensor], index: Tensor) -> Tensor:
    """The permutation of ``axis`` followed by gathering with ``index`` (in aligned order)."""
    if not space.ancestors(axis):
        return perms[axis][index]
    # A permutation is stored at the index its parent had before moving.
    here = Element(space, perms, {}, {})
    aligned = here.move_sites(perms[axis], axis)
    return here.inverse().move_sites(torch.gather(aligned, -1, index), axis)


def recover(
    space: WeightSpace, U: Weights, V: Weights, perms: dict[str, Tensor], unit: float
) -> Element | None:
    """The element with these permutations that takes ``U`` to ``V``; None if a matrix is singular.

    Args:
        U: weights ``[*axes]`` in float64. V: the other.
        perms: as `align_permutations` gives them.
        unit: expected relative error of one weight.
    """
    base = space.group.identity(device=next(iter(U.values())).device)
    shuffle = replace(base, perms={**base.perms, **perms})
    # Tensors on which no matrix acts are not needed below.
    moved = {
        name: w if name in space.entry_tensors else shuffle.move_constant(w, name)
        for name, w in fold(space, U).items()
    }
    solved = solve_axes(space, moved, fold(space, V), unit)
    del moved
    if solved is None:
        return None
    undo = shuffle.inverse()
    linears = {axis: undo.move_sites(s.part, axis) for axis, s in solved.items()}
    inverses = {axis: undo.move_sites(s.inverse, axis) for axis, s in solved.items()}
    g = Element(space, shuffle.perms, linears, inverses, base.shifts)
    if not space.shifts:
        return g
    back = g.inverse()
    shifts = {
        s.tensor: back.move_constant(V[s.tensor], s.tensor) - U[s.tensor] for s in space.shifts
    }
    return replace(g, shifts=shifts)


def rows_along(space: WeightSpace, weights: Weights, axis: str, tensors: Sequence[str]) -> Tensor:
    """The rows of some tensors along an axis, concatenated.

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


def with_rows_along(
    space: WeightSpace, weights: Weights, axis: str, tensors: Sequence[str], rows: Tensor
) -> Weights:
    """The weights with the rows of some tensors replaced; inverse of `rows_along`."""
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
    """For every axis with matrices, the element that takes ``U`` to ``V`` (already permuted).

    A tensor with two such axes constrains one of them once the other is solved.

    Returns:
        None if no element comes close (the ranks differ), or none can be determined.
    """
    solved: dict[str, Solution] = {}
    waiting = {
        a: [t for dual in (False, True) for t in space.carriers(a, dual=dual)]
        for a in space.rebased_axes
    }
    while waiting:
        ready = {
            a: [t for t in tensors if not (set(space.rebased(t)) - {a}) & waiting.keys()]
            for a, tensors in waiting.items()
        }
        able = [a for a in waiting if ready[a] or not waiting[a]]
        if not able:
            return None
        # Prefer an axis whose tensors can all be used.
        axis = min(able, key=lambda a: (len(waiting[a]) - len(ready[a]), -len(ready[a])))
        plain, dual = (
            [rows_along(space, w, axis, [t for t in tensors if t in ready[axis]]) for w in (U, V)]
            for tensors in (space.carriers(axis, dual=d) for d in (False, True))
        )
        solution = space.axes[axis].action.solve((plain[0], plain[1]), (dual[0], dual[1]), unit)
        if solution is None:
            return None
        solved[axis] = solution
        tensors = waiting.pop(axis)
        if any(t in space.twice_rebased for t in tensors):
            U = _moved(space, U, axis, solution)
    return solved


def _moved(space: WeightSpace, U: Weights, axis: str, solution: Solution) -> Weights:
    base = space.group.identity(device=solution.part.device)
    g = replace(
        base,
        linears={**base.linears, axis: solution.part},
        inverses={**base.inverses, axis: solution.inverse},
    )
    return {
        name: g.move_constant(w, name) if axis in space.tensors[name].axes else w
        for name, w in U.items()
    }


def exact_element(
    space: WeightSpace,
    u: Weights,
    v: Weights,
    perms: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Element | None:
    """The identity or permutation that takes ``u`` to ``v`` bit by bit; None if neither does.

    Args:
        u: weights ``[*axes]`` in float64. v: the other.
        perms: candidate permutations of the axes of ``u``.
        dtype: the narrower dtype of the two networks: one may be the other, rounded to it.
    """
    base = space.group.identity(device=next(iter(u.values())).device)
    reordered = replace(base, perms={**base.perms, **perms})
    for element in (base, reordered):
        moved = element.act(u)
        if all(torch.equal(moved[name].to(dtype), w.to(dtype)) for name, w in v.items()):
            return element
    return None
