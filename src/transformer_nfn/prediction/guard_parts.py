"""The three small models a guard is made of, each fitted in closed form or nearly.

All of them standardise what they read and cut it off far outside what they were fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from transformer_nfn.models.statistics import mean_and_scale

FARTHEST = 4.0
"""Standard deviations beyond which nothing counts as farther."""
Made = TypeVar("Made")


def tensors_of(made: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a frozen dataclass and of those inside it, ``opinion.inner.mean``."""
    found: dict[str, Tensor] = {}
    for field in fields(made):
        value = getattr(made, field.name)
        if is_dataclass(value):
            found |= tensors_of(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value.double().contiguous()
    return found


def rebuilt(like: Made, tensors: Mapping[str, Tensor], prefix: str = "") -> Made:
    """One of the same kind from what `tensors_of` gave."""
    values: dict[str, Any] = {}
    for field in fields(like):  # type: ignore[arg-type]
        value, name = getattr(like, field.name), prefix + field.name
        values[field.name] = (
            rebuilt(value, tensors, f"{name}.") if is_dataclass(value) else tensors[name]
        )
    return type(like)(**values)


@dataclass(frozen=True)
class Frame:
    """Mean and one over the standard deviation of each column, ``[F]``."""

    mean: Tensor
    scale: Tensor

    @staticmethod
    def blank(count: int) -> Frame:
        """Of so many columns, zero."""
        return Frame(_zeros(count), _zeros(count))

    @staticmethod
    def of(x: Tensor) -> Frame:
        """Of the rows ``[n, F]``; columns that are the same everywhere become zero."""
        return Frame(*mean_and_scale(x))

    def __call__(self, x: Tensor, farthest: float = FARTHEST) -> Tensor:
        """The columns standardised."""
        return ((x - self.mean) * self.scale).clamp(-farthest, farthest)


@dataclass(frozen=True)
class Opinion:
    """Ridge regression of accuracy on numbers, their squares and products."""

    inner: Frame
    outer: Frame
    coef: Tensor

    @staticmethod
    def blank(count: int) -> Opinion:
        """Of so many numbers, zero."""
        products = count + count * (count + 1) // 2
        return Opinion(Frame.blank(count), Frame.blank(products), _zeros(products + 1))

    @staticmethod
    def of(x: Tensor, accuracy: Tensor, weight: Tensor, ridge: float = 3.0) -> Opinion:
        """Fits ``[n, F]`` to ``[n]``, each network counted so often."""
        inner = Frame.of(x)
        outer = Frame.of(_products(inner(x)))
        columns = _with_one(outer(_products(inner(x)), 1e9))
        square = (columns * weight[:, None]).mT @ columns
        square += ridge * torch.eye(len(square), dtype=square.dtype)
        return Opinion(
            inner, outer, torch.linalg.solve(square, columns.mT @ (weight * accuracy))
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The accuracy of each network, ``[n]`` between 0 and 1."""
        return (_with_one(self.outer(_products(self.inner(x)), 1e9)) @ self.coef).clamp(0, 1)


@dataclass(frozen=True)
class Harm:
    """Logistic regression: are these the numbers of a harmed network?"""

    frame: Frame
    coef: Tensor

    @staticmethod
    def blank(count: int) -> Harm:
        """Of so many numbers, zero."""
        return Harm(Frame.blank(count), _zeros(count + 1))

    @staticmethod
    def of(healthy: Tensor, harmed: Tensor, ridge: float = 0.1, steps: int = 25) -> Harm:
        """Fits by Newton's method; both kinds count the same in all."""
        frame = Frame.of(torch.cat([healthy, harmed]))
        x = _with_one(frame(torch.cat([healthy, harmed])))
        n, label = len(x), torch.zeros(len(x), dtype=x.dtype)
        label[len(healthy) :] = 1
        weight = torch.where(label > 0, n / 2 / len(harmed), n / 2 / len(healthy))
        decay = torch.full((x.shape[1],), ridge, dtype=x.dtype)
        decay[-1] = 1e-6
        coef = torch.zeros(x.shape[1], dtype=x.dtype)
        for _ in range(steps):
            p = torch.sigmoid(x @ coef)
            slope = x.mT @ (weight * (p - label)) + decay * coef
            # Where all is certain the curvature vanishes; this keeps the step finite.
            bend = (x * (weight * (p * (1 - p)).clamp(min=1e-4))[:, None]).mT @ x
            coef = coef - torch.linalg.solve(bend + torch.diag(decay), slope)
        return Harm(frame, coef)

    def __call__(self, x: Tensor) -> Tensor:
        """The logit of each network, ``[n]``; high for harmed ones."""
        return _with_one(self.frame(x)) @ self.coef


@dataclass(frozen=True)
class Distance:
    """Mahalanobis distance to the healthy networks, their covariance shrunk to the diagonal."""

    frame: Frame
    inverse: Tensor

    @staticmethod
    def blank(count: int) -> Distance:
        """Of so many numbers, zero."""
        return Distance(Frame.blank(count), _zeros(count, count))

    @staticmethod
    def of(healthy: Tensor, shrunk: float = 0.1) -> Distance:
        """Of rows ``[n, F]``."""
        frame = Frame.of(healthy)
        rows = frame(healthy, 6.0)
        spread = (1 - shrunk) * torch.cov(rows.mT)
        spread += shrunk * torch.eye(len(spread), dtype=rows.dtype)
        return Distance(frame, torch.linalg.inv(spread))

    def __call__(self, x: Tensor) -> Tensor:
        """The logarithm of the squared distance of each network, ``[n]``."""
        rows = self.frame(x, 12.0)
        return ((rows @ self.inverse) * rows).sum(-1).clamp(min=1e-8).log()


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def _products(x: Tensor) -> Tensor:
    """The columns and every product of two of them."""
    first, second = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([x, x[:, first] * x[:, second]], 1)
