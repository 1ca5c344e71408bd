"""On which scale does a predictor speak? A price on order alone stretches what it says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares
from scipy.special import expit

TYPICAL = 0.02
"""An error of an accuracy beyond which it counts less than by its square."""
HOLD = 0.1
"""What leaving the scale as it is is worth, as an error: few networks do not move it far."""
LEAST, MOST = 0.02, 50.0
"""Between these a scale is stretched; never turned around, so order stays."""


class Scale(NamedTuple):
    """Logits become ``stretch`` times what they were, and ``shift`` more."""

    stretch: float
    shift: float


def fit_scale(logits: np.ndarray, accuracy: np.ndarray) -> Scale:
    """The scale on which predictions come closest to the truth, by robust least squares.

    Args:
        logits: what a predictor says before its Sigmoid, ``[n]``.
        accuracy: the truth, ``[n]``, between 0 and 1.
    """
    if not len(logits):
        return Scale(1.0, 0.0)

    def errors(scale: np.ndarray) -> np.ndarray:
        off = expit(scale[0] * logits + scale[1]) - accuracy
        held = HOLD * (scale - np.array([1.0, 0.0]))
        return np.asarray(np.concatenate([off, held]))

    bounds = ([LEAST, -np.inf], [MOST, np.inf])
    found = least_squares(errors, [1.0, 0.0], bounds=bounds, loss="soft_l1", f_scale=TYPICAL)
    return Scale(float(found.x[0]), float(found.x[1]))
