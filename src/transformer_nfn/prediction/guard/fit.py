"""Fit of a guard: models from training networks, limits and intervals from validation networks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.data import DamagedNetworks, Dataset, Parts
from transformer_nfn.prediction.guard.estimators import (
    KNOTS,
    AccuracyEstimator,
    Curve,
    DamageClassifier,
    HealthyDistance,
    smoothed_by_others,
)
from transformer_nfn.prediction.guard.guard import NO_THRESHOLD, Guard, widening
from transformer_nfn.prediction.guard.responses import agreed_inputs, responses
from transformer_nfn.prediction.metrics import LEVEL, conformal_radius, highest_quantile
from transformer_nfn.prediction.probe_search import STEPS
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import NetworkSizes

DROP = 0.1
"""Loss of accuracy from which a network counts as damaged; good ones are so far above chance."""
FOLDS = 5
MIN_NETWORKS = 20
"""Networks without which nothing is concluded."""
FALSE_ALARMS = (0.01, 0.005, 0.03)
"""Share of healthy networks that each score may exceed its limit on: damage, distance, gap."""
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
class Features:
    """Output and tensor features of networks, and their accuracy; ``[n, …]`` each."""

    outputs: Tensor
    couplings: Tensor
    accuracy: Tensor

    @staticmethod
    def of(data: Dataset, sizes: NetworkSizes, inputs: Tensor) -> Features:
        """Compute the features of networks on the CPU."""
        data = data.to("cpu")
        outputs = responses(data, sizes, inputs)
        return Features(outputs, coupling_features(data.network), data.accuracy.double())

    def take(self, index: Tensor) -> Features:
        """Select networks."""
        return Features(self.outputs[index], self.couplings[index], self.accuracy[index])

    def __len__(self) -> int:
        return len(self.accuracy)


@dataclass(frozen=True)
class DamagedFeatures:
    """Features, kind of damage and prediction of damaged networks, ``[n, …]`` each."""

    features: Features
    kinds: np.ndarray
    predicted: Tensor

    def take(self, index: Tensor) -> DamagedFeatures:
        """Select networks by booleans."""
        features = self.features.take(index)
        return DamagedFeatures(features, self.kinds[index.numpy()], self.predicted[index])

    def is_kind(self, kind: str) -> Tensor:
        """Which have this kind of damage, ``[n]``."""
        return torch.from_numpy(self.kinds == kind)


@dataclass(frozen=True)
class Estimators:
    """The three models of a guard."""

    estimator: AccuracyEstimator
    damage: DamageClassifier
    distance: HealthyDistance

    def scores(self, features: Features) -> Tensor:
        """The two scores that need no predictor, ``[n, 2]``."""
        return torch.stack([self.damage(features.outputs), self.distance(features.couplings)], -1)


@dataclass(frozen=True)
class TrainingFeatures:
    """Features of the training networks of a guard.

    Attributes:
        healthy: of undamaged networks.
        damaged: of their damaged copies.
        drop: loss of accuracy of these.
        chance: the accuracy of guessing.
        folds: of the healthy networks and of their copies, see `folds_of_runs`.
    """

    healthy: Features
    damaged: Features
    drop: Tensor
    chance: float
    folds: tuple[Tensor, Tensor]

    @cached_property
    def estimators(self) -> Estimators:
        """Models fitted to all networks."""
        healthy, damaged = self.healthy, self.damaged
        good, worse = healthy.accuracy > self.chance + DROP, self.drop > DROP
        estimator = AccuracyEstimator.of(
            torch.cat([healthy.outputs, damaged.outputs]),
            torch.cat([healthy.accuracy, damaged.accuracy]),
            balanced_weights(len(healthy), len(damaged)),
        )
        classifier = DamageClassifier.of(healthy.outputs[good], damaged.outputs[worse])
        return Estimators(estimator, classifier, HealthyDistance.of(healthy.couplings[good]))

    def take_damaged(self, rows: Tensor) -> TrainingFeatures:
        """Keep only some of the damaged networks, by booleans."""
        healthy_fold, fold = self.folds
        return replace(
            self, damaged=self.damaged.take(rows), drop=self.drop[rows],
            folds=(healthy_fold, fold[rows]),
        )  # fmt: skip

    def cross_validated_scores(self) -> Tensor:
        """Scores ``[n, 2]`` of the healthy networks by models fitted to the other folds."""
        fold, damaged_fold = self.folds
        scores = torch.zeros(len(self.healthy), 2, dtype=torch.float64)
        for i in range(FOLDS):
            rest = self.take_damaged(damaged_fold != i)
            estimators = replace(rest, healthy=self.healthy.take(fold != i)).estimators
            scores[fold == i] = estimators.scores(self.healthy.take(fold == i))
        return scores


def folds_of_runs(healthy: Dataset, damaged: Dataset) -> tuple[Tensor, Tensor]:
    """Fold of each healthy and each damaged training network; copies share that of the original."""
    fold = {run: i % FOLDS for i, run in enumerate(dict.fromkeys(healthy.runs))}
    return (
        torch.tensor([fold[run] for run in healthy.runs]),
        torch.tensor([fold.get(run, -1) for run in damaged.runs]),
    )


def balanced_weights(healthy: int, damaged: int) -> Tensor:
    """Weights with which both groups have the same total."""
    both = [torch.ones(healthy), torch.full((damaged,), healthy / max(damaged, 1))]
    return torch.cat(both).double()


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
    steps: int = STEPS,
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
    inputs = agreed_inputs(parts.train, sizes, steps=steps)
    train, val, damaged_train, damaged_val = (
        Features.of(data, sizes, inputs)
        for data in (parts.train, parts.val, damaged.train, damaged.val)
    )
    folds = folds_of_runs(parts.train, damaged.train)
    on_train, on_val = (values.double() for values in predicted_damaged)
    return fit_features(
        inputs,
        TrainingFeatures(train, damaged_train, damaged.train_drop, chance, folds),
        DamagedFeatures(damaged_train, damaged.train_kinds, on_train),
        Calibration(
            val, predicted.double(), DamagedFeatures(damaged_val, damaged.val_kinds, on_val)
        ),
    )


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
    estimate = estimators.estimator(val.outputs)
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
    raw = torch.cat([estimators.scores(val), _gap_by_others(predicted, gap)[:, None]], 1)
    train_raw = training.cross_validated_scores()[training.healthy.accuracy > floor]
    guard = _with_limits(
        replace(guard, error=error), raw, corrected > floor, predicted > floor, train_raw
    )
    upper, lower = _healthy_factors(guard, val, raw, predicted)
    return replace(guard, upper=_scalar(SLACK * upper)), lower


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
    guard: Guard, raw: Tensor, alive: Tensor, may_gap: Tensor, train_raw: Tensor
) -> Guard:
    """Set the limits of the scores, which few healthy networks exceed.

    Args:
        guard: without limits.
        raw: scores of validation networks, ``[n, SCORES]``.
        alive: which of them may be warned of by any score.
        may_gap: which of them may be warned of by their gap.
        train_raw: first two scores of training networks that may be warned of, ``[m, 2]``.
    """
    gaps = raw[may_gap, 2] if int(may_gap.sum()) >= MIN_NETWORKS else raw[:, 2]
    each = [*torch.cat([raw[alive, :2], train_raw]).unbind(-1), gaps]
    centre = torch.stack([x.quantile(0.5) for x in each])
    limits = torch.stack([_rank_value(x, 1 - a) for x, a in zip(each, FALSE_ALARMS, strict=True)])
    width = (limits - centre).clamp(min=1e-6)
    # Validation is small, and the predictor saw it: gaps of new networks are larger.
    width[2] *= 1 + 1 / math.sqrt(len(gaps))
    return replace(guard, centre=centre, width=width)


def _rank_value(values: Tensor, level: float) -> Tensor:
    """Value that a new one exceeds with probability ``1 - level`` at most, or the maximum."""
    rank = math.ceil(level * (len(values) + 1))
    return values.sort().values[min(rank, len(values)) - 1]


def _healthy_factors(
    guard: Guard, healthy: Features, raw: Tensor, predicted: Tensor
) -> tuple[float, float]:
    """How far healthy networks without a warning lie beyond prediction and estimate, and below.

    In units of the expected errors of the predictor and of the estimator.
    """
    estimate, scores = guard.estimator(healthy.outputs), guard.scaled(raw)
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
