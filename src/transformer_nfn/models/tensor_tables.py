"""Predictors on statistics of each tensor, or on all weights: the simplest rivals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from transformer_nfn.io.tensor_files import TensorInfo
from transformer_nfn.models.checkpoint_batch import WEIGHTS
from transformer_nfn.models.invariants import InvariantBoosting, InvariantMLP
from transformer_nfn.models.network import same_batch, tensors_of
from transformer_nfn.models.predictor import OTHERS, PACKED, STATISTICS, predictor
from transformer_nfn.models.statistics import fit_ridge, mean_and_scale, sorted_statistics
from transformer_nfn.models.tabular import Held, TensorPredictor, flattened, only_size

PENALTIES = tuple(10.0**i for i in range(-3, 6))
"""Ridge penalties to choose from."""
EXTREME = 1e-3
"""Accuracies closer to 0 or 1 count as this close: their logits would outweigh all others."""


def tensor_statistics(network: Mapping[str, object]) -> np.ndarray:
    """Seven statistics of every tensor, names in alphabetical order, ``[n, F]`` in float64.

    >>> tensor_statistics({"classifier": {"b_1": torch.ones(2, 5)}}).shape
    (2, 7)
    """
    named = only_size(network) if WEIGHTS in network else tensors_of(network)
    weights = same_batch([named[name].detach().cpu().double().flatten(1) for name in sorted(named)])
    out: np.ndarray = torch.cat([sorted_statistics(w) for w in weights], 1).numpy()
    return out


class StatisticsTable:
    """Rows of predictors that read statistics of each tensor."""

    reads = STATISTICS

    def table(self, network: Mapping[str, object]) -> np.ndarray:
        """Seven statistics of every tensor."""
        return tensor_statistics(network)


@predictor("statistics_mlp")
class StatisticsMLP(StatisticsTable, InvariantMLP):
    """A small MLP on mean, variance and quartiles of each tensor, standardised.

    >>> networks = {"classifier": {"b_1": torch.randn(20, 5)}}
    >>> StatisticsMLP(epochs=2).fit(networks, torch.rand(20)).width
    7
    """

    title, place = "MLP on statistics", OTHERS


@predictor("statistics_boosting")
class StatisticsBoosting(StatisticsTable, InvariantBoosting):
    """LightGBM on mean, variance and quartiles of each tensor."""

    title, place = "Boosting on statistics", OTHERS


@predictor("weights_mlp")
class WeightsMLP(InvariantMLP):
    """A small MLP on all weights, standardised.

    >>> networks = {"classifier": {"b_1": torch.randn(20, 5)}}
    >>> WeightsMLP(epochs=2).fit(networks, torch.rand(20)).width
    5
    """

    title, place = "MLP on all weights", OTHERS
    reads = PACKED

    def table(self, network: Mapping[str, object]) -> np.ndarray:
        """All weights."""
        return flattened(network)


@predictor("statistics_linear")
class StatisticsLinear(StatisticsTable, TensorPredictor):
    """Logit-linear model on mean, variance and quartiles of each tensor (Unterthiner et al., 2020).

    Ridge regression of the logit of the accuracy. The penalty is the one of least leave-one-out
    error. Nothing is random: all seeds give one predictor.

    >>> networks = {"classifier": {"b_1": torch.randn(20, 5)}}
    >>> StatisticsLinear().fit(networks, torch.rand(20)).num_parameters
    8
    """

    title, place = "Linear on statistics", OTHERS

    def __init__(self) -> None:
        self.settings = {}

    @property
    def num_parameters(self) -> int | None:
        """One for each statistic, and the constant; None before it is fitted."""
        return None if self.width is None else self.width + 1

    def _learn(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        table, target = torch.from_numpy(x), torch.from_numpy(y).clamp(EXTREME, 1 - EXTREME).logit()
        mean, scale = mean_and_scale(table)
        fit = fit_ridge((table - mean) * scale, target, PENALTIES)
        weight = fit.weight * scale
        self._state = {"weight": weight, "constant": fit.constant - mean @ weight}

    def _read(self, x: np.ndarray) -> np.ndarray:
        logits = torch.from_numpy(x) @ self._state["weight"] + self._state["constant"]
        return np.asarray(torch.sigmoid(logits).numpy())

    def _shapes(self) -> dict[str, TensorInfo]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.width or 0,), "constant": ()}
        return {name: TensorInfo(shape, "float64") for name, shape in shapes.items()}
