"""Which group element takes one network to another: permutations by matching, matrices by solving.

Nothing here knows the name of a tensor. Every perm axis gets a *signature*: for each index, all
invariant numbers that stand at it, with axes whose order is not yet known sorted away (sorting
is blind to order and moves no more than its input). Rows are matched, the axis is put in order,
and the next axis sees more. Then each linear axis is solved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.spaces import Element, Weights, WeightSpace
from transformer_nfn.spaces.actions.matching import match_rows
from transformer_nfn.symmetry.rebasing import solve_axis
from transformer_nfn.symmetry.sources import Source, ratio

ROUNDS = 4
HOPELESS = 0.3


def align_permutations(
    space: WeightSpace, U: list[Source], V: list[Source]
) -> tuple[dict[str, Tensor], list[Source]]:
    """Permutations that bring the sources of ``U`` nearest to those of ``V``.

    Returns:
        For each perm axis the indices gathered (``[*ancestors, n]``), and the sources of ``U``
        put in that order.
    """
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
                continue
            settled = settled and match.certain
            perms[axis] = _compose(space, axis, perms, match.index)
            U = [reorder(space, source, axis, match.index) for source in U]
            if match.distance > HOPELESS:
                return perms, U
        score = max((ratio(u, v) for u, v in zip(U, V, strict=True)), default=0.0)
        if best is None or score < best[0]:
            best = (score, dict(perms), U)
        if score <= 1.0 or settled:
            break
    assert best is not None
    return best[1], best[2]


def _device(given: list[Source]) -> torch.device | None:
    return given[0].value.device if given else None


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
    for sort in (False, True):
        left, right = (
            [view for source in side for view in views(space, source, axis, known, sort=sort)]
            for side in (U, V)
        )
        match = _match_views(left, right) if left else None
        if match is not None and match.certain:
            return match
    return match


def _match_views(U: list[Tensor], V: list[Tensor]) -> _Match:
    left, right = [], []
    for a, b in zip(U, V, strict=True):
        # Every view counts alike, whatever its units.
        scale = max(float(a.norm()), float(b.norm()), 1e-300)
        left.append(a / scale)
        right.append(b / scale)
    x, y = torch.cat(left, -1), torch.cat(right, -1)
    sites = x.shape[:-2]
    x, y = x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:])
    matched = [match_rows(b, a) for a, b in zip(x, y, strict=True)]
    index = torch.stack([m.index for m in matched])
    gathered = torch.gather(x, 1, index.unsqueeze(-1).expand_as(x))
    distance = float((gathered - y).norm()) / max(float(y.norm()), 1e-300)
    certain = all(m.certain for m in matched)
    return _Match(index.reshape(*sites, -1), certain, distance)


def views(
    space: WeightSpace, source: Source, axis: str, known: set[str], *, sort: bool
) -> list[Tensor]:
    """What ``source`` says about each index of ``axis``: tensors ``[*ancestors, n, features]``.

    Perm axes of unknown order are sorted away, or with ``sort=False`` the view is left out.
    """
    at = [d for d, name in enumerate(source.axes) if name == axis]
    front = [source.axes.index(p) for p in space.ancestors(axis)] if at else []
    blind = [
        d
        for d, name in enumerate(source.axes)
        if d not in front and space.is_permuted(name) and name not in known
    ]
    # Inner axes are sorted first: each moves on its own only while its parent stands still.
    blind.sort(key=lambda d: -len(space.ancestors(source.axes[d])))
    out = []
    for d in at:
        others = [e for e in blind if e != d]
        if sort or not others:
            out.append(_to_front(_sorted(source.value, others), [*front, d]))
    others = [e for e in blind if e not in at]
    if len(at) == 2 and (sort or not others):
        diagonal = _sorted(source.value, others).diagonal(dim1=at[0], dim2=at[1])
        out.append(_to_front(diagonal, [diagonal.ndim - 1]))
    return out


def _sorted(value: Tensor, dims: list[int]) -> Tensor:
    for d in dims:
        value = value.sort(dim=d).values
    return value


def _to_front(value: Tensor, dims: Sequence[int]) -> Tensor:
    rest = [d for d in range(value.ndim) if d not in dims]
    shape = [value.shape[d] for d in dims]
    return value.permute(*dims, *rest).reshape(*shape, -1)


def _compose(space: WeightSpace, axis: str, perms: dict[str, Tensor], index: Tensor) -> Tensor:
    """The permutation of ``axis`` after one more gathering by ``index`` (in aligned order)."""
    if not space.ancestors(axis):
        return perms[axis][index]
    # A permutation is stored at the index its parent had before moving.
    here = Element(space, perms, {}, {})
    aligned = here.move_sites(perms[axis], axis)
    return here.inverse().move_sites(torch.gather(aligned, -1, index), axis)


def reorder(space: WeightSpace, source: Source, axis: str, index: Tensor) -> Source:
    """The source with ``axis`` gathered by ``index [*ancestors, n]``, given in today's order."""
    if axis not in source.axes:
        return source
    if not space.ancestors(axis):
        return source.select(axis, index)
    shape = [1] * source.value.ndim
    for parent in (*space.ancestors(axis), axis):
        d = source.axes.index(parent)
        shape[d] = source.value.shape[d]
    full = index.reshape(shape).expand(source.value.shape)
    value = source.value.gather(source.axes.index(axis), full)
    if source.entrywise:
        return replace(
            source, value=value, error=source.error.gather(source.axes.index(axis), full)
        )
    return replace(source, value=value)


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
    moved = shuffle.act(folded_U)
    undo = shuffle.inverse()
    linears, inverses = {}, {}
    for axis in base.linears:
        solved = solve_axis(space, axis, moved, folded_V, unit)
        if solved is None:
            return None
        linears[axis] = undo.move_sites(solved.part, axis)
        inverses[axis] = undo.move_sites(solved.inverse, axis)
    g = Element(space, shuffle.perms, linears, inverses, base.shifts)
    if not space.shifts:
        return g
    back = g.inverse()
    shifts = {
        s.tensor: back.move_constant(V[s.tensor], s.tensor) - U[s.tensor] for s in space.shifts
    }
    return Element(space, g.perms, linears, inverses, shifts)
