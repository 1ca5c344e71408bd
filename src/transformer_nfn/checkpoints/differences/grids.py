"""Quantisation grid of a matrix: few evenly spaced values in each group of its inputs.

Quantised weights are stored as whole numbers with a scale (and an offset) for each row or group.
After they were written as floats again the whole numbers can still be seen: differences of the
values of a group are multiples of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (256, 128, 64, 32, 16)
"""Sizes of groups that are looked for, after whole matrices and whole rows."""
LEVELS = 256
"""Most steps between the smallest and the largest value of a group."""
EVEN = 0.1
"""Largest distance of a value from the grid, in steps; rounding to the dtype of the file causes
some."""
MOST = 0.9
"""Share of the groups that have to lie on a grid: in a group of few values, no two may be one step
apart."""
SAMPLE = 512
"""Groups that are looked at first."""


@dataclass(frozen=True)
class Grid:
    """Grid of a matrix.

    Attributes:
        bits: that hold the whole numbers.
        group: number of consecutive inputs with one step; 0 for the whole matrix.
        step: root mean square of the steps.

    Example:
        >>> print(Grid(4, 32, 0.01))
        4 bits, groups of 32
    """

    bits: int
    group: int
    step: float

    def __str__(self) -> str:
        where = f"groups of {self.group}" if self.group else "one step for the matrix"
        return f"{self.bits} bits, {where}"


def find_grid(W: Tensor) -> Grid | None:
    """The grid of a matrix, with the largest groups for which there is one.

    Args:
        W: ``[inputs, outputs]``; groups are runs of inputs of one output.

    Example:
        >>> W = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        >>> find_grid(W) is None
        True
        >>> step = W.abs().amax(0) / 7
        >>> print(find_grid((W / step).round() * step))
        4 bits, groups of 64
    """
    inputs = len(W)
    columns = W.mT.double()
    for size in (0, inputs, *(s for s in SIZES if s < inputs and inputs % s == 0)):
        groups = columns.reshape(1, -1) if size == 0 else columns.reshape(-1, size)
        if _on_grid(groups[:: max(len(groups) // SAMPLE, 1)]) is None:
            continue
        found = _on_grid(groups)
        if found is not None:
            levels, step = found
            return Grid(max(levels.bit_length(), 1), size, step)
    return None


def _on_grid(groups: Tensor) -> tuple[int, float] | None:
    """Largest number of steps within a group, and the step; None without a grid."""
    values = groups.sort(1).values
    gaps = values.diff(dim=1)
    spread = values[:, -1] - values[:, 0]
    least = (spread / (2 * LEVELS)).unsqueeze(1)
    varied = spread > 0
    if not bool(varied.any()):
        return None
    # Equal values may differ by the rounding of the file's dtype.
    step = torch.where(gaps > least, gaps, torch.inf).amin(1)
    steps = (spread / step).round()
    step = spread / steps.clamp_min(1)
    place = (values - values[:, :1]) / step.unsqueeze(1)
    away = (place - place.round()).abs().amax(1)
    levels = (steps + 1).long()
    fits = varied & (away <= EVEN) & (levels <= LEVELS) & (levels < groups.shape[1] ** 2)
    fits &= levels > 1
    if int(fits.sum()) < MOST * int(varied.sum()):
        return None
    return int(steps[fits].max()), float(step[fits].square().mean().sqrt())
