"""Permutations of an axis, and the matching of rows that solves for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma, log
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.spaces.actions.base import (
    Action,
    Device,
    Drawing,
    Place,
    Pointwise,
    Sites,
    Size,
    Solution,
    line_up,
    spread,
)
from transformer_nfn.spaces.actions.solvers import Pair

EXACT_WORK = 2e8
CANDIDATES = 4
PORTION = 2**20


def distances(x: Tensor, y: Tensor, *, exact: bool | None = None) -> Tensor:
    """Euclidean distances between rows, ``[n, F], [m, F] → [n, m]``.

    Large tables use a matrix product, which cancels for rows that almost agree, so the nearest
    few of every row are recomputed entry by entry. ``exact`` forces either; by size if None.
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
    """Whether ``index`` holds every number from 0 to n−1 once."""
    return bool((torch.bincount(index, minlength=len(index)) == 1).all())


@dataclass(frozen=True)
class Matching:
    """A one-to-one matching of rows: the indices, and whether every row has a clear nearest row."""

    index: Tensor
    certain: bool


def match_rows(target: Tensor, source: Tensor) -> Matching:
    """The permutation ``p`` for which ``source[p]`` is nearest to ``target``, ``[n, F]`` each.

    Nearest neighbours where they form a permutation, otherwise the Hungarian algorithm.

    >>> match_rows(torch.tensor([[0.0], [5.0]]), torch.tensor([[5.1], [0.1]]))
    Matching(index=tensor([1, 0]), certain=True)
    """
    # A few rows at a time: the table of all distances would dominate memory.
    exact = len(target) * len(source) * target.shape[-1] <= EXACT_WORK
    nearest_two = [
        distances(rows, source, exact=exact).topk(min(2, len(source)), dim=1, largest=False)
        for rows in target.split(max(PORTION // max(len(source), 1), 1))
    ]
    nearest = torch.cat([two.indices[:, 0] for two in nearest_two])
    if is_permutation(nearest):
        gaps = torch.cat([two.values for two in nearest_two])
        certain = len(target) == 1 or bool((gaps[:, 0] < 0.5 * gaps[:, -1]).all())
        return Matching(nearest, certain)
    return Matching(assign(-distances(target, source).cpu()).to(target.device), False)


def assign(alike: Tensor) -> Tensor:
    """Column that each row takes, one to one, so that the sum of ``alike [n, n]`` is largest.

    >>> assign(torch.tensor([[1.0, 3.0], [2.0, 3.5]])).tolist()
    [1, 0]
    """
    return assign_pairs(alike)[1]


def assign_pairs(alike: Tensor) -> Pair:
    """Rows and columns that are paired, one to one, so that the sum of ``alike [n, m]`` is largest.

    >>> rows, columns = assign_pairs(torch.tensor([[1.0], [2.0]]))
    >>> rows.tolist(), columns.tolist()
    ([1], [0])
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    rows, columns = linear_sum_assignment(alike.numpy(), maximize=True)
    return torch.as_tensor(rows), torch.as_tensor(columns)


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


class Permutation(Action):
    """All permutations; an element holds gathered indices, ``(gx)_i = x_π(i)``, ``[*sites, n]``.

    On an axis that belongs to another one there is a permutation for each index of the owner.
    Queries within a key/value group, with the permutation of the groups, form a wreath product.

    >>> perm = Permutation()
    >>> perm.invert(torch.tensor([2, 0, 1]))
    tensor([1, 2, 0])
    """

    word: ClassVar[str] = "perm"
    permutes: ClassVar[bool] = True

    def describe(self, size: int) -> str:
        return f"permutations of {size}"

    def size(self, n: int) -> Size:
        return Size(finite=lgamma(n + 1) / log(10))

    def identity(self, size: int, sites: Sites, dtype: torch.dtype, device: Device) -> Tensor:
        return torch.arange(size, device=device).expand(*sites, size).contiguous()

    def draw(self, size: int, sites: Sites, how: Drawing) -> Tensor:
        noise = torch.rand((*sites, size), generator=how.generator, device=how.device)
        return noise.argsort(-1)

    def invert(self, part: Tensor) -> Tensor:
        return torch.argsort(part, dim=-1)

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """``π_first[π_then]``."""
        return torch.gather(first, -1, then)

    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        dim = place.dim
        if not place.sites:
            return x.index_select(dim, part)
        x = spread(x, part, place)
        n = x.shape[dim]
        if place.sites == (0,) and all(size == 1 for size in x.shape[1:dim]):
            # Whole rows move: one index_select over the flattened batch copies them contiguously.
            start = torch.arange(0, x.shape[0] * n, n, device=x.device).unsqueeze(1)
            rows = x.reshape(x.shape[0] * n, -1)
            return rows.index_select(0, (start + part).view(-1)).view(x.shape)
        index = line_up(part, (*place.sites, dim), x.ndim)
        return torch.gather(x, dim, index.expand(x.shape))

    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        """The permutation of columns that takes the first rows closest to the second."""
        x, y = (torch.cat(pair, -2).mT for pair in zip(plain, dual, strict=True))
        sites, n = x.shape[:-2], x.shape[-2]
        matched = [
            match_rows(target, source)
            for source, target in zip(
                x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:]), strict=True
            )
        ]
        index = torch.stack([m.index for m in matched]).reshape(*sites, n)
        return Solution(index, self.invert(index), all(m.certain for m in matched))

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """Columns in descending order of a fixed linear key."""
        index = self.order([plain, dual]).unsqueeze(-2)
        return plain.take_along_dim(index, -1), dual.take_along_dim(index, -1)

    def order(self, rows: list[Tensor]) -> Tensor:
        """The permutation that `balance` uses, from tables ``[*sites, rows, n]`` of one ``n``."""
        keys = [
            _key(table) @ (table / table.norm().clamp_min(1e-300))
            for table in rows
            if table.shape[-2]
        ]
        if not keys:
            table = rows[0]
            return self.identity(
                table.shape[-1], tuple(table.shape[:-2]), torch.long, table.device
            )
        return torch.stack(keys).sum(0).argsort(-1, descending=True)

    def commutes_with(self, fn: Pointwise) -> bool:
        return True


def _key(table: Tensor) -> Tensor:
    """Fixed pseudo-random weights ``[rows]``, the same on every machine."""
    rows = table.shape[-2]
    noise = np.random.RandomState(rows % 2**32).standard_normal(rows)
    return torch.as_tensor(noise, dtype=table.dtype, device=table.device)
