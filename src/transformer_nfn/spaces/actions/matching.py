"""Which row of one table is which row of another: nearest, and Hungarian where that clashes."""

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
