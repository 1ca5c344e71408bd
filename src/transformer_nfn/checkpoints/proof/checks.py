"""Checks of tensors under an element: how far each is away, against what rounding explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
DOUBLE = 0.999
"""Cosine from which on two neurons or heads are taken for one."""


@dataclass(frozen=True)
class Tolerance:
    """How many expected rounding errors a tensor may be away.

    Attributes:
        same: up to this it is where it should be.
        different: from this on it is not, whatever else may be.
    """

    same: float
    different: float

    @staticmethod
    def of(*dtypes: torch.dtype) -> Tolerance:
        """For two files.

        In half precision two rounding errors are allowed: a disguise of condition 10 leaves one,
        a matrix changed by 1 % stands at three and more. In single and double precision there is
        room for what arithmetic adds to storing, and between 1e-6 and any change that was meant.
        """
        return Tolerance(2.0, 2.2) if any(d in HALF for d in dtypes) else Tolerance(16.0, 64.0)


@dataclass(frozen=True)
class Check:
    """One tensor of the reduced form under the element.

    Attributes:
        name: canonical name.
        residual: ``‖moved − found‖ / ‖found‖``.
        expected: what rounding explains of it, in the mean square.
        ratio: residual over expected, of the tensor as a whole.
        worst: the largest such ratio of one head, neuron, row or entry, divided by what few
            numbers may deviate from their mean.
        excess: the larger of the two, as `Tolerance` counts rounding errors. A sum of few rounding
            errors, such as a bias with others folded in, scatters more than a matrix does: its
            ``ratio`` counts half.
        felt: the same as ``excess``, of what the network can notice: a change of an output matrix
            that nothing reaches is no change of the function.
    """

    name: str
    residual: float
    expected: float
    ratio: float
    worst: float
    excess: float
    felt: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether rounding explains the tensor and each of its parts."""
        return self.excess <= tolerance.same

    def beyond(self, tolerance: Tolerance) -> bool:
        """Whether rounding does not."""
        return self.felt > tolerance.different


def check(
    name: str,
    away: Tensor,
    error: Tensor,
    size: Tensor,
    entries: int,
    *,
    sites: bool = True,
    felt: Tensor | None = None,
) -> Check:
    """Judges a tensor by squares summed over each of its sites (heads, neurons, rows, entries).

    Args:
        name: of the tensor.
        away: squares of the residual, ``[sites]``.
        error: expected squares of the rounding error, ``[sites]``.
        size: squares of the tensor, ``[sites]``.
        entries: numbers that one site sums over; few of them scatter more.
        sites: whether the sites are judged one by one, too.
        felt: squares of how many rounding errors the change is away where it is used, ``[sites]``;
            as many as the tensor itself if not given.
    """
    away, error, size = (x.double().reshape(-1) for x in (away, error, size))
    counted = entries if sites else 0
    half = 1.0 if counted > 1 else 2.0
    ratio, worst = _ratios(away, error, counted)
    excess = noticed = max(ratio / half, worst)
    if felt is not None:
        # Seen through an ill-conditioned partner a change stands out half as far.
        seen = _ratios(torch.minimum(away, 4 * felt.reshape(-1) * error), error, counted)
        noticed = max(seen[0] / half, seen[1])
    norm = max(float(size.sum()), 1e-300) ** 0.5
    residual, expected = (float(x.sum()) ** 0.5 / norm for x in (away, error))
    return Check(name, residual, expected, ratio, worst, excess, noticed)


def _ratios(away: Tensor, error: Tensor, entries: int) -> tuple[float, float]:
    """Rounding errors of the whole, and of the worst site; no sites without entries."""
    total = float(away.sum())
    if total == 0:
        return 0.0, 0.0
    worst = 0.0
    if entries:
        # What is exactly zero on both sides has no error to expect; a part of the whole does.
        floor = 1e-4 * error.mean()
        worst = float((away / (error + floor).clamp_min(1e-300)).max() ** 0.5)
        worst /= 1 + 4 / entries**0.5
    return (total / max(float(error.sum()), 1e-300)) ** 0.5, worst


def has_double(rows: Tensor) -> Tensor:
    """Which rows ``[n, features]`` have another that points the same way, ``[n]``.

    What two neurons write that read the same, or two heads that look the same way, may be shared
    between them at will: only the sum is seen.
    """
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    unit = rows / length.clamp_min(1e-30)
    found = []
    for start in range(0, len(unit), 1024):
        cosines = unit[start : start + 1024] @ unit.mT
        own = torch.arange(len(cosines))
        cosines[own, start + own] = -1
        found.append(cosines.amax(1) > DOUBLE)
    return torch.cat(found)
