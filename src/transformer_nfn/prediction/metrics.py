"""Quality of predictions: Kendall's τ, R², mean absolute error, conformal intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BOOTSTRAP_SAMPLES = 200
LEVEL = 0.9
"""Coverage that prediction intervals aim for."""
PAIR_ROWS = 256
"""Networks whose pairs with all others are in memory together."""
RESPLITS = 1000
EXAMPLES = 2 ** np.arange(18)
"""Numbers of labelled examples that predictions are compared with."""
MEASUREMENTS = 16
"""Times that accuracies are measured, as a simulation."""


def kendall_tau(accuracy: np.ndarray, predicted: np.ndarray) -> float:
    """Kendall's τ-b; 0 where all predictions are equal, or there are fewer than two."""
    from scipy.stats import kendalltau

    value = float(kendalltau(accuracy, predicted).statistic) if len(accuracy) > 1 else 0.0
    return value if math.isfinite(value) else 0.0


def worth_in_examples(accuracy: np.ndarray, taus: Sequence[float]) -> list[int | None]:
    """How many labelled examples rank networks as well as predictions of each τ do.

    Accuracies measured on so many examples are drawn from the true ones, and ranked. 0 for a τ that
    one example reaches; None for one that 131,072 do not.
    """
    source = np.random.default_rng(0)
    found = [
        np.mean([kendall_tau(accuracy, source.binomial(n, accuracy)) for _ in range(MEASUREMENTS)])
        for n in EXAMPLES
    ]
    reached = np.maximum.accumulate(found)
    exponents = np.interp(taus, reached, np.arange(len(EXAMPLES)), left=-np.inf, right=np.nan)
    return [None if np.isnan(e) else round(float(2**e)) for e in exponents]


def r_squared(accuracy: np.ndarray, predicted: np.ndarray) -> float | None:
    """1 − residual over total variance; None where all values are equal."""
    total = float(((accuracy - accuracy.mean()) ** 2).sum())
    return 1 - float(((accuracy - predicted) ** 2).sum()) / total if total > 0 else None


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of scores; None where one is not defined."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def bootstrap_interval(
    accuracy: np.ndarray, predicted: np.ndarray, *, seed: int = 0
) -> tuple[float, float]:
    """90 % bootstrap interval of τ over resampled networks."""
    source, n = np.random.default_rng(seed), len(accuracy)
    counts = [np.bincount(source.integers(0, n, n), minlength=n) for _ in range(BOOTSTRAP_SAMPLES)]
    values = resampled_taus(accuracy, predicted, np.array(counts))
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resampled_taus(accuracy: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`kendall_tau` of samples that hold each network ``counts`` ``[samples, n]`` times."""
    weights = counts.astype(np.float32)  # exact: sums of a sample's counts are at most n
    concordant = np.zeros(len(counts))  # less the discordant, over ordered pairs
    for start in range(0, len(accuracy), PAIR_ROWS):
        rows = slice(start, start + PAIR_ROWS)
        a, b = (np.sign(x[rows, None] - x) for x in (accuracy, predicted))
        concordant += (counts[:, rows] * (weights @ (a * b).astype(np.float32).T)).sum(1)
    differ, also_differ = (_differing_pairs(x, counts) for x in (accuracy, predicted))
    with np.errstate(invalid="ignore"):
        taus = concordant / 2 / np.sqrt(differ / 2) / np.sqrt(also_differ / 2)
    return np.asarray(np.nan_to_num(taus.clip(-1, 1)))


def _differing_pairs(x: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Number of ordered pairs of different values in each sample."""
    order = np.argsort(x)
    _, first = np.unique(x[order], return_index=True)
    equal = np.add.reduceat(counts[:, order], first, axis=1)
    return np.asarray(counts.sum(1) ** 2 - (equal**2).sum(1))


def scores(accuracy: np.ndarray, predicted: np.ndarray) -> dict[str, float | None]:
    """All scores of one seed on one part."""
    low, high = bootstrap_interval(accuracy, predicted)
    return {
        "tau": kendall_tau(accuracy, predicted),
        "tau_low": low,
        "tau_high": high,
        "r2": r_squared(accuracy, predicted),
        "mae": float(np.abs(accuracy - predicted).mean()),
    }


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None for a single value."""
    return None if len(values) < 2 else float(np.std(values, ddof=1) / math.sqrt(len(values)))


CALIBRATION_BINS = 10


def class_scores(truth: np.ndarray, probabilities: np.ndarray) -> dict[str, float | None]:
    """Accuracy, area under the ROC curve and calibration error of predicted classes.

    The area is the mean over the classes, each against all others. The calibration error is the
    mean difference between the probability of the predicted class and how often it is right, in
    ten bins of that probability.

    Args:
        truth: the class of each network, ``[n]``.
        probabilities: of each class, ``[classes, n]``.
    """
    predicted, confidence = probabilities.argmax(0), probabilities.max(0)
    right = predicted == truth
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    gaps = [abs(float((right[bins == b] - confidence[bins == b]).sum())) for b in np.unique(bins)]
    areas = [area_under_roc(truth == c, each) for c, each in enumerate(probabilities)]
    known = [area for area in areas if area is not None]
    return {
        "accuracy": float(right.mean()),
        "auroc": float(np.mean(known)) if known else None,
        "calibration_error": sum(gaps) / len(truth),
    }


def area_under_roc(positive: np.ndarray, score: np.ndarray) -> float | None:
    """Probability that a positive has a higher score than a negative; None if one is missing."""
    from scipy.stats import rankdata

    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    ranks = float(rankdata(score)[positive].sum())
    return (ranks - count * (count + 1) / 2) / (count * others)


def conformal_radius(residuals: np.ndarray, level: float = LEVEL, *, widest: float = 1.0) -> float:
    """Half the width of a split-conformal interval from held-out residuals.

    A new network from the same source lies within the k-th smallest of n absolute residuals with
    probability ``k / (n+1)``. The radius is interpolated at rank ``level · (n+1)``, so the coverage
    is ``level`` where residuals are evenly spread between two ranks, and higher by less than
    ``1 / (n+1)`` where they thin out. With too few residuals (n < 9 at 90 %) it is ``widest``.
    """
    quantile = rank_quantile(np.abs(residuals), level)
    return widest if math.isinf(quantile) else quantile


def rank_quantile(sizes: np.ndarray, level: float) -> float:
    """Value that a new sample stays below with probability ``level``; infinite for too few."""
    ordered = np.sort(sizes)
    rank = level * (len(ordered) + 1)
    below = math.floor(rank + 1e-9)
    share = max(0.0, rank - below)
    if below < 1 or below + (share > 1e-9) > len(ordered):
        return math.inf
    low, high = ordered[below - 1], ordered[min(below, len(ordered) - 1)]
    return float(low + share * (high - low))


def highest_quantile(sizes: np.ndarray, level: float) -> float:
    """`rank_quantile`, or the largest value where there are too few."""
    return rank_quantile(sizes, min(level, len(sizes) / (len(sizes) + 1)))


def coverage(
    validation: np.ndarray, test: np.ndarray, *, seed: int = 0, widest: float = 1.0
) -> float:
    """Estimate the coverage of conformal intervals by repeated resplitting.

    Each time a random half of the validation and test residuals calibrates, and the test residuals
    of the other half are counted. Validation networks chose the epoch, so they only calibrate.
    """
    source = np.random.default_rng(seed)
    sizes = np.abs(np.concatenate([validation, test]))
    shares = []
    for _ in range(RESPLITS):
        order = source.permutation(len(sizes))
        halves = order[: len(order) // 2], order[len(order) // 2 :]
        for calibration, rest in (halves, halves[::-1]):
            counted = rest[rest >= len(validation)]
            if len(counted):
                radius = conformal_radius(sizes[calibration], widest=widest)
                shares.append(float((sizes[counted] <= radius).mean()))
    return float(np.mean(shares))
