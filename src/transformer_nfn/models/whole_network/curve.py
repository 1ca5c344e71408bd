"""Calibration of logits by a rising piecewise linear curve."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TYPICAL_ERROR = 0.02
"""Error beyond which the loss grows linearly."""
PRIOR = 0.1
"""Weight of the prior on a straight line and on the identity: few networks do not move it far."""
PIECES, PER_PIECE = 7, 16
"""Most pieces of a curve, and networks that each needs."""
STEEPEST = 50.0
"""Largest slope, and the inverse of the smallest."""


def fit_curve(logits: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """Fit a rising curve that takes logits ``[n]`` to those of the accuracies ``[n]``.

    A ranking loss stretches the output scale, here more than there; this calibrates it and keeps
    the order of predictions. Least squares are robust, but plain where accuracies are all 0 or 1
    (whether networks belong to a class): a robust loss would take the rarer answer for an error.

    Returns:
        Knots and values of a piecewise linear curve, ``[2, knots]``; see `piecewise_linear`.
    """
    from scipy.optimize import least_squares
    from scipy.special import expit

    pieces = min(PIECES, max(1, len(logits) // PER_PIECE))
    low, high = np.quantile(logits, (0.02, 0.98)) if len(logits) else (-1.0, 1.0)
    knots = np.linspace(low, max(high, low + 1e-3), pieces + 1)
    inputs = torch.from_numpy(np.append(logits, 0.0))

    def curve(parameters: np.ndarray) -> np.ndarray:
        steps = np.exp(parameters[1:]) * np.diff(knots)
        return np.stack([knots, parameters[0] + np.concatenate([[0.0], np.cumsum(steps)])])

    def errors(parameters: np.ndarray) -> np.ndarray:
        *bent, at_zero = piecewise_linear(inputs, torch.from_numpy(curve(parameters))).numpy()
        slopes = parameters[1:]
        prior = np.array([at_zero, slopes.mean(), *np.diff(slopes)])
        return np.concatenate([expit(bent) - accuracy, PRIOR * prior])

    start = np.array([low, *np.zeros(pieces)])
    if not len(logits):
        return curve(start)
    bounds = np.array([np.inf, *np.full(pieces, np.log(STEEPEST))])
    loss = "linear" if np.isin(accuracy, (0, 1)).all() else "soft_l1"
    fit = least_squares(errors, start, bounds=(-bounds, bounds), loss=loss, f_scale=TYPICAL_ERROR)
    return curve(fit.x)


def piecewise_linear(x: Tensor, curve: Tensor) -> Tensor:
    """The curve through points ``[2, n]``, straight between them and beyond.

    >>> curve = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]])
    >>> piecewise_linear(torch.tensor([-1.0, 0.5, 1.5, 3.0]), curve).tolist()
    [-1.0, 0.5, 2.0, 5.0]
    """
    knots, values = curve.contiguous()
    after = torch.searchsorted(knots, x.contiguous()).clamp(1, len(knots) - 1)
    slopes = values.diff() / knots.diff()
    out: Tensor = values[after - 1] + slopes[after - 1] * (x - knots[after - 1])
    return out
