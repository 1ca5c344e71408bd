"""How far off may a prediction be? Conformal intervals, and how often they hold."""

from __future__ import annotations

import math

import numpy as np

LEVEL = 0.9
RESPLITS = 1000


def radius(residuals: np.ndarray, level: float = LEVEL) -> float:
    """Half the width of a split-conformal interval from residuals on networks not trained on.

    A new network from the same source lies within the k-th smallest of n absolute residuals
    with probability ``k / (n+1)``. The rank that gives ``level`` exactly is ``level · (n+1)``;
    between two whole ranks the radius is interpolated. The probability, over the residuals and
    the new network, is then ``level`` where residuals are spread evenly between the two ranks,
    and above it by less than ``1 / (n+1)`` where they thin out, as errors do in the tail. With
    too few residuals to reach that rank (n < 9 at 90 %) nothing is excluded.
    """
    found = rank_quantile(np.abs(residuals), level)
    return 1.0 if math.isinf(found) else found


def rank_quantile(sizes: np.ndarray, level: float) -> float:
    """The size that a new one stays below with probability ``level``; infinite for too few."""
    ordered = np.sort(sizes)
    rank = level * (len(ordered) + 1)
    below = math.floor(rank + 1e-9)
    share = max(0.0, rank - below)
    if below < 1 or below + (share > 1e-9) > len(ordered):
        return math.inf
    low, high = ordered[below - 1], ordered[min(below, len(ordered) - 1)]
    return float(low + share * (high - low))


def coverage(
    validation: np.ndarray, test: np.ndarray, level: float = LEVEL, seed: int = 0
) -> float:
    """How often such intervals hold for test networks that did not calibrate them.

    Calibrated on a random half of all networks not trained on, counted on the test networks of
    the other half; the mean over many halves, each used both ways. One calibration on a few
    dozen networks says little, and validation networks, which chose the epoch, are only
    calibrated on: if their errors are smaller for it, this falls below ``level``.

    Args:
        validation: residuals of the validation part.
        test: residuals of the test part.
        level: of the intervals.
        seed: chooses the halves.
    """
    source = np.random.default_rng(seed)
    sizes = np.abs(np.concatenate([validation, test]))
    held = []
    for _ in range(RESPLITS):
        order = source.permutation(len(sizes))
        halves = order[: len(order) // 2], order[len(order) // 2 :]
        for known, new in (halves, halves[::-1]):
            counted = new[new >= len(validation)]
            if len(counted):
                held.append(float((sizes[counted] <= radius(sizes[known], level)).mean()))
    return float(np.mean(held))
