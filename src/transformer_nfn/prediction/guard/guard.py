"""The guard of a run: detects networks on which a predictor of weights is unreliable.

A predictor that reads weights may take a damaged network for a good one. The guard runs the network
on probe inputs (`responses`) and measures how well its tensors match each other
(`coupling_features`). It is fitted to healthy and damaged networks (`fit`).

Three outlier scores, each 1 at its limit: outputs like those of a damaged network; tensors that
match each other unlike those of healthy networks; and a prediction above the accuracy estimated
from the outputs, relative to the typical gap. Any score above 1 is a warning.

The predictor's value is kept except in two cases. A network whose outputs look random is assigned
chance accuracy. Where two scores exceed their limits, the value moves towards the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.io.tensor_files import write_tensors
from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.data import Dataset
from transformer_nfn.prediction.guard.estimators import (
    KNOTS,
    AccuracyEstimator,
    Curve,
    DamageClassifier,
    HealthyDistance,
    flatten,
    unflatten,
)
from transformer_nfn.prediction.guard.responses import COUNT, input_shape, responses
from transformer_nfn.prediction.runs import GUARD_FILE, RunError, read_state
from transformer_nfn.zoo import NetworkSizes

SCORES = 3
BLEND_FROM, BLEND_TO = 1.2, 1.6
"""Second-largest scores at which the estimate begins to count, and replaces the value."""
CHANCE_RAMP = 0.05
"""Width of the transition above `Guard.chance_threshold`."""
NO_THRESHOLD = -1.0
"""Value of `Guard.chance_threshold` where the estimate is not reliable enough."""
WIDENING = 1.0
"""Intervals of networks at the outlier limit are wider by this share: more of them are damaged."""


@dataclass(frozen=True)
class Assessment:
    """Result of a guard, ``[n]`` each.

    Attributes:
        accuracy: the predictor's value unless corrected.
        low: lower end of the interval.
        high: its upper end.
        outlier_score: above 1 is a warning.
    """

    accuracy: Tensor
    low: Tensor
    high: Tensor
    outlier_score: Tensor

    def contains(self, truth: Tensor) -> Tensor:
        """Whether the interval of each network contains its accuracy."""
        return (self.low <= truth) & (truth <= self.high)


@dataclass(frozen=True)
class Guard:
    """Outlier scores, corrected predictions and intervals; see the module.

    Attributes:
        inputs: probe inputs that accurate networks agree on, ``[inputs, tokens, width]``.
        estimator: accuracy from output features.
        damage: classifier of output features.
        distance: of tensor features, to healthy networks.
        gap_mean: predicted minus estimated accuracy of healthy networks, by prediction.
        gap_std: its standard deviation.
        error: of predictions for healthy networks, by prediction.
        estimate_error: of the estimator, by estimate, on healthy and damaged networks.
        centre: of the scores on healthy networks, ``[SCORES]``.
        width: from the centre to the limit, ``[SCORES]``.
        floor: accuracy below which there are no warnings, since damage would not show, scalar.
        radius: minimal distance of the interval's ends from prediction and estimate, scalar.
        upper: upward distance in units of the expected error, scalar.
        lower: downward distance in units of the estimator's error, scalar.
        near_chance: upper end of intervals at the floor and below, scalar.
        outlier: half width of intervals around the estimate, in units of its error, scalar.
        chance_threshold: estimate up to which outputs count as random, scalar.
    """

    inputs: Tensor
    estimator: AccuracyEstimator
    damage: DamageClassifier
    distance: HealthyDistance
    gap_mean: Curve
    gap_std: Curve
    error: Curve
    estimate_error: Curve
    centre: Tensor
    width: Tensor
    floor: Tensor
    radius: Tensor
    upper: Tensor
    lower: Tensor
    near_chance: Tensor
    outlier: Tensor
    chance_threshold: Tensor

    def assess(self, data: Dataset, sizes: NetworkSizes, predicted: Tensor) -> Assessment:
        """Assess networks with their predictions ``[n]``."""
        couplings = coupling_features(data.network).cpu()
        self._check_shapes(sizes, couplings)
        outputs = responses(data, sizes, self.inputs)
        return self.assess_features(outputs, couplings, predicted.double())

    def assess_features(
        self, outputs: Tensor, couplings: Tensor, predicted: Tensor
    ) -> Assessment:
        """Assess networks by their `responses` and `coupling_features` features."""
        estimate = self.estimator(outputs)
        scores = self.scaled(self.raw_scores(outputs, couplings, predicted, estimate))
        corrected = self.corrected(predicted, estimate)
        second, first = scores.sort(-1).values[:, -2:].unbind(-1)
        above = corrected > self.floor
        blend = ((second - BLEND_FROM) / (BLEND_TO - BLEND_FROM)).clamp(0, 1) * above
        low, high = self._interval(corrected, estimate, first)
        outlier_radius = self.outlier * self.estimate_error(estimate)
        return Assessment(
            corrected + blend * (estimate - corrected),
            (low + blend * (estimate - outlier_radius - low)).clamp(0, 1),
            (high + blend * (estimate + outlier_radius - high)).clamp(0, 1),
            self.outlier_score(scores, predicted, corrected),
        )

    def corrected(self, predicted: Tensor, estimate: Tensor) -> Tensor:
        """Replace predictions by the estimate where outputs look random, ``[n]``."""
        random = ((self.chance_threshold - estimate) / CHANCE_RAMP + 1).clamp(0, 1)
        random = random * (predicted > self.floor)
        return predicted - random * (predicted - estimate).clamp(min=0)

    def outlier_score(self, scores: Tensor, predicted: Tensor, corrected: Tensor) -> Tensor:
        """Largest of the scores ``[n, SCORES]`` that may warn, ``[n]``.

        Networks at chance never trigger a warning, since damage cannot lower their accuracy,
        unless their prediction was far above it: then the gap counts.
        """
        first, gap = scores.amax(-1), scores[:, 2]
        quiet = first.clamp(max=1.0)
        at_chance = torch.where(predicted > self.floor, torch.maximum(quiet, gap), quiet)
        return torch.where(corrected > self.floor, first, at_chance)

    def _interval(
        self, corrected: Tensor, estimate: Tensor, score: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Interval around prediction and estimate, by the expected errors; ``[n]`` each."""
        up = self.upper * self.error(corrected) * widening(score)
        down = self.lower * self.expected_estimate_error(estimate, score)
        low = torch.minimum(corrected, estimate) - torch.maximum(down, self.radius)
        high = torch.maximum(corrected, estimate) + torch.maximum(up, self.radius)
        above = corrected > self.floor
        # A network at chance may also confuse classes and be below it; a guard without a
        # threshold has calibrated this end like any other.
        low = torch.where(above | (self.chance_threshold < 0), low, 0.0)
        return low, torch.where(above, high, torch.maximum(high, self.near_chance))

    def raw_scores(
        self, outputs: Tensor, couplings: Tensor, predicted: Tensor, estimate: Tensor
    ) -> Tensor:
        """The three scores before scaling, ``[n, SCORES]``."""
        gap = (predicted - estimate - self.gap_mean(predicted)) / self.gap_std(predicted)
        return torch.stack([self.damage(outputs), self.distance(couplings), gap], -1)

    def scaled(self, raw: Tensor) -> Tensor:
        """Scores ``[n, SCORES]`` such that each has its limit at 1."""
        return (raw - self.centre) / self.width

    def expected_estimate_error(self, estimate: Tensor, score: Tensor) -> Tensor:
        """Expected error of the estimator, larger near the outlier limit."""
        return self.estimate_error(estimate) * widening(score)

    def _check_shapes(self, sizes: NetworkSizes, couplings: Tensor) -> None:
        expected = (tuple(self.inputs.shape[1:]), len(self.distance.frame.mean))
        actual = (input_shape(sizes), couplings.shape[1])
        if expected != actual:
            raise RunError(
                f"{GUARD_FILE} of the run is of other networks: inputs {list(expected[0])} and "
                f"{expected[1]} tensor features, expected {list(actual[0])} and {actual[1]}"
            )

    def save(self, folder: Path) -> None:
        """Write to a run folder."""
        write_tensors(folder / GUARD_FILE, flatten(self))

    @staticmethod
    def load(folder: Path) -> Guard | None:
        """Read and validate what `save` wrote; None for a run without a guard."""
        path = folder / GUARD_FILE
        if not path.is_file():
            return None
        tensors, _ = read_state(path, _expected_shapes, "float64")
        for name in ("width", "gap_std.values"):
            if not bool((tensors[name] > 0).all()):
                raise RunError(f"'{path}': '{name}' expected numbers above 0")
        return unflatten(Guard, tensors)


def widening(score: Tensor) -> Tensor:
    """Factor by which intervals are wider at an outlier score."""
    return 1 + WIDENING * score.clamp(0, 1)


def _expected_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor; the inputs and tensor features give the free sizes."""
    inputs, features = tensors.get("inputs"), tensors.get("distance.frame.mean")
    couplings = 0 if features is None else features.numel()
    products = COUNT + COUNT * (COUNT + 1) // 2
    curves = ("gap_mean", "gap_std", "error", "estimate_error")
    scalars = ("floor", "radius", "upper", "lower", "near_chance", "outlier", "chance_threshold")
    frames = {
        "estimator.inner": COUNT,
        "estimator.outer": products,
        "damage.frame": COUNT,
        "distance.frame": couplings,
    }
    return {
        "inputs": (0, 0, 0) if inputs is None or inputs.ndim != 3 else tuple(inputs.shape),
        **{f"{frame}.{part}": (n,) for frame, n in frames.items() for part in ("mean", "scale")},
        "estimator.coef": (products + 1,),
        "damage.coef": (COUNT + 1,),
        "distance.inverse": (couplings, couplings),
        **{f"{curve}.values": (KNOTS,) for curve in curves},
        "centre": (SCORES,),
        "width": (SCORES,),
        **dict.fromkeys(scalars, ()),
    }
