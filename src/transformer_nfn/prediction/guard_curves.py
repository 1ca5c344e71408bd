"""What is usual at a predicted accuracy? Curves over accuracies, smoothed from networks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KNOTS = 21
"""Accuracies from 0 to 1 at which a curve is kept; straight lines between them."""
BANDWIDTH = 0.08
"""Of the Gaussian that weighs networks of accuracies near by."""
FAR = 1e-6
"""Weight that networks far away keep: where nobody is near, all count the same."""


@dataclass(frozen=True)
class Curve:
    """Its values at the knots, ``[KNOTS]``."""

    values: Tensor

    @staticmethod
    def blank() -> Curve:
        """One of zeros."""
        return Curve(torch.zeros(KNOTS, dtype=torch.float64))

    @staticmethod
    def of(accuracy: Tensor, y: Tensor, weight: Tensor | None = None) -> Curve:
        """The smoothed mean of ``y`` over accuracies, ``[n]`` each."""
        return Curve(smoothed(_knots(), accuracy, y, weight))

    @staticmethod
    def of_size(
        accuracy: Tensor, y: Tensor, weight: Tensor | None = None, *, smallest: float
    ) -> Curve:
        """The smoothed root of the mean square of ``y``."""
        return Curve(Curve.of(accuracy, y.square(), weight).values.sqrt().clamp(min=smallest))

    def __call__(self, accuracy: Tensor) -> Tensor:
        """The values at accuracies ``[n]``."""
        place = accuracy.double().clamp(0, 1) * (KNOTS - 1)
        below = place.long().clamp(max=KNOTS - 2)
        share = place - below
        return (1 - share) * self.values[below] + share * self.values[below + 1]


def smoothed(at: Tensor, accuracy: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """The mean of ``y`` near each accuracy ``at``."""
    return _mean(_near(at, accuracy), y, weight)


def smoothed_by_others(accuracy: Tensor, y: Tensor) -> Tensor:
    """The mean of ``y`` near the accuracy of each network, by all the others."""
    near = _near(accuracy, accuracy)
    return _mean(near - torch.diag(near.diagonal()), y, None)


def _knots() -> Tensor:
    return torch.linspace(0, 1, KNOTS, dtype=torch.float64)


def _near(at: Tensor, accuracy: Tensor) -> Tensor:
    return torch.exp(-0.5 * ((at[:, None] - accuracy[None]) / BANDWIDTH).square()) + FAR


def _mean(near: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    near = near if weight is None else near * weight
    return (near / near.sum(1, keepdim=True)) @ y
