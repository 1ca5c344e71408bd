"""How good are predictions? Kendall's τ with its uncertainty, R², mean absolute error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BOOTSTRAP = 200


def kendall_tau(accuracy: np.ndarray, predicted: np.ndarray) -> float:
    """Kendall's τ-b; 0 where all predictions are equal, as an order that says nothing."""
    from scipy.stats import kendalltau

    value = float(kendalltau(accuracy, predicted).statistic)
    return value if math.isfinite(value) else 0.0


def r_squared(accuracy: np.ndarray, predicted: np.ndarray) -> float:
    """1 − residual over total variance."""
    total = float(((accuracy - accuracy.mean()) ** 2).sum())
    return 1 - float(((accuracy - predicted) ** 2).sum()) / total if total > 0 else float("nan")


def bootstrap_interval(
    accuracy: np.ndarray, predicted: np.ndarray, *, level: float = 0.9, seed: int = 0
) -> tuple[float, float]:
    """An interval for τ from resampled networks."""
    source = np.random.default_rng(seed)
    values = []
    for _ in range(BOOTSTRAP):
        pick = source.integers(0, len(accuracy), len(accuracy))
        values.append(kendall_tau(accuracy[pick], predicted[pick]))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def scores(accuracy: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """All of them, for one seed on one part."""
    low, high = bootstrap_interval(accuracy, predicted)
    return {
        "tau": kendall_tau(accuracy, predicted),
        "tau_low": low,
        "tau_high": high,
        "r2": r_squared(accuracy, predicted),
        "mae": float(np.abs(accuracy - predicted).mean()),
    }


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for one value, which says nothing about its spread."""
    if len(values) < 2:
        return float("nan")
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
