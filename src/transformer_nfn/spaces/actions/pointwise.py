"""Which pointwise functions commute with scales and signs? Tried on a few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.spaces.actions.base import Pointwise

POINTS = (0.0, 1e-3, 0.21, 0.5, 0.8, 1.0, 1.7, 3.0, 7.5, 40.0)
FACTORS = (0.3, 2.0, 11.0)


def is_positively_homogeneous(fn: Pointwise) -> bool:
    """Whether ``fn(s x) = s fn(x)`` for s > 0, as for ReLU."""
    x = _points()
    return all(_close(fn(s * x), s * fn(x)) for s in FACTORS)


def is_odd(fn: Pointwise) -> bool:
    """Whether ``fn(−x) = −fn(x)``, as for tanh."""
    x = _points()
    return _close(fn(-x), -fn(x))


def _points() -> Tensor:
    x = torch.tensor(POINTS)
    return torch.cat([-x, x])


def _close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x.detach(), y.detach(), rtol=1e-4, atol=1e-6)
