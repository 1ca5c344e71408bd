"""Small models inside a guard, fitted in closed form or by Newton's method.

Their inputs are standardised and clamped far outside the range they were fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from transformer_nfn.models.statistics import mean_and_scale, standardised

CLAMP = 4.0
"""In standard deviations."""
KNOTS = 21
"""Accuracies from 0 to 1 at which a curve is stored, linear in between."""
BANDWIDTH = 0.08
"""Of the Gaussian kernel of a curve."""
FAR_WEIGHT = 1e-6
"""Minimal kernel weight: where no network is near, all count the same."""
T = TypeVar("T")


def flatten(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of nested dataclasses by name, such as ``estimator.inner.mean``."""
    tensors: dict[str, Tensor] = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            tensors |= flatten(inner, f"{prefix}{field.name}.")
        else:
            tensors[prefix + field.name] = inner.double().contiguous()
    return tensors


def unflatten(cls: type[T], tensors: Mapping[str, Tensor], prefix: str = "") -> T:
    """Rebuild a dataclass from what `flatten` returned."""
    values = {
        name: tensors[prefix + name]
        if hint is Tensor
        else unflatten(hint, tensors, f"{prefix}{name}.")
        for name, hint in get_type_hints(cls).items()
    }
    return cls(**values)


@dataclass(frozen=True)
class Curve:
    """Function of the accuracy, by its values at the knots, ``[KNOTS]``."""

    values: Tensor

    @staticmethod
    def of(accuracy: Tensor, y: Tensor, weight: Tensor | None = None) -> Curve:
        """Kernel-smoothed mean of ``y`` over accuracies, ``[n]`` each."""
        knots = torch.linspace(0, 1, KNOTS, dtype=torch.float64)
        return Curve(_weighted_mean(_kernel(knots, accuracy), y, weight))

    @staticmethod
    def rms(
        accuracy: Tensor, y: Tensor, weight: Tensor | None = None, *, minimum: float
    ) -> Curve:
        """Kernel-smoothed root mean square of ``y``."""
        return Curve(Curve.of(accuracy, y.square(), weight).values.sqrt().clamp(min=minimum))

    def __call__(self, accuracy: Tensor) -> Tensor:
        """Interpolate at accuracies ``[n]``."""
        place = accuracy.double().clamp(0, 1) * (KNOTS - 1)
        below = place.nan_to_num().long().clamp(max=KNOTS - 2)
        share = place - below
        return (1 - share) * self.values[below] + share * self.values[below + 1]


def smoothed_by_others(accuracy: Tensor, y: Tensor) -> Tensor:
    """Kernel-smoothed mean of ``y`` at the accuracy of each network, leaving that network out."""
    kernel = _kernel(accuracy, accuracy)
    return _weighted_mean(kernel - torch.diag(kernel.diagonal()), y, None)


def _kernel(at: Tensor, accuracy: Tensor) -> Tensor:
    return torch.exp(-0.5 * ((at[:, None] - accuracy[None]) / BANDWIDTH).square()) + FAR_WEIGHT


def _weighted_mean(kernel: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    kernel = kernel if weight is None else kernel * weight
    return (kernel / kernel.sum(1, keepdim=True)) @ y


@dataclass(frozen=True)
class Standardizer:
    """Mean and inverse standard deviation of each column, ``[F]``."""

    mean: Tensor
    scale: Tensor

    @staticmethod
    def of(x: Tensor) -> Standardizer:
        """Fit to rows ``[n, F]``; constant columns become zero."""
        return Standardizer(*mean_and_scale(x))

    def __call__(self, x: Tensor, clamp: float = CLAMP) -> Tensor:
        """Standardise the columns."""
        return standardised(x, self.mean, self.scale, clamp)


@dataclass(frozen=True)
class AccuracyEstimator:
    """Ridge regression of the accuracy on output features, their squares and products."""

    inner: Standardizer
    outer: Standardizer
    coef: Tensor

    @staticmethod
    def of(x: Tensor, accuracy: Tensor, weight: Tensor, ridge: float = 3.0) -> AccuracyEstimator:
        """Fit features ``[n, F]`` to accuracies ``[n]`` with weights ``[n]``."""
        inner = Standardizer.of(x)
        products = _products(inner(x))
        outer = Standardizer.of(products)
        columns = _with_one(outer(products, 1e9))
        square = (columns * weight[:, None]).mT @ columns
        square += ridge * torch.eye(len(square), dtype=square.dtype)
        coef = torch.linalg.solve(square, columns.mT @ (weight * accuracy))
        return AccuracyEstimator(inner, outer, coef)

    def __call__(self, x: Tensor) -> Tensor:
        """Estimated accuracy of each network, ``[n]`` between 0 and 1."""
        return (_with_one(self.outer(_products(self.inner(x)), 1e9)) @ self.coef).clamp(0, 1)


@dataclass(frozen=True)
class DamageClassifier:
    """Logistic regression that tells output features of damaged networks from healthy ones."""

    frame: Standardizer
    coef: Tensor

    @staticmethod
    def of(
        healthy: Tensor, damaged: Tensor, ridge: float = 0.1, steps: int = 25
    ) -> DamageClassifier:
        """Fit by Newton's method; both classes have the same total weight."""
        frame = Standardizer.of(torch.cat([healthy, damaged]))
        x = _with_one(frame(torch.cat([healthy, damaged])))
        n, label = len(x), torch.zeros(len(x), dtype=x.dtype)
        label[len(healthy) :] = 1
        weight = torch.where(label > 0, n / 2 / len(damaged), n / 2 / len(healthy))
        decay = torch.full((x.shape[1],), ridge, dtype=x.dtype)
        decay[-1] = 1e-6
        coef = torch.zeros(x.shape[1], dtype=x.dtype)
        for _ in range(steps):
            p = torch.sigmoid(x @ coef)
            gradient = x.mT @ (weight * (p - label)) + decay * coef
            # Where all is certain the curvature vanishes; the clamp keeps the step finite.
            hessian = (x * (weight * (p * (1 - p)).clamp(min=1e-4))[:, None]).mT @ x
            coef = coef - torch.linalg.solve(hessian + torch.diag(decay), gradient)
        return DamageClassifier(frame, coef)

    def __call__(self, x: Tensor) -> Tensor:
        """Logit of each network, ``[n]``; high for damaged ones."""
        return _with_one(self.frame(x)) @ self.coef


@dataclass(frozen=True)
class HealthyDistance:
    """Mahalanobis distance to the healthy networks, the covariance shrunk to its diagonal."""

    frame: Standardizer
    inverse: Tensor

    @staticmethod
    def of(healthy: Tensor, shrinkage: float = 0.1) -> HealthyDistance:
        """Fit to rows ``[n, F]``."""
        frame = Standardizer.of(healthy)
        rows = frame(healthy, 6.0)
        covariance = (1 - shrinkage) * torch.cov(rows.mT)
        covariance += shrinkage * torch.eye(len(covariance), dtype=rows.dtype)
        return HealthyDistance(frame, torch.linalg.inv(covariance))

    def __call__(self, x: Tensor) -> Tensor:
        """Logarithm of the squared distance of each network, ``[n]``."""
        rows = self.frame(x, 12.0)
        return ((rows @ self.inverse) * rows).sum(-1).clamp(min=1e-8).log()


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def _products(x: Tensor) -> Tensor:
    """The columns and every product of two of them."""
    first, second = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([x, x[:, first] * x[:, second]], 1)
