"""How a guard is made: what it learns from training networks, and what validation calibrates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.tensor_fit import tensor_fit
from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.guard_parts import Distance, Harm, Opinion
from transformer_nfn.prediction.intervals import radius, rank_quantile
from transformer_nfn.prediction.probe_search import STEPS
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import agreed_inputs, responses
from transformer_nfn.zoo import NetworkSizes

ALARM = 0.04
"""Of healthy networks, the share that may be warned of."""
HARM = 0.1
"""A network is harmed that lost this much accuracy, and good that has this much above chance."""
HEALTHY_LEVEL = 0.98
"""Of healthy networks, the share that intervals hold for: a broken one hides among the rest."""
DAMAGED_LEVEL = 0.995
"""Of damaged networks of the kinds seen, that share."""
SLACK = 1.25
"""Intervals are so much wider: other kinds of damage err more than those seen."""
SMALLEST = 0.005
"""Of an expected error."""
FEWEST = 20
FOLDS = 5


@dataclass(frozen=True)
class _Read:
    """What a guard reads of networks, and their accuracy; ``[n, …]`` each."""

    answers: Tensor
    fit: Tensor
    accuracy: Tensor

    @staticmethod
    def of(data: Dataset, arch: NetworkSizes, agreed: Tensor) -> _Read:
        answers = responses(data, arch, agreed)
        return _Read(answers, tensor_fit(data.network), data.accuracy.double())

    def take(self, index: Tensor) -> _Read:
        return _Read(self.answers[index], self.fit[index], self.accuracy[index])

    def __len__(self) -> int:
        return len(self.accuracy)


@dataclass(frozen=True)
class _Models:
    """The three small models, and what they say."""

    opinion: Opinion
    harm: Harm
    distance: Distance

    @staticmethod
    def of(healthy: _Read, harmed: _Read, drop: Tensor, chance: float) -> _Models:
        good, worse = healthy.accuracy > chance + HARM, drop > HARM
        opinion = Opinion.of(
            torch.cat([healthy.answers, harmed.answers]),
            torch.cat([healthy.accuracy, harmed.accuracy]),
            _even(len(healthy), len(harmed)),
        )
        harm = Harm.of(healthy.answers[good], harmed.answers[worse])
        return _Models(opinion, harm, Distance.of(healthy.fit[good]))

    def signs(self, read: _Read) -> Tensor:
        """The signs of strangeness that need no predictor, ``[n, 2]``."""
        return torch.stack([self.harm(read.answers), self.distance(read.fit)], -1)


def fit_guard(
    parts: Parts,
    damaged: Damaged,
    arch: NetworkSizes,
    predicted: Tensor,
    predicted_damaged: Tensor,
    *,
    steps: int = STEPS,
) -> Guard:
    """Learns from training networks, healthy and damaged, and calibrates on validation ones.

    Args:
        parts: healthy networks; inputs are searched for on their device.
        damaged: their relatives.
        arch: the sizes of all of them.
        predicted: what the predictor says of ``parts.val``.
        predicted_damaged: what it says of ``damaged.val``.
        steps: of the search for inputs.
    """
    chance = 1 / arch.classes
    _check_enough("trained networks above chance", parts.train.accuracy > chance + HARM)
    _check_enough("harmed networks", damaged.train_drop > HARM)
    agreed = agreed_inputs(parts.train, arch, steps=steps)
    train, val, harmed, harmed_val = (
        _Read.of(data.to("cpu"), arch, agreed)
        for data in (parts.train, parts.val, damaged.train, damaged.val)
    )
    models = _Models.of(train, harmed, damaged.train_drop, chance)
    blank = Guard.blank((agreed.shape[1], agreed.shape[2]), train.fit.shape[1])
    guard = replace(
        blank, agreed=agreed.double(), opinion=models.opinion, harm=models.harm,
        distance=models.distance,
    )  # fmt: skip
    guard, apart = _with_intervals(
        guard, val, harmed_val, predicted.double(), predicted_damaged.double(), chance
    )
    signs = torch.cat([models.signs(val), apart[:, None]], 1)
    said = guard.weight * predicted + (1 - guard.weight) * models.opinion(val.answers)
    unseen = _unseen_signs(train, harmed, parts.train, damaged, chance)
    good = models.opinion(train.answers) > guard.floor
    return _with_warnings(guard, signs, said > guard.floor, unseen, good)


def _check_enough(what: str, there: Tensor) -> None:
    if int(there.sum()) < FEWEST:
        raise RunError(f"not enough {what}: {int(there.sum())}, {FEWEST} are needed")


def _with_intervals(
    guard: Guard,
    healthy: _Read,
    harmed: _Read,
    predicted: Tensor,
    predicted_harmed: Tensor,
    chance: float,
) -> tuple[Guard, Tensor]:
    """The guard that weighs predictor and opinion and has intervals; how far these are apart."""
    first = torch.cat([predicted, predicted_harmed])
    second = guard.opinion(torch.cat([healthy.answers, harmed.answers]))
    truth = torch.cat([healthy.accuracy, harmed.accuracy])
    even = _even(len(healthy), len(harmed))
    weight = _share(first, second, truth, even)
    wrong = (truth - weight * first - (1 - weight) * second).abs()
    apart = (first - second).abs()
    error = _expected_error(apart, wrong, even)
    ratio = (wrong / (error[0] + error[1] * apart)).numpy()
    # Wide enough for healthy networks as for damaged ones of the kinds seen.
    quantile = SLACK * max(
        _highest(ratio[: len(healthy)], HEALTHY_LEVEL),
        _highest(ratio[len(healthy) :], DAMAGED_LEVEL),
    )
    # Harm brings accuracy down to chance: where that is within reach anyway, nobody is misled.
    floor = torch.tensor(chance + radius(wrong[: len(healthy)].numpy()) / 2, dtype=torch.float64)
    made = replace(
        guard, weight=weight, error=error, floor=floor,
        quantile=torch.tensor(quantile, dtype=torch.float64),
    )  # fmt: skip
    return made, apart[: len(healthy)]


def _unseen_signs(
    train: _Read, harmed: _Read, networks: Dataset, damaged: Damaged, chance: float
) -> Tensor:
    """Signs ``[n, 2]`` of training networks, by models that never saw their runs."""
    runs, own = (d.columns["run"].astype(str) for d in (networks, damaged.train))
    fold = {run: i % FOLDS for i, run in enumerate(dict.fromkeys(runs.tolist()))}
    at = torch.tensor([fold[run] for run in runs.tolist()])
    harmed_at = torch.tensor([fold.get(run, -1) for run in own.tolist()])
    signs = torch.zeros(len(train), 2, dtype=torch.float64)
    for i in range(FOLDS):
        rest = harmed_at != i
        models = _Models.of(
            train.take(at != i), harmed.take(rest), damaged.train_drop[rest], chance
        )
        signs[at == i] = models.signs(train.take(at == i))
    return signs


def _with_warnings(
    guard: Guard, signs: Tensor, above: Tensor, unseen: Tensor, good: Tensor
) -> Guard:
    """The guard with its limit: of healthy networks no more than `ALARM` are above it.

    Args:
        guard: without.
        signs: of validation networks, ``[n, SIGNS]``; the last needs the predictor.
        above: which of them may be warned of.
        unseen: signs of training networks that the predictor is not needed for, ``[m, 2]``: more
            networks than validation has tell better what is usual.
        good: which of these may be warned of.
    """
    known = signs[above] if int(above.sum()) >= FEWEST else signs
    usual = [torch.cat([known[:, 0], unseen[good][:, 0]]),
             torch.cat([known[:, 1], unseen[good][:, 1]]), known[:, 2]]  # fmt: skip
    centre = torch.stack([x.quantile(0.5) for x in usual])
    width = (torch.stack([x.quantile(0.95) for x in usual]) - centre).clamp(min=1e-6)
    strange = ((signs - centre) / width).amax(-1)
    strange_unseen = ((unseen - centre[:2]) / width[:2]).amax(-1)
    limit = torch.maximum(
        _at_rank(torch.where(above, strange, -torch.inf), 1 - ALARM),
        _at_rank(torch.where(good, strange_unseen, -torch.inf), 1 - ALARM * 2 / 3),
    )
    return replace(guard, centre=centre, width=width, limit=limit.clamp(min=1e-6))


def _even(healthy: int, harmed: int) -> Tensor:
    """Weights of so many of each, with which both count the same in all."""
    both = [torch.ones(healthy), torch.full((harmed,), healthy / harmed)]
    return torch.cat(both).double()


def _share(first: Tensor, second: Tensor, truth: Tensor, weight: Tensor) -> Tensor:
    """The weight of the first beside the second that brings them nearest to the truth."""
    gap = first - second
    total = (weight * gap.square()).sum().clamp(min=1e-12)
    return ((weight * (truth - second) * gap).sum() / total).clamp(0, 1)


def _expected_error(apart: Tensor, error: Tensor, weight: Tensor) -> Tensor:
    """A line through how far two opinions are apart and how large the error is, not falling."""
    mean = (weight * apart).sum() / weight.sum()
    level = (weight * error).sum() / weight.sum()
    spread = (weight * (apart - mean).square()).sum().clamp(min=1e-12)
    slope = ((weight * (apart - mean) * (error - level)).sum() / spread).clamp(min=0)
    return torch.stack([(level - slope * mean).clamp(min=SMALLEST), slope])


def _highest(sizes: np.ndarray, level: float) -> float:
    """The size that a new one stays below with probability ``level``, or the highest possible."""
    return rank_quantile(sizes, min(level, len(sizes) / (len(sizes) + 1)))


def _at_rank(values: Tensor, level: float) -> Tensor:
    """The value that a new one exceeds with probability ``1 - level`` at most."""
    rank = math.ceil(level * (len(values) + 1))
    ordered = values.sort().values
    found = ordered[min(rank, len(ordered)) - 1]
    # Where so few are above the floor that any alarm is allowed, the strangest sets the limit.
    return found if bool(found.isfinite()) else torch.ones((), dtype=values.dtype)
