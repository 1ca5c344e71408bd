"""Tabular predictors with a name: what each reads, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformer_nfn.models.learners import Learner, LogitLinear, SmallMLP
from transformer_nfn.models.predictor import (
    INVARIANTS,
    OTHERS,
    PACKED,
    STATISTICS,
    Variant,
    predictor,
)
from transformer_nfn.models.tabular import Tabular
from transformer_nfn.models.trees import FOREST, LIGHTGBM, SMALL, LightGBM, XGBoost
from transformer_nfn.spaces import WeightSpace


class Preset(Tabular):
    """A tabular predictor whose class says what it reads and learns with.

    Args:
        space: see `Tabular`, as ``whole``.
        options: of the learner.
    """

    learns: type[Learner]
    defaults: Mapping[str, Any] = {}
    """Options of the learner that are not stored."""

    def __init__(
        self, space: WeightSpace | str | None = None, whole: bool = False, **options: Any
    ) -> None:
        learner = self.learns(**{**self.defaults, **options})
        super().__init__(self.reads, learner, space, whole)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the constructor, as JSON values."""
        fixed = {"reads", "learner", *self.defaults}
        return {name: value for name, value in super().settings.items() if name not in fixed}


@predictor("xgboost")
class XGBoostPredictor(Preset):
    """XGBoost on the flattened weights, with the authors' settings.

    >>> XGBoostPredictor(rounds=10).settings["rounds"]
    10
    """

    title, place = "XGBoost", 3
    reads, learns = PACKED, XGBoost


@predictor("lightgbm")
class LightGBMPredictor(Preset):
    """LightGBM on the flattened weights, with the authors' settings.

    >>> LightGBMPredictor(patience=10).settings["patience"]
    10
    """

    title, place = "LightGBM", 4
    reads, learns, defaults = PACKED, LightGBM, {"params": LIGHTGBM}


@predictor("random_forest")
class RandomForestPredictor(Preset):
    """A random forest on the flattened weights: LightGBM's rf mode with the authors' settings.

    >>> RandomForestPredictor(rounds=10).settings["rounds"]
    10
    """

    title, place = "Random Forest", 5
    reads, learns, defaults = PACKED, LightGBM, {"params": FOREST}


@predictor("invariant_boosting")
class InvariantBoosting(Preset):
    """LightGBM on statistics and spectra of invariants.

    >>> InvariantBoosting(whole=True).any_task
    True
    """

    title, place = "Boosting on invariants", 6
    variants: ClassVar = {"whole": Variant("Boosting on whole invariants", {"whole": True})}
    invariant = True
    reads, learns, defaults = INVARIANTS, LightGBM, {"params": SMALL}


@predictor("invariant_mlp")
class InvariantMLP(Preset):
    """A small MLP on the signed logarithm of invariants, standardised on the training part.

    >>> import torch
    >>> from transformer_nfn.models import Batch
    >>> from transformer_nfn.spaces import attention_block
    >>> block = attention_block(4, 2, 2, 2, 3).randn(20)
    >>> networks = Batch.of({f"blocks.0.{name}": w[:, 0] for name, w in block.items()})
    >>> InvariantMLP(epochs=2).fit(networks, torch.rand(20)).predict(networks).shape
    torch.Size([20])
    """

    title, place = "MLP on invariants", 7
    variants: ClassVar = {"whole": Variant("MLP on whole invariants", {"whole": True})}
    invariant = True
    reads, learns = INVARIANTS, SmallMLP


@predictor("statistics_linear")
class StatisticsLinear(Preset):
    """Logit-linear model on mean, variance and quartiles of each tensor (Unterthiner et al., 2020).

    >>> import torch
    >>> from transformer_nfn.models import Batch
    >>> networks = Batch.of({"b_1": torch.randn(20, 5)})
    >>> StatisticsLinear().fit(networks, torch.rand(20)).num_parameters
    8
    """

    title, place = "Linear on statistics", OTHERS
    reads, learns = STATISTICS, LogitLinear


@predictor("statistics_mlp")
class StatisticsMLP(Preset):
    """A small MLP on mean, variance and quartiles of each tensor, standardised."""

    title, place = "MLP on statistics", OTHERS
    reads, learns = STATISTICS, SmallMLP


@predictor("statistics_boosting")
class StatisticsBoosting(Preset):
    """LightGBM on mean, variance and quartiles of each tensor."""

    title, place = "Boosting on statistics", OTHERS
    reads, learns, defaults = STATISTICS, LightGBM, {"params": SMALL}


@predictor("weights_mlp")
class WeightsMLP(Preset):
    """A small MLP on all weights, standardised."""

    title, place = "MLP on all weights", OTHERS
    reads, learns = PACKED, SmallMLP
