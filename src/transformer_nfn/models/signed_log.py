"""Numbers of very different sizes on one scale."""

from __future__ import annotations

from torch import Tensor

SMALL = 1e-2
"""Below this a number counts by itself, above by its logarithm."""


def signed_log(x: Tensor) -> Tensor:
    """``sign(x) log(1 + |x|/ε)`` in float64: small numbers keep their sizes apart, signs stay."""
    wide = x.double()
    return wide.sign() * (wide.abs() / SMALL).log1p()
