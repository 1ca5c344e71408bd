"""What a guard is fitted to: features of networks, and models of all recipes but one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.data import Dataset, Parts
from transformer_nfn.prediction.guard.estimators import (
    AccuracyEstimator,
    DamageClassifier,
    HealthyDistance,
)
from transformer_nfn.prediction.guard.responses import responses
from transformer_nfn.prediction.metrics import highest_quantile
from transformer_nfn.prediction.recipe_shift import recipe_labels
from transformer_nfn.prediction.uncertainty import random_folds
from transformer_nfn.zoo import NetworkSizes

DROP = 0.1
"""Loss of accuracy from which a network counts as damaged; good ones are so far above chance."""
MIN_NETWORKS = 20
"""Networks without which nothing is concluded."""


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
        recipes: to leave out in turn.
    """

    healthy: Features
    damaged: Features
    drop: Tensor
    chance: float
    recipes: Sequence[Recipes]

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
        recipes = [replace(each, damaged=each.damaged[rows]) for each in self.recipes]
        return replace(self, damaged=self.damaged.take(rows), drop=self.drop[rows], recipes=recipes)

    def left_out(self, val: Features, floor: float) -> LeftOut:
        """Estimates and scores by models that were fitted to no network of the same recipe."""
        rows, estimates, scores, recipes = [], [], [], []
        alive = self.healthy.accuracy > floor
        for each in self.recipes:
            for value in each.healthy.unique():
                rest = self.take_damaged(each.damaged != value)
                rest = replace(rest, healthy=self.healthy.take(each.healthy != value))
                if not rest.suffices:
                    continue
                in_val, in_train = each.val == value, (each.healthy == value) & alive
                left = val.take(in_val), self.healthy.take(in_train)
                rows.append(in_val.nonzero()[:, 0])
                estimates.append(rest.estimators.estimator(left[0].outputs))
                scores.append([rest.estimators.scores(networks) for networks in left])
                recipes.append([torch.full((len(networks),), len(rows)) for networks in left])
        of_val, of_train = zip(*scores, strict=True)
        val_recipes, train_recipes = zip(*recipes, strict=True)
        return LeftOut(
            torch.cat(rows), torch.cat(val_recipes), torch.cat(estimates), torch.cat(of_val),
            torch.cat(train_recipes), torch.cat(of_train),
        )  # fmt: skip

    @property
    def suffices(self) -> bool:
        """Whether there are enough networks of both kinds to fit to."""
        good, worse = self.healthy.accuracy > self.chance + DROP, self.drop > DROP
        return min(int(good.sum()), int(worse.sum())) >= MIN_NETWORKS // 2


@dataclass(frozen=True)
class LeftOut:
    """Healthy networks as models see them that were fitted to no network of their recipe.

    Each network occurs once for every column that tells recipes apart.

    Attributes:
        rows: of validation networks, ``[m]``.
        recipes: numbers of the left-out recipes, ``[m]``.
        estimate: of the accuracy, ``[m]``.
        scores: of damage and of distance, ``[m, 2]``.
        train_recipes: as ``recipes`` of training networks that are better than chance, ``[l]``.
        train_scores: of these.
    """

    rows: Tensor
    recipes: Tensor
    estimate: Tensor
    scores: Tensor
    train_recipes: Tensor
    train_scores: Tensor


def hardest(values: Tensor, recipes: Tensor, level: float) -> float:
    """Quantile of the values of the recipe where it is largest; ``[n]`` each."""
    return max(
        highest_quantile(values[recipes == recipe].numpy(), level) for recipe in recipes.unique()
    )


@dataclass(frozen=True)
class Recipes:
    """A property of recipes, such as the optimiser; networks of each value are left out in turn.

    Attributes:
        healthy: value of each training network, ``[n]``.
        damaged: of their damaged copies.
        val: of the validation networks.
    """

    healthy: Tensor
    damaged: Tensor
    val: Tensor

    @staticmethod
    def of(parts: Parts, damaged: Dataset) -> list[Recipes]:
        """All that `recipe_labels` finds, and folds at random."""
        both, out, count = [parts.train, parts.val], [], len(parts.train)
        for labels in (random_folds(count + len(parts.val)), *recipe_labels(both)):
            of_run = dict(zip(parts.train.runs, labels[:count].tolist(), strict=True))
            copies = torch.tensor([of_run.get(run, -1) for run in damaged.runs])
            known = torch.from_numpy(labels)
            out.append(Recipes(known[:count], copies, known[count:]))
        return out


def balanced_weights(healthy: int, damaged: int) -> Tensor:
    """Weights with which both groups have the same total."""
    both = [torch.ones(healthy), torch.full((damaged,), healthy / max(damaged, 1))]
    return torch.cat(both).double()
