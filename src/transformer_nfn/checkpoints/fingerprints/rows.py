"""Rows of a fingerprint: a few invariant numbers, and the rounding error to expect in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """Invariant numbers of one part of a model, with its scale.

    Attributes:
        values: ``[n]`` in float64.
        error: expected square of the length of their rounding error.
    """

    values: Tensor
    error: float

    @staticmethod
    def zeros(count: int) -> Row:
        """The row of a part that a model does not have."""
        return Row(torch.zeros(count, dtype=torch.float64), 0.0)

    @property
    def length(self) -> float:
        """Euclidean length of the values."""
        return float(torch.linalg.vector_norm(self.values))

    def folded(self, count: int) -> Row:
        """The sums of every ``count``-th number, ``[count]``."""
        return Row(self.values.reshape(-1, count).sum(0), self.error)

    def moved(self, share: float) -> Row:
        """The row with a further relative error, ``share`` its expected square."""
        return Row(self.values, self.error + share * self.length**2)

    def times(self, factor: float) -> Row:
        """The row with every number multiplied."""
        return Row(self.values * factor, self.error * factor**2)


def added(rows: Iterable[Row], count: int) -> Row:
    """The sum of rows of ``count`` numbers, whose errors are independent."""
    total = Row.zeros(count)
    for row in rows:
        total = Row(total.values + row.values, total.error + row.error)
    return total


def products(left: Tensor, right: Tensor, left_error: Tensor, right_error: Tensor) -> Row:
    """``[n]`` scalar products of rows ``[n, k]``, each with the expected square of its error.

    Args:
        left: ``[n, k]``.
        right: ``[n, k]``.
        left_error: expected squares of the errors of ``left``; anything that broadcasts to it.
        right_error: the same of ``right``.
    """
    error = (right.square() * left_error).sum() + (left.square() * right_error).sum()
    return Row((left * right).sum(-1).double(), float(error))
