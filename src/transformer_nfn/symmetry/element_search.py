"""Which group element takes one network to another: permutations by matching, matrices by solving.

Nothing here knows the name of a tensor. Every perm axis gets a *signature*: for each index, all
invariant numbers that stand at it, with axes whose order is not yet known sorted away (sorting
is blind to order and moves no more than its input). Rows are matched, the axis is put in order,
and the next axis sees more. Then each linear axis is solved for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.spaces import Element, Weights, WeightSpace
from transformer_nfn.symmetry.rebasing import solve_axes
from transformer_nfn.symmetry.sources import Source

ROUNDS = 4
HOPELESS = 0.3


@dataclass(frozen=True)
class Alignment:
    """Permutations that bring the sources of one network nearest to those of another.

    Attributes:
        perms: for each perm axis the indices gathered, ``[*ancestors, n]``.
        sources: of the first network, put in that order.
        certain: False if other permutations might have done as well.
    """

    perms: dict[str, Tensor]
    sources: list[Source]
    certain: bool


def align_permutations(space: WeightSpace, U: list[Source], V: list[Source]) -> Alignment:
    """The alignment of ``U`` with ``V``, axis by axis, the outermost first."""
    perms = dict(space.group.identity(device=_device(U)).perms)
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
            if match.distance > HOPELESS:
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


def _device(given: list[Source]) -> torch.device | None:
    return given[0].device if given else None


@dataclass(frozen=True)
class _Match:
    """How one axis was put in order: the indices, whether every row had one nearest row, and
    the relative distance left (signatures move no more than the weights, so a large one proves
    that the networks are far apart)."""

    index: Tensor
    certain: bool
    distance: float


def _match_axis(
    space: WeightSpace, axis: str, U: list[Source], V: list[Source], known: set[str]
) -> _Match | None:
    """How ``axis`` of ``U`` must be gathered to look like ``V``; None if nothing carries it.

    What needs no sorting is tried first, and suffices where every index has one match.
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
        # Every view counts alike, whatever its units.
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
    """The permutation of ``axis`` after one more gathering by ``index`` (in aligned order)."""
    if not space.ancestors(axis):
        return perms[axis][index]
    # A permutation is stored at the index its parent had before moving.
    here = Element(space, perms, {}, {})
    aligned = here.move_sites(perms[axis], axis)
    return here.inverse().move_sites(torch.gather(aligned, -1, index), axis)


def recover(
    space: WeightSpace,
    U: Weights,
    V: Weights,
    folded_U: Weights,
    folded_V: Weights,
    perms: dict[str, Tensor],
    unit: float,
) -> Element | None:
    """The element with these permutations that takes ``U`` to ``V``; None if a matrix is singular.

    Args:
        space: the space of both networks.
        U: weights ``[*axes]`` in float64, and ``folded_U`` without shifts.
        V: the same for the other network.
        perms: as `align_permutations` gives them.
        unit: relative error to expect in one weight.
    """
    base = space.group.identity(device=next(iter(U.values())).device)
    shuffle = Element(space, {**base.perms, **perms}, base.linears, base.inverses, base.shifts)
    # Tensors that no matrix acts on are not asked, and may stay where they are.
    moved = {
        name: w if name in space.entry_tensors else shuffle.move_constant(w, name)
        for name, w in folded_U.items()
    }
    solved = solve_axes(space, moved, folded_V, unit)
    del moved
    if solved is None:
        return None
    undo = shuffle.inverse()
    linears = {axis: undo.move_sites(found.part, axis) for axis, found in solved.items()}
    inverses = {axis: undo.move_sites(found.inverse, axis) for axis, found in solved.items()}
    g = Element(space, shuffle.perms, linears, inverses, base.shifts)
    if not space.shifts:
        return g
    back = g.inverse()
    shifts = {
        s.tensor: back.move_constant(V[s.tensor], s.tensor) - U[s.tensor] for s in space.shifts
    }
    return Element(space, g.perms, linears, inverses, shifts)
