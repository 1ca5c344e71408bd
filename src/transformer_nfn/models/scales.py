"""Numbers of very different sizes, on scales that can be compared."""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 1e-2
"""Below this a number counts by itself, above by its logarithm."""


def signed_log(x: Tensor) -> Tensor:
    """``sign(x) log(1 + |x|/ε)`` in float64: small numbers keep their sizes apart, signs stay."""
    wide = x.double()
    return wide.sign() * (wide.abs() / SMALL).log1p()


def usual(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and one over the standard deviation, of each column of ``[n, F]``.

    What is the same in all rows says nothing elsewhere either: its scale is zero.
    """
    std = x.std(0, correction=0)
    scale = torch.where(std > 1e-6, 1 / std.clamp(min=1e-6), torch.zeros_like(std))
    return x.mean(0), scale
