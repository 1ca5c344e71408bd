"""Change of one tensor: its size against rounding, and its rank.

The noise of a difference is known: every weight was rounded once, and a change of basis mixes these
errors in a known way. Columns are divided by it, so that the noise of each entry has variance one
and the largest singular value of the noise of an m × n matrix is √m + √n. What stands above that is
a change, and the number of singular values above is its rank. Where a dense change remains below,
singular values that stand out of it are counted as Gavish and Donoho do (2014, unknown noise).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["unchanged", "edited", "low rank", "dense", "pruned", "replaced", "filled"]

REPLACED = 1.0
"""Relative change from which on a tensor has nothing left of the other: two unrelated tensors of
one size are 1.41 apart, a tensor and zero 1."""
FULL = 0.5
"""Share of all singular values from which on a change is dense."""
DIRECT = 1024
"""Smaller sizes up to which all singular values are computed; beyond, the largest `SKETCHED`."""
SKETCHED = 160


@dataclass(frozen=True)
class Change:
    """Change of one tensor from A to B.

    Attributes:
        block: of A, or empty outside the blocks.
        partner: block of B that comes from it.
        tensor: canonical name without the block.
        relative: ``‖B − A‖ / ‖A‖`` after B was aligned to A; infinite where only A is zero.
        rounding: the same, expected of rounding alone.
        kind: ``unchanged`` up to rounding, ``edited`` (entries differ as the files lie, by no more
            than rounding could), ``low rank``, ``dense``, ``pruned`` (what is not zero is
            unchanged), ``replaced``, or ``filled`` (zero in A).
        rank: number of directions of the change that stand above rounding; None for a replaced
            tensor, and for a dense change of which not all singular values were computed.
        standing_out: of a dense change, the number of directions that stand out of it.
        zeros: share of the entries that are zero in B and not in A.
        zero_units: heads or neurons of A that are zero in B.
        grid: of B's numbers, ``4 bits, groups of 32``; None without one.

    Example:
        >>> print(Change("3", "3", "W_Q", 0.02, 1e-7, "low rank", 16))
        3.W_Q: 0.02, rank 16
    """

    block: str
    partner: str
    tensor: str
    relative: float
    rounding: float
    kind: Kind
    rank: int | None = None
    standing_out: int = 0
    zeros: float = 0.0
    zero_units: tuple[int, ...] = ()
    grid: str | None = None

    @property
    def name(self) -> str:
        """Canonical name of the tensor in A."""
        return f"{self.block}.{self.tensor}" if self.block else self.tensor

    def __str__(self) -> str:
        words = f"rank {self.rank}" if self.kind == "low rank" else self.kind
        grid = "" if self.grid is None else f", {self.grid}"
        size = "" if self.kind == "filled" else f"{self.relative:.2g}, "
        return f"{self.name}: {size}{words}{grid}"

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "block": self.block or None,
            "block_of_B": self.partner or None,
            "tensor": self.tensor,
            "relative_change": self.relative if math.isfinite(self.relative) else None,
            "rounding": self.rounding,
            "kind": self.kind,
            "rank": self.rank,
            "standing_out": self.standing_out,
            "zeros": self.zeros,
            "zero_units": list(self.zero_units),
            "grid": self.grid,
        }


@dataclass(frozen=True)
class Spectrum:
    """Rank of a difference against its noise, from `spectrum`.

    Attributes:
        rank: number of singular values above the noise; None where more than were computed.
        dense: whether they are too many for a change of low rank.
        standing_out: number of singular values that stand out of all others.
    """

    rank: int | None
    dense: bool
    standing_out: int


def spectrum(white: Tensor, allowed: float) -> Spectrum:
    """Count the singular values of a difference that stand above its noise.

    Args:
        white: ``[m, n]``, with noise of variance one.
        allowed: multiple of the noise's largest singular value that still counts as noise.

    Example:
        >>> noise = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
        >>> spectrum(noise, 2.0).rank
        0
        >>> spectrum(noise + 100 * torch.ones(40, 60), 2.0).rank
        1
    """
    m, n = white.shape
    small = min(m, n)
    if small == 0:
        return Spectrum(0, False, 0)
    if small <= DIRECT:
        values = torch.linalg.svdvals(white.double())
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            values = torch.svd_lowrank(white, q=SKETCHED, niter=4)[1].double()
    above = int((values > allowed * (m**0.5 + n**0.5)).sum())
    unknown = above == len(values) < small
    dense = unknown or above > FULL * small
    out = 0
    if dense and len(values) == small:
        beta = small / max(m, n)
        omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
        out = int((values > omega * values.median()).sum())
    return Spectrum(None if unknown else above, dense, out)


def whitened(difference: Tensor, noise: Tensor) -> Tensor:
    """A difference with noise of variance one, as a matrix ``[rows, n · d]``.

    Args:
        difference: ``[n, rows, d]``.
        noise: covariance of one row, ``[n, d, d]``.

    Example:
        >>> whitened(torch.full((1, 3, 1), 2.0), torch.full((1, 1, 1), 4.0)).round().tolist()
        [[1.0], [1.0], [1.0]]
    """
    n, rows, d = difference.shape
    white: Tensor = torch.linalg.solve_triangular(_factor(noise), difference.mT, upper=False).mT
    return white.movedim(0, 1).reshape(rows, n * d)


def _factor(noise: Tensor) -> Tensor:
    """Cholesky factor of covariances; a floor stands for errors of exact zeros on both sides."""
    floor = 1e-4 * float(noise.diagonal(dim1=-2, dim2=-1).mean()) + 1e-300
    eye = torch.eye(noise.shape[-1], dtype=noise.dtype)
    factor: Tensor = torch.linalg.cholesky(noise + floor * eye)
    return factor
