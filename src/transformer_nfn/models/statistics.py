"""Summary statistics of tensors, and scales on which they can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
COUNT = 2 + len(QUANTILES)
"""Statistics of a tensor: mean, variance and quartiles."""
SMALL = 1e-2
"""`signed_log` is linear below this size and logarithmic above."""
FARTHEST = 8
"""Standard deviations at which features are cut off: no extrapolation beyond the training set."""


def statistics(x: Tensor, ordered: Tensor | None = None) -> Tensor:
    """Mean, variance and the five quartiles of the last axis, ``[…, n]`` to ``[…, 7]``.

    Quantiles lie between neighbours as in ``torch.quantile``, by one sort and fixed places, so
    that ``vmap``, autograd and ``compile`` take them. ``ordered`` is the sorted tensor, if known.

    >>> statistics(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])).tolist()
    [2.0, 2.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    """
    if ordered is None:
        ordered = x.sort(-1).values
    last = x.shape[-1] - 1
    quantiles = []
    for q in QUANTILES:
        low = int(q * last)
        high, share = min(low + 1, last), q * last - low
        quantiles.append(ordered[..., low] * (1 - share) + ordered[..., high] * share)
    # Divided by n, because a tensor of one entry has a variance too.
    moments = [x.mean(-1), x.var(-1, correction=0)]
    return torch.stack([*moments, *quantiles], -1)


def sorted_statistics(x: Tensor) -> Tensor:
    """`statistics` outside autograd; on the CPU NumPy sorts twice as fast."""
    fast = torch.from_numpy(np.sort(x.numpy(), -1)) if x.device.type == "cpu" else None
    return statistics(x, fast)


def signed_log(x: Tensor) -> Tensor:
    """``sign(x) log(1 + |x|/ε)`` in float64.

    >>> signed_log(torch.tensor([-0.01, 0.0, 0.01])).tolist()[1]
    0.0
    """
    wide = x.double()
    return wide.sign() * (wide.abs() / SMALL).log1p()


def standardised(x: Tensor, mean: Tensor, scale: Tensor, limit: float = FARTHEST) -> Tensor:
    """Deviations from the mean, cut off at ``±limit``; infinities become NaN: they overflowed.

    >>> mean, scale = torch.tensor(0.0), torch.tensor(1.0)
    >>> standardised(torch.tensor([-9.0, 1.0, torch.inf]), mean, scale).tolist()
    [-8.0, 1.0, nan]
    """
    x = (x - mean) * scale
    return torch.where(x.isinf(), torch.nan, x.clamp(-limit, limit))


def mean_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation of each column of ``[n, F]``.

    A constant column has scale zero: it carries no information.
    """
    std = x.std(0, correction=0)
    scale = torch.where(std > 1e-6, 1 / std.clamp(min=1e-6), torch.zeros_like(std))
    return x.mean(0), scale


class Ridge(NamedTuple):
    """A linear regression, and the mean of its squared leave-one-out errors."""

    weight: Tensor
    constant: Tensor
    error: float


def fit_ridge(x: Tensor, target: Tensor, penalties: Sequence[float]) -> Ridge:
    """Ridge regression of ``target [n]`` on ``x [n, F]`` with the penalty of least error.

    >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]], dtype=torch.float64)
    >>> fit_ridge(x, 2 * x[:, 0], [1e-9, 1.0]).weight.round(decimals=3)
    tensor([2.], dtype=torch.float64)
    """
    centre, constant = x.mean(0), target.mean()
    left, sizes, right = torch.linalg.svd(x - centre, full_matrices=False)
    along = left.mT @ (target - constant)
    best: Ridge | None = None
    for penalty in penalties:
        kept = sizes.square() / (sizes.square() + penalty)
        leverage = left.square() @ kept + 1 / len(x)
        errors = (target - constant - left @ (kept * along)) / (1 - leverage).clamp(min=1e-6)
        error = float(errors.square().mean())
        if best is None or error < best.error:
            weight = right.mT @ (sizes / (sizes.square() + penalty) * along)
            best = Ridge(weight, constant - centre @ weight, error)
    assert best is not None, "no penalty to choose from"
    return best
