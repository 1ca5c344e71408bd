"""Fit of a guard: models from training networks, limits and intervals from validation networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.models.predictor import Predictor
from transformer_nfn.prediction.data import DamagedNetworks, Parts
from transformer_nfn.prediction.guard.estimators import KNOTS, Curve, smoothed_by_others
from transformer_nfn.prediction.guard.features import (
    DROP,
    MIN_NETWORKS,
    DamagedFeatures,
    Features,
    LeftOut,
    Recipes,
    TrainingFeatures,
    balanced_weights,
    hardest,
)
from transformer_nfn.prediction.guard.guard import NO_THRESHOLD, Guard, widening
from transformer_nfn.prediction.guard.responses import agreed_inputs
from transformer_nfn.prediction.metrics import LEVEL, conformal_radius, highest_quantile, scores
from transformer_nfn.prediction.predictors import mean_prediction
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import NetworkSizes

FALSE_ALARMS = 0.05
"""Share of the healthy networks of a left-out recipe that a score may exceed its limit on."""
HEALTHY_LEVEL = 0.99
"""Coverage of intervals on healthy networks without a warning."""
SLACK = 1.25
"""Margin of upper ends: validation is small, and the predictor saw it."""
MIN_ERROR = 0.01
"""Of an expected error."""
LOWER_SLACK = 1.5
"""Margin of lower ends: unseen kinds of damage cannot be calibrated on."""
UNSEEN_LEVEL = 0.975
"""Share of undetected damaged networks of an unseen kind that lie above the lower end."""
MIN_LOWER, MAX_LOWER = 2.0, 2.5
"""Range of the lower end in errors of the estimator: few damaged networks stay undetected."""
CHANCE_MARGIN = DROP / 2
"""Estimate above chance up to which outputs count as random."""


@dataclass(frozen=True)
class Calibration:
    """Validation networks: healthy ones with their predictions, and damaged ones."""

    healthy: Features
    predicted: Tensor
    damaged: DamagedFeatures


def fit_guard(
    parts: Parts,
    damaged: DamagedNetworks,
    sizes: NetworkSizes,
    predicted: Tensor,
    predicted_damaged: tuple[Tensor, Tensor],
    *,
    steps: int,
) -> Guard:
    """Fit a guard to training networks, healthy and damaged, and calibrate on validation networks.

    Args:
        parts: healthy networks; probe inputs are searched on their device.
        damaged: their damaged copies.
        sizes: of all of them.
        predicted: the predictor's values for ``parts.val``.
        predicted_damaged: its values for ``damaged.train`` and ``damaged.val``.
        steps: of the search for inputs.
    """
    chance = 1 / sizes.classes
    _check_enough("trained networks above chance", parts.train.accuracy > chance + DROP)
    _check_enough("harmed networks", damaged.train_drop > DROP)
    inputs = agreed_inputs(parts.train, sizes, steps)
    train, val, damaged_train, damaged_val = (
        Features.of(data, sizes, inputs)
        for data in (parts.train, parts.val, damaged.train, damaged.val)
    )
    recipes = Recipes.of(parts, damaged.train)
    on_train, on_val = (values.double() for values in predicted_damaged)
    return fit_features(
        inputs,
        TrainingFeatures(train, damaged_train, damaged.train_drop, chance, recipes),
        DamagedFeatures(damaged_train, damaged.train_kinds, on_train),
        Calibration(
            val, predicted.double(), DamagedFeatures(damaged_val, damaged.val_kinds, on_val)
        ),
    )


def fit_guard_beside(
    predictors: Sequence[Predictor],
    parts: Parts,
    damaged: DamagedNetworks,
    sizes: NetworkSizes,
    steps: int,
) -> tuple[Guard, dict[str, Any]]:
    """Fit a guard for predictors; also returns its figures on the healthy test networks."""
    val, test = parts.val.to("cpu"), parts.test.to("cpu")
    on_val, on_test, on_damaged_train, on_damaged_val = (
        mean_prediction(predictors, data) for data in (val, test, damaged.train, damaged.val)
    )
    on_damaged = (on_damaged_train, on_damaged_val)
    guard = fit_guard(parts, damaged, sizes, on_val, on_damaged, steps=steps)
    assessed = guard.assess(test, sizes, on_test)
    tested = scores(test.truth, assessed.accuracy.numpy())
    figures = {
        **{key: tested[key] for key in ("tau", "r2", "mae")},
        "coverage": float(assessed.contains(torch.from_numpy(test.truth)).double().mean()),
        "warned": float((assessed.outlier_score > 1).double().mean()),
        "damaged": damaged.counts,
    }
    return guard, {"guarded": figures}


def fit_features(
    inputs: Tensor,
    training: TrainingFeatures,
    training_damaged: DamagedFeatures,
    calibration: Calibration,
) -> Guard:
    """Fit a guard to features.

    Args:
        inputs: the probe inputs of the output features.
        training: of the training networks.
        training_damaged: the damaged ones among these.
        calibration: of the validation networks.
    """
    guard, healthy_lower = _fit_except_lower(inputs, training, calibration)
    shortfall = _unseen_shortfall(inputs, training, training_damaged, calibration)
    lower = LOWER_SLACK * lower_factor(shortfall, healthy_lower)
    high = near_chance(guard, training.chance, training_damaged, calibration.damaged)
    guard = replace(guard, lower=_scalar(lower), near_chance=_scalar(high))
    return _with_outlier_intervals(guard, calibration.damaged)


def _unseen_shortfall(
    inputs: Tensor,
    training: TrainingFeatures,
    training_damaged: DamagedFeatures,
    calibration: Calibration,
) -> Tensor | None:
    """`_undetected_shortfall` of each kind of damage by a guard fitted to all other kinds."""
    shortfalls = []
    for kind in dict.fromkeys(training_damaged.kinds.tolist()):
        this, this_val = training_damaged.is_kind(kind), calibration.damaged.is_kind(kind)
        others = training.take_damaged(~this)
        if int((others.drop > DROP).sum()) < MIN_NETWORKS:
            return None
        rest = replace(calibration, damaged=calibration.damaged.take(~this_val))
        guard, _ = _fit_except_lower(inputs, others, rest)
        for damaged in (training_damaged.take(this), calibration.damaged.take(this_val)):
            shortfalls.append(_undetected_shortfall(guard, damaged))
    return torch.cat(shortfalls)


def _undetected_shortfall(guard: Guard, damaged: DamagedFeatures) -> Tensor:
    """How far networks without a warning lie below prediction and estimate, in expected errors."""
    features, predicted = damaged.features, damaged.predicted
    estimate = guard.estimator(features.outputs)
    raw = guard.raw_scores(features.outputs, features.couplings, predicted, estimate)
    scores = guard.scaled(raw)
    corrected = guard.corrected(predicted, estimate)
    shortfall = torch.minimum(corrected, estimate) - features.accuracy
    quiet = guard.outlier_score(scores, predicted, corrected) <= 1
    undetected = quiet & (corrected > guard.floor)
    return (shortfall / guard.expected_estimate_error(estimate, scores.amax(-1)))[undetected]


def _fit_except_lower(
    inputs: Tensor, training: TrainingFeatures, calibration: Calibration
) -> tuple[Guard, float]:
    """Fit all but the lower ends; also returns how low those of healthy networks must be."""
    val, predicted, damaged = (
        calibration.healthy, calibration.predicted, calibration.damaged.features,
    )  # fmt: skip
    estimators = training.estimators
    radius = conformal_radius((predicted - val.accuracy).numpy())
    # Damage lowers accuracy to chance at most: where the interval holds that anyway, nobody errs.
    floor = training.chance + 0.75 * min(radius, DROP)
    left = training.left_out(val, floor)
    growth = _error_growth(left, estimators.estimator(val.outputs), val.accuracy)
    # The predictor saw all recipes: without them its errors would grow as the estimator's do.
    predicted = (val.accuracy + growth * (predicted - val.accuracy)).clamp(0, 1)
    val, predicted, estimate = val.take(left.rows), predicted[left.rows], left.estimate
    gap = predicted - estimate
    estimates = torch.cat([estimate, estimators.estimator(damaged.outputs)])
    accuracies = torch.cat([val.accuracy, damaged.accuracy])
    gap_mean, gap_square = Curve.of(predicted, gap), Curve.of(predicted, gap.square())
    later = _scalar(0.0)  # replaced below, or by the caller
    guard = Guard(
        inputs=inputs.double(),
        estimator=estimators.estimator,
        damage=estimators.damage,
        distance=estimators.distance,
        gap_mean=gap_mean,
        gap_std=Curve(_deviation(gap_mean.values, gap_square.values)),
        error=Curve(torch.zeros(KNOTS, dtype=torch.float64)),
        estimate_error=Curve.rms(
            estimates,
            estimates - accuracies,
            balanced_weights(len(val), len(damaged)),
            minimum=MIN_ERROR,
        ),
        centre=later,
        width=later,
        floor=_scalar(floor),
        radius=_scalar(radius),
        upper=later,
        lower=later,
        near_chance=later,
        outlier=later,
        chance_threshold=_scalar(chance_threshold(training.chance, estimates, accuracies)),
    )
    corrected = guard.corrected(predicted, estimate)
    error = Curve.rms(corrected, corrected - val.accuracy, minimum=MIN_ERROR)
    raw = torch.cat([left.scores, _gap_by_others(predicted, gap)[:, None]], 1)
    guard = _with_limits(
        replace(guard, error=error), left, raw, corrected > floor, predicted > floor
    )
    upper, lower = _healthy_factors(guard, val, estimate, raw, predicted)
    return replace(guard, upper=_scalar(SLACK * upper)), lower


def _error_growth(left: LeftOut, usual: Tensor, accuracy: Tensor) -> float:
    """How many times larger errors of the estimator are where it saw no network of the recipe."""
    errors = (left.estimate - accuracy[left.rows]).abs()
    shifted = hardest(errors, left.recipes, LEVEL)
    return max(1.0, shifted / highest_quantile((usual - accuracy).abs().numpy(), LEVEL))


def _check_enough(what: str, present: Tensor) -> None:
    count = int(present.sum())
    if count < MIN_NETWORKS:
        raise RunError(f"not enough {what}: {count}, {MIN_NETWORKS} are needed")


def _gap_by_others(predicted: Tensor, gap: Tensor) -> Tensor:
    """Standardised gap of each validation network, relative to the others."""
    mean, square = (smoothed_by_others(predicted, y) for y in (gap, gap.square()))
    return (gap - mean) / _deviation(mean, square)


def _deviation(mean: Tensor, square: Tensor) -> Tensor:
    """Standard deviation from a mean and a mean square."""
    return (square - mean.square()).clamp(min=MIN_ERROR**2).sqrt()


def _with_limits(
    guard: Guard, left: LeftOut, raw: Tensor, alive: Tensor, may_gap: Tensor
) -> Guard:
    """Set the limits of the scores, which few healthy networks of any left-out recipe exceed.

    Args:
        guard: without limits.
        left: the left-out networks.
        raw: scores of the validation networks among these, ``[m, SCORES]``.
        alive: which of them may be warned of by any score.
        may_gap: which of them may be warned of by their gap.
    """
    scores = torch.cat([raw[alive, :2], left.train_scores])
    recipes = torch.cat([left.recipes[alive], left.train_recipes])
    if int(may_gap.sum()) < MIN_NETWORKS:
        may_gap = torch.ones_like(may_gap)
    each = [(score, recipes) for score in scores.unbind(-1)]
    each.append((raw[may_gap, 2], left.recipes[may_gap]))
    centre = torch.stack([score.quantile(0.5) for score, _ in each])
    limits = torch.tensor([hardest(*one, 1 - FALSE_ALARMS) for one in each], dtype=torch.float64)
    return replace(guard, centre=centre, width=(limits - centre).clamp(min=1e-6))


def _healthy_factors(
    guard: Guard, healthy: Features, estimate: Tensor, raw: Tensor, predicted: Tensor
) -> tuple[float, float]:
    """How far healthy networks without a warning lie beyond prediction and estimate, and below.

    In units of the expected errors of the predictor and of the estimator.
    """
    scores = guard.scaled(raw)
    corrected, first = guard.corrected(predicted, estimate), scores.amax(-1)
    below = torch.minimum(corrected, estimate) - healthy.accuracy
    beyond = torch.maximum(below, healthy.accuracy - torch.maximum(corrected, estimate))
    error = smoothed_by_others(corrected, (corrected - healthy.accuracy).square())
    expected = error.sqrt().clamp(min=MIN_ERROR) * widening(first)
    quiet = guard.outlier_score(scores, predicted, corrected) <= 1
    ratios = (beyond / expected, below / guard.expected_estimate_error(estimate, first))
    upper, lower = (
        highest_quantile(x[quiet].clamp(min=0).numpy(), HEALTHY_LEVEL) for x in ratios
    )
    return upper, lower


def _with_outlier_intervals(guard: Guard, damaged: DamagedFeatures) -> Guard:
    """Set the intervals of networks whose value is the estimate."""
    features = damaged.features
    estimate = guard.estimator(features.outputs)
    assessed = guard.assess_features(features.outputs, features.couplings, damaged.predicted)
    warned = assessed.outlier_score > 1
    counted = warned if int(warned.sum()) >= MIN_NETWORKS else torch.ones_like(warned)
    ratio = ((estimate - features.accuracy).abs() / guard.estimate_error(estimate))[counted]
    return replace(guard, outlier=_scalar(highest_quantile(ratio.numpy(), LEVEL)))


def lower_factor(shortfall: Tensor | None, healthy: float) -> float:
    """`Guard.lower` before its margin.

    Args:
        shortfall: from `_unseen_shortfall`; None if unknown, then the factor is the largest.
        healthy: what healthy networks need.
    """
    if shortfall is None:
        return max(MAX_LOWER, healthy)
    needed = 0.0
    if len(shortfall):
        needed = highest_quantile(shortfall.clamp(min=0).numpy(), UNSEEN_LEVEL)
    return max(min(max(needed, MIN_LOWER), MAX_LOWER), healthy)


def near_chance(guard: Guard, chance: float, *damaged: DamagedFeatures) -> float:
    """`Guard.near_chance`: the best damaged network predicted at the floor, with a margin."""
    at_floor = torch.cat([each.features.accuracy[_is_at_floor(guard, each)] for each in damaged])
    best = float(at_floor.max()) if len(at_floor) else chance
    return chance + LOWER_SLACK * max(best - chance, 0.0)


def _is_at_floor(guard: Guard, damaged: DamagedFeatures) -> Tensor:
    estimate = guard.estimator(damaged.features.outputs)
    return guard.corrected(damaged.predicted, estimate) <= guard.floor


def chance_threshold(chance: float, estimate: Tensor, accuracy: Tensor) -> float:
    """`Guard.chance_threshold`.

    `NO_THRESHOLD` where too few networks have such estimates, or where more than a few of them are
    much better than estimated.

    Args:
        chance: the accuracy of guessing.
        estimate: for networks that the estimator was not fitted to, healthy and damaged.
        accuracy: of these.
    """
    at_chance = estimate <= chance + CHANCE_MARGIN
    better = (accuracy - estimate)[at_chance] > DROP
    if len(better) < MIN_NETWORKS or float(better.double().mean()) > 1 - UNSEEN_LEVEL:
        return NO_THRESHOLD
    return chance + CHANCE_MARGIN


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
