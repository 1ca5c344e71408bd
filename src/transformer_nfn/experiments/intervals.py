"""How far off may a prediction be? Conformal intervals, and how often they hold."""

from __future__ import annotations

import math

import numpy as np

LEVEL = 0.9
RESPLITS = 200


def radius(residuals: np.ndarray, level: float = LEVEL) -> float:
    """Half the width of a split-conformal interval from residuals on networks not trained on.

    The ``⌈(n+1)·level⌉``-th smallest absolute residual; a new network from the same source lies
    within it with probability at least ``level``.
    """
    ordered = np.sort(np.abs(residuals))
    rank = math.ceil((len(ordered) + 1) * level)
    return float(ordered[rank - 1]) if rank <= len(ordered) else 1.0


def coverage(residuals: np.ndarray, level: float = LEVEL, seed: int = 0) -> float:
    """How often such intervals hold: calibrated on a random half, measured on the other half.

    The mean over many random halves, because one small test part says little.
    """
    source = np.random.default_rng(seed)
    held = []
    for _ in range(RESPLITS):
        order = source.permutation(len(residuals))
        half = len(order) // 2
        reach = radius(residuals[order[:half]], level)
        held.append(float((np.abs(residuals[order[half:]]) <= reach).mean()))
    return float(np.mean(held))
