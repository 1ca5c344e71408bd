"""Guard for predictors of networks of any family: it recognises damage by their invariants.

Copies of the training networks are damaged in memory: entries shuffled, noise, pruning, one block
shuffled. Nobody knows what such a copy would score, so the guard does not correct a prediction: a
network whose invariants are nearer to those of damaged copies than to those of healthy networks
gets a warning, and the range of the target as its interval.

The limit is the score that 5 % of healthy networks exceed which the guard was not fitted to: those
left out at random or, if that is higher, as a recipe (`recipe_labels`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model, read_model
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.tensor_files import InMemory, write_tensors
from transformer_nfn.models.invariants import FEATURES
from transformer_nfn.prediction.checkpoint_reader import model_features
from transformer_nfn.prediction.data import Dataset
from transformer_nfn.prediction.guard.estimators import HealthyDistance, flatten, unflatten
from transformer_nfn.prediction.metrics import highest_quantile
from transformer_nfn.prediction.recipe_shift import recipe_labels, target_thirds
from transformer_nfn.prediction.runs import OWN_GUARD_FILE, RunError, read_state
from transformer_nfn.prediction.training_set import TrainingSetDistance
from transformer_nfn.prediction.uncertainty import random_folds
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.training.damage import damage_generator, pruned, shuffled

FALSE_ALARMS = 0.05
"""Share of healthy networks that may be warned of."""
MIN_NETWORKS = 20
"""Networks without which nothing is concluded."""
NOISE, PRUNED = 1.0, 0.8
_NUMBER = re.compile(r"\.(\d+)\.")
Report = Callable[[dict[str, Any]], None]


def damaged_copies(model: Model, name: str) -> dict[str, Model]:
    """Copies of an open network in memory, damaged in several ways; by the kind of damage.

    - ``shuffled``, ``half``: all, or half, of the entries of each matrix are permuted.
    - ``block``: the matrices of one block are permuted, as if it had never been trained.
    - ``noise``: normal noise with the standard deviation of each matrix is added.
    - ``pruned``: the smallest 80 % of each matrix become zero.

    Args:
        model: the network.
        name: decides the random numbers.
    """
    tensors = {key: model.checkpoint[key] for key in model.checkpoint}
    generator = damage_generator(name)
    blocks = sorted({match[1] for key in tensors if (match := _NUMBER.search(key))})
    at = blocks[int(torch.randint(len(blocks), (), generator=generator))] if blocks else ""

    def noisy(w: Tensor) -> Tensor:
        draw = torch.randn(w.shape, generator=generator)
        return (w + NOISE * w.float().std() * draw).to(w.dtype)

    def in_block(key: str) -> bool:
        match = _NUMBER.search(key)
        return match is not None and match[1] == at

    def copy(change: Callable[[Tensor], Tensor], chosen: Callable[[str], bool]) -> Model:
        held = {
            key: change(w) if _is_matrix(w) and chosen(key) else w for key, w in tensors.items()
        }
        source = Checkpoint(model.where, InMemory(held), dict(model.config))
        return read_model(source, model.path, model.options)

    everywhere = lambda key: True  # noqa: E731
    return {
        "shuffled": copy(lambda w: shuffled(w, 1.0, generator), everywhere),
        "half": copy(lambda w: shuffled(w, 0.5, generator), everywhere),
        "block": copy(lambda w: shuffled(w, 1.0, generator), in_block),
        "noise": copy(noisy, everywhere),
        "pruned": copy(lambda w: pruned(w, PRUNED), everywhere),
    }


def _is_matrix(w: Tensor) -> bool:
    return w.is_floating_point() and w.ndim >= 2 and w.numel() > w.shape[-1]


@dataclass(frozen=True)
class OwnGuard:
    """Outlier score of invariants, see the module.

    Attributes:
        healthy: distance to healthy networks.
        damaged: distance to damaged ones.
        centre: median score of healthy networks.
        width: from the centre to the limit.
        floor: prediction up to which there is no warning: the interval holds the lowest target.
    """

    healthy: HealthyDistance
    damaged: HealthyDistance
    centre: Tensor
    width: Tensor
    floor: Tensor

    def outlier_score(self, features: Tensor, predicted: Tensor) -> Tensor:
        """Score of networks by `invariants_of` ``[n, F]``, ``[n]``; above 1 is a warning."""
        raw = _score((self.healthy, self.damaged), features)
        score = (raw - self.centre) / self.width
        return torch.where(predicted > self.floor, score, score.clamp(max=1.0))

    def save(self, folder: Path) -> None:
        """Write to a run folder."""
        write_tensors(folder / OWN_GUARD_FILE, flatten(self))

    @staticmethod
    def load(folder: Path) -> OwnGuard | None:
        """Read and validate what `save` wrote; None for a run without a guard."""
        path = folder / OWN_GUARD_FILE
        if not path.is_file():
            return None
        guard = unflatten(OwnGuard, read_state(path, _expected_shapes, "float64")[0])
        if not float(guard.width) > 0:
            raise RunError(f"'{path}': 'width' expected a number above 0")
        return guard


def _expected_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor; the number of invariants is free."""
    mean = tensors.get("healthy.frame.mean")
    count = 0 if mean is None else mean.numel()
    each = {"frame.mean": (count,), "frame.scale": (count,), "inverse": (count, count)}
    both = {f"{of}.{name}": each[name] for of in ("healthy", "damaged") for name in each}
    return {**both, "centre": (), "width": (), "floor": ()}


def _score(distances: tuple[HealthyDistance, HealthyDistance], features: Tensor) -> Tensor:
    healthy, damaged = distances
    return healthy(features) - damaged(features)


def invariants_of(data: Dataset) -> Tensor:
    """Invariants of networks of any family, ``[n, F]`` in float64 on the CPU."""
    features: Tensor = data.network.computed[FEATURES]
    return features.double().cpu()


def fit_own_guard(
    zoo: Zoo, train: Dataset, radius: float, report: Report | None = None
) -> OwnGuard | None:
    """Fit a guard to the training networks of a zoo; None if these are too few, or have classes.

    Args:
        zoo: that holds them.
        train: the training networks.
        radius: half the width of the predictor's intervals.
        report: called after every network.
    """
    if train.target.kind == "class":
        return None
    floor = float(train.truth.min()) + radius if train.target.kind == "share" else -1e300
    network = train.network.to("cpu").only(FEATURES)
    train = replace(train, network=network, accuracy=train.accuracy.cpu())
    train = train.take(np.flatnonzero(train.truth > floor))
    if len(train) < MIN_NETWORKS:
        return None
    copies = []
    for i, row in enumerate(train.columns["row"].tolist()):
        with zoo.model(row) as model:
            damaged = damaged_copies(model, f"{row}").values()
            copies.append(torch.stack([model_features(copy) for copy in damaged]))
        if report is not None:
            report({"note": f"damages networks, {i + 1} of {len(train)}", "done": i + 1})
    return fit_to_features(train, torch.stack(copies), floor)


def fit_to_features(train: Dataset, copies: Tensor, floor: float) -> OwnGuard:
    """Fit a guard to invariants.

    Args:
        train: healthy networks, with their invariants.
        copies: invariants of their damaged copies, ``[n, kinds, F]``.
        floor: see `OwnGuard`.
    """
    healthy = invariants_of(train)

    def fit(rows: Tensor) -> tuple[HealthyDistance, HealthyDistance]:
        return HealthyDistance.of(healthy[rows]), HealthyDistance.of(copies[rows].flatten(0, 1))

    def scores(label: np.ndarray) -> np.ndarray:
        """Scores of networks by a guard of those with other labels; distant ones do not count."""
        out = []
        for value in np.unique(label):
            left = torch.from_numpy(label == value)
            if int((~left).sum()) >= MIN_NETWORKS:
                novelty = TrainingSetDistance.of([train.take(~left)])(train.take(left))
                out.append(_score(fit(~left), healthy[left])[novelty <= 1].numpy())
        return np.concatenate(out) if out else np.empty(0)

    at_random = scores(random_folds(len(healthy)))
    labels = [target_thirds([train]), *recipe_labels([train])]
    by_recipe = np.concatenate([scores(label) for label in labels])
    limits = [highest_quantile(x, 1 - FALSE_ALARMS) for x in (at_random, by_recipe) if len(x)]
    centre = float(np.median(at_random))
    numbers = (centre, max(max(limits) - centre, 1e-6), floor)
    everyone = torch.ones(len(healthy), dtype=torch.bool)
    return OwnGuard(*fit(everyone), *(torch.tensor(x, dtype=torch.float64) for x in numbers))
