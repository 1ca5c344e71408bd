"""Training protocol of the paper and its authors' code, and training strategies of the models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from transformer_nfn.models import ProbeGen, StatNN, WholeCheckpoint, WholeNetwork
from transformer_nfn.models.baselines import STATISTICS
from transformer_nfn.models.whole_network.model import piecewise_linear
from transformer_nfn.prediction.data import Dataset, SizeGroups, in_batches
from transformer_nfn.prediction.predictors import prepared
from transformer_nfn.prediction.probe_search import (
    find_probes,
    networks_per_group,
    search_checkpoints,
    search_steps,
)
from transformer_nfn.prediction.runs import RunError

DEFAULTS: Mapping[str, dict[str, Any]] = {
    "whole_network": {"epochs": 30, "batch": 32, "lr": 2e-3},
    "probegen": {"batch": 32, "lr": 5e-4},
    "hidden_probe": {"batch": 32, "lr": 5e-4},
    "neural_graph": {"batch": 32},
}
"""Deviations of models from the paper's protocol."""
MIN_EPOCH = 192
"""Minimal number of networks per epoch of `WholeNetwork`."""
MAX_EPOCH = 2560
"""Maximal number while its probes learn: 30 epochs are 7 passes over 11,000 networks."""


@dataclass(frozen=True)
class Protocol:
    """Batch 16, Adam at 1e-3 after ten epochs of warm-up, cosine to 1e-5, binary cross-entropy.

    Attributes:
        epochs: number of epochs.
        batch: networks per step; the last batch of an epoch may be smaller.
        lr: the highest learning rate.
        final_lr: the last learning rate.
        warmup: epochs of linear warm-up, at most a fifth of the training.
    """

    epochs: int = 50
    batch: int = 16
    lr: float = 1e-3
    final_lr: float = 1e-5
    warmup: int = 10

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise RunError(
                f"epochs and batch must be positive, found {self.epochs} and {self.batch}"
            )
        if not 0 < self.lr < math.inf:
            raise RunError(f"the learning rate must be a number above 0, found {self.lr}")

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Learning rate of one step, counted from 0."""
        warm = min(self.warmup, max(1, self.epochs // 5)) * steps_per_epoch
        total = self.epochs * steps_per_epoch
        if step < warm:
            return self.lr * (step + 1) / warm
        done = (step - warm) / max(1, total - warm)
        return self.final_lr + 0.5 * (self.lr - self.final_lr) * (1 + math.cos(math.pi * done))

    @staticmethod
    def of(
        model: str, epochs: int | None = None, batch: int | None = None, lr: float | None = None
    ) -> Protocol:
        """The default protocol of a model, with the given values replaced."""
        given = {"epochs": epochs, "batch": batch, "lr": lr}
        changes = {name: value for name, value in given.items() if value is not None}
        return Protocol(**(DEFAULTS.get(model, {}) | changes))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class ModelInputs:
    """Training and validation networks of each size, as one module reads them."""

    train: Sequence[Mapping[str, Any]]
    val: Sequence[Mapping[str, Any]]

    @staticmethod
    def of(groups: SizeGroups) -> ModelInputs:
        """The networks unchanged."""
        return ModelInputs([d.network for d in groups.train], [d.network for d in groups.val])


class TrainingStrategy:
    """Training as in the paper: Adam, binary cross-entropy, every network once per epoch.

    Attributes:
        stacked: whether seeds can share each step, as one pass over stacked parameters.
        start_note: progress note for `start`, if it takes long.
    """

    stacked = True
    start_note = ""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def prepare(self, groups: SizeGroups) -> SizeGroups:
        """Precompute what all seeds read of the networks."""
        module = self.module
        return groups.map(
            lambda parts: replace(
                parts, train=prepared(module, parts.train), val=prepared(module, parts.val)
            )
        )

    def networks_per_epoch(self, train: Sequence[Dataset]) -> list[int]:
        """Number of networks of each size in an epoch."""
        return [len(data) for data in train]

    def start(
        self, module: nn.Module, groups: SizeGroups, seed: int, epochs: int, fresh: bool
    ) -> ModelInputs:
        """Set up a module before training; ``fresh`` unless a killed training resumes."""
        return ModelInputs.of(groups)

    def finish(self, module: nn.Module, groups: SizeGroups, inputs: ModelInputs) -> None:
        """Finish a module at its best epoch."""

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """Loss of one seed on one batch."""
        return binary_cross_entropy_with_logits(logits, accuracy)

    def optimiser(
        self, state: Mapping[str, Tensor], rate: float, device: torch.device
    ) -> torch.optim.Optimizer:
        """Optimiser of the parameters of all seeds, named ``SEED.PARAMETER``."""
        return torch.optim.Adam(list(state.values()), **_adam_options(rate, device))


class StatisticsStrategy(TrainingStrategy):
    """Training as in the paper on precomputed statistics."""

    def start(
        self, module: nn.Module, groups: SizeGroups, seed: int, epochs: int, fresh: bool
    ) -> ModelInputs:
        """Drop the weights."""
        inputs = ModelInputs.of(groups)
        train, val = (
            [{STATISTICS: network[STATISTICS]} for network in part]
            for part in (inputs.train, inputs.val)
        )
        return ModelInputs(train, val)


class ProbingStrategy(TrainingStrategy):
    """Training as in the paper, one seed after another: each runs networks on its own probes."""

    stacked = False


class WholeNetworkStrategy(TrainingStrategy):
    """Search of the probes first, then training on all checkpoints: of the heads, or of both."""

    stacked = False  # each seed has its own probes
    start_note = "finds probes, and what all networks answer to them"

    module: WholeNetwork

    def prepare(self, groups: SizeGroups) -> SizeGroups:
        """Add the additional checkpoints to the training part."""
        return super().prepare(
            groups.map(lambda parts: replace(parts, train=parts.all_train, more=None))
        )

    def networks_per_epoch(self, train: Sequence[Dataset]) -> list[int]:
        """One checkpoint per run; more if there are few runs, fewer while probes learn."""
        runs = [_num_runs(data) for data in train]
        total = sum(runs)
        wanted = max(total, MIN_EPOCH)
        if self.module.learn_probes:
            wanted = min(wanted, MAX_EPOCH)
        return [-(-n * wanted // total) for n in runs]

    def start(
        self, module: nn.Module, groups: SizeGroups, seed: int, epochs: int, fresh: bool
    ) -> ModelInputs:
        """Standardise invariants, search probes, compute the outputs of all networks on them."""
        assert isinstance(module, WholeNetwork)
        module.standardise(*(data.network for data in groups.train))
        if fresh and module.search:
            runs = sum(_num_runs(data) for data in groups.train)
            steps, per_group = search_steps(epochs, runs), networks_per_group(runs)
            if isinstance(module, WholeCheckpoint):
                search_checkpoints(module, groups.train[0], seed, steps, per_group)
            else:
                find_probes(module, groups.train, seed, steps=steps, per_group=per_group)
        if module.learn_probes:
            return ModelInputs.of(groups)
        train, val = (
            [module.head_inputs(d.network) for d in part] for part in (groups.train, groups.val)
        )
        if isinstance(module, WholeCheckpoint):
            module.fit_linear(train[0], groups.train[0].accuracy)
        return ModelInputs(train, val)

    @torch.no_grad()
    def finish(self, module: nn.Module, groups: SizeGroups, inputs: ModelInputs) -> None:
        """Calibrate the outputs on the validation networks; the order does not change."""
        assert isinstance(module, WholeNetwork)
        logits = [
            in_batches(module.logits, network, data)
            for data, network in zip(groups.val, inputs.val, strict=True)
        ]
        truth = torch.cat([data.accuracy for data in groups.val]).double().cpu().numpy()
        module.calibrate(fit_curve(torch.cat(logits).double().cpu().numpy(), truth))

    def loss(self, logits: Tensor, accuracy: Tensor) -> Tensor:
        """The model's loss."""
        return self.module.loss(logits, accuracy)

    def optimiser(
        self, state: Mapping[str, Tensor], rate: float, device: torch.device
    ) -> torch.optim.Optimizer:
        """AdamW on the heads; probes stay as found, or learn without decay."""
        probes, heads = (
            [value for name, value in state.items() if (".probes." in name) is of_probes]
            for of_probes in (True, False)
        )
        groups: list[dict[str, Any]] = [
            {"params": heads, "weight_decay": self.module.weight_decay}
        ]
        if self.module.learn_probes:
            groups.append({"params": probes, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, **_adam_options(rate, device))


def strategy_of(module: nn.Module) -> TrainingStrategy:
    """Training strategy of a module."""
    if isinstance(module, WholeNetwork):
        return WholeNetworkStrategy(module)
    if isinstance(module, ProbeGen):
        return ProbingStrategy(module)
    return StatisticsStrategy(module) if isinstance(module, StatNN) else TrainingStrategy(module)


def _num_runs(data: Dataset) -> int:
    return len(set(data.runs))


def _adam_options(rate: float, device: torch.device) -> dict[str, Any]:
    fused = device.type in ("cpu", "cuda")
    return dict(lr=rate, fused=fused, capturable=device.type == "cuda")


TYPICAL_ERROR = 0.02
"""Error beyond which the loss grows linearly."""
PRIOR = 0.1
"""Weight of the prior on a straight line and on the identity: few networks do not move it far."""
PIECES, PER_PIECE = 7, 16
"""Most pieces of a curve, and networks that each needs."""
STEEPEST = 50.0
"""Largest slope, and the inverse of the smallest."""


def fit_curve(logits: np.ndarray, accuracy: np.ndarray) -> np.ndarray:
    """Fit a rising curve that takes logits ``[n]`` to those of the accuracies ``[n]``.

    A ranking loss stretches the output scale, here more than there; this calibrates it and keeps
    the order of predictions. Least squares are robust, but plain where accuracies are all 0 or 1
    (whether networks belong to a class): a robust loss would take the rarer answer for an error.

    Returns:
        Knots and values of a piecewise linear curve, ``[2, knots]``; see `WholeNetwork.curve`.
    """
    from scipy.optimize import least_squares
    from scipy.special import expit

    pieces = min(PIECES, max(1, len(logits) // PER_PIECE))
    low, high = np.quantile(logits, (0.02, 0.98)) if len(logits) else (-1.0, 1.0)
    knots = np.linspace(low, max(high, low + 1e-3), pieces + 1)
    inputs = torch.from_numpy(np.append(logits, 0.0))

    def curve(parameters: np.ndarray) -> np.ndarray:
        steps = np.exp(parameters[1:]) * np.diff(knots)
        return np.stack([knots, parameters[0] + np.concatenate([[0.0], np.cumsum(steps)])])

    def errors(parameters: np.ndarray) -> np.ndarray:
        *bent, at_zero = piecewise_linear(inputs, torch.from_numpy(curve(parameters))).numpy()
        slopes = parameters[1:]
        prior = np.array([at_zero, slopes.mean(), *np.diff(slopes)])
        return np.concatenate([expit(bent) - accuracy, PRIOR * prior])

    start = np.array([low, *np.zeros(pieces)])
    if not len(logits):
        return curve(start)
    bounds = np.array([np.inf, *np.full(pieces, np.log(STEEPEST))])
    loss = "linear" if np.isin(accuracy, (0, 1)).all() else "soft_l1"
    fit = least_squares(errors, start, bounds=(-bounds, bounds), loss=loss, f_scale=TYPICAL_ERROR)
    return curve(fit.x)
