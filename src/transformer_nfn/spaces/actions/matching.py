"""Solvers for permutations: rows matched to rows, units assigned to units, heads within groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_WORK = 2e8
CANDIDATES = 4
PORTION = 2**20


def distances(x: Tensor, y: Tensor, *, exact: bool | None = None) -> Tensor:
    """Euclidean distances between rows, ``[n, F], [m, F] → [n, m]``.

    Large tables use a matrix product, which cancels for rows that almost agree, so the nearest
    few of every row are measured again, entry by entry. ``exact`` says which; by size if None.
    """
    n, m, width = len(x), len(y), x.shape[-1]
    if exact if exact is not None else n * m * width <= EXACT_WORK:
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    rough = torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")
    near = rough.topk(min(CANDIDATES, m), dim=1, largest=False).indices
    for k in range(near.shape[1]):
        column = near[:, k]
        exact = (x - y[column]).norm(dim=1)
        rough[torch.arange(n), column] = exact
    return rough


def is_permutation(index: Tensor) -> bool:
    """Whether every number from 0 to n−1 stands in ``index`` once."""
    return bool((torch.bincount(index, minlength=len(index)) == 1).all())


@dataclass(frozen=True)
class Matching:
    """A one-to-one matching of rows: the indices, and whether every row had one nearest row."""

    index: Tensor
    certain: bool


def match_rows(target: Tensor, source: Tensor) -> Matching:
    """The permutation ``p`` for which ``source[p]`` is nearest to ``target``, ``[n, F]`` each."""
    # A few rows at a time: the table of all distances is the largest thing around.
    exact = len(target) * len(source) * target.shape[-1] <= EXACT_WORK
    found = [
        distances(rows, source, exact=exact).topk(min(2, len(source)), dim=1, largest=False)
        for rows in target.split(max(PORTION // max(len(source), 1), 1))
    ]
    nearest = torch.cat([f.indices[:, 0] for f in found])
    if is_permutation(nearest):
        two = torch.cat([f.values for f in found])
        certain = len(target) == 1 or bool((two[:, 0] < 0.5 * two[:, -1]).all())
        return Matching(nearest, certain)
    from scipy.optimize import linear_sum_assignment  # slow to import, rarely needed

    _, columns = linear_sum_assignment(distances(target, source).cpu().numpy())
    return Matching(torch.as_tensor(columns, device=target.device), False)


def assign(alike: Tensor) -> Tensor:
    """Column that each row takes, one to one, so that the sum of ``alike [n, n]`` is largest.

    >>> assign(torch.tensor([[1.0, 3.0], [2.0, 3.5]])).tolist()
    [1, 0]
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    _, columns = linear_sum_assignment(alike.numpy(), maximize=True)
    return torch.as_tensor(columns)


def assign_in_groups(alike: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The same where units belong to groups, which stay together.

    Args:
        alike: ``[h, h]``, of unit i of B and unit j of A.
        groups: number of groups, of ``h / groups`` consecutive units each.

    Returns:
        Unit of A that each unit of B is, ``[h]``, and group of A that each group of B is, ``[g]``.
    """
    share = len(alike) // groups
    tiles = alike.unflatten(0, (groups, share)).unflatten(2, (groups, share)).transpose(1, 2)
    if share == 1:
        index = assign(tiles[:, :, 0, 0])
        return index, index
    total = torch.zeros(groups, groups, dtype=alike.dtype)
    inner = torch.zeros(groups, groups, share, dtype=torch.long)
    for i in range(groups):
        for j in range(groups):
            inner[i, j] = assign(tiles[i, j])
            total[i, j] = tiles[i, j].gather(1, inner[i, j].unsqueeze(1)).sum()
    chosen = assign(total)
    within = inner[torch.arange(groups), chosen]
    return (chosen.unsqueeze(-1) * share + within).flatten(), chosen


def assign_signed(cross: Tensor, fixed: Tensor, *, one_sign: bool) -> tuple[Tensor, Tensor]:
    """Signed permutation that maximises the agreement with ``cross = AᵀB``.

    Args:
        cross: ``[n, n]`` products of what takes signs.
        fixed: ``[n, n]`` products of what is permuted and takes no sign.
        one_sign: all coordinates share one sign.

    Returns:
        Coordinate of A that each of B is, ``[n]``, and its sign, ``[n]``.
    """
    at = torch.arange(len(cross))
    if not one_sign:
        order = assign((cross.abs() + fixed).mT)
        return order, torch.where(cross[order, at] < 0, -1.0, 1.0).double()
    best: tuple[float, Tensor, float] | None = None
    for sign in (1.0, -1.0):
        alike = (sign * cross + fixed).mT
        order = assign(alike)
        value = float(alike[at, order].sum())
        if best is None or value > best[0]:
            best = value, order, sign
    assert best is not None
    return best[1], torch.full((len(cross),), best[2], dtype=torch.float64)
