"""How a guard is made: what it learns from training networks, and what validation calibrates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.tensor_fit import tensor_fit
from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.guard import Guard, widening
from transformer_nfn.prediction.guard_curves import Curve, smoothed_by_others
from transformer_nfn.prediction.guard_parts import Distance, Harm, Opinion
from transformer_nfn.prediction.intervals import LEVEL, radius, rank_quantile
from transformer_nfn.prediction.probe_search import STEPS
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import agreed_inputs, responses
from transformer_nfn.zoo import NetworkSizes

HARM_ALARM, FIT_ALARM, GAP_ALARM = 0.01, 0.0025, 0.02
"""Of healthy networks, the share that each sign of strangeness may take for strange."""
HARM = 0.1
"""A network is harmed that lost this much accuracy, and good that has this much above chance."""
HEALTHY_LEVEL = 0.99
"""Of healthy networks without a warning, the share that intervals hold for."""
SLACK = 1.5
"""Intervals are so much wider: slight damage of kinds never seen hides among healthy networks."""
SMALLEST = 0.01
"""Of an expected error."""
FEWEST = 20
FOLDS = 5


@dataclass(frozen=True)
class Read:
    """What a guard reads of networks, and their accuracy; ``[n, …]`` each."""

    answers: Tensor
    fit: Tensor
    accuracy: Tensor

    @staticmethod
    def of(data: Dataset, arch: NetworkSizes, agreed: Tensor) -> Read:
        answers = responses(data, arch, agreed)
        return Read(answers, tensor_fit(data.network), data.accuracy.double())

    def take(self, index: Tensor) -> Read:
        return Read(self.answers[index], self.fit[index], self.accuracy[index])

    def __len__(self) -> int:
        return len(self.accuracy)


@dataclass(frozen=True)
class Models:
    """The three small models, and what two of them say."""

    opinion: Opinion
    harm: Harm
    distance: Distance

    @staticmethod
    def of(healthy: Read, harmed: Read, drop: Tensor, chance: float) -> Models:
        good, worse = healthy.accuracy > chance + HARM, drop > HARM
        opinion = Opinion.of(
            torch.cat([healthy.answers, harmed.answers]),
            torch.cat([healthy.accuracy, harmed.accuracy]),
            _even(len(healthy), len(harmed)),
        )
        harm = Harm.of(healthy.answers[good], harmed.answers[worse])
        return Models(opinion, harm, Distance.of(healthy.fit[good]))

    def signs(self, read: Read) -> Tensor:
        """The signs of strangeness that need no predictor, ``[n, 2]``."""
        return torch.stack([self.harm(read.answers), self.distance(read.fit)], -1)


@dataclass(frozen=True)
class Learned:
    """Training networks that a guard learns from.

    Attributes:
        healthy: as they were trained.
        harmed: their damaged relatives.
        drop: how much accuracy these lost.
        chance: the accuracy of guessing.
    """

    healthy: Read
    harmed: Read
    drop: Tensor
    chance: float

    @cached_property
    def models(self) -> Models:
        """What all of them teach."""
        return Models.of(self.healthy, self.harmed, self.drop, self.chance)

    def unseen_signs(self, folds: tuple[Tensor, Tensor]) -> Tensor:
        """Signs ``[n, 2]`` of the healthy ones, by models that never saw their folds."""
        at, harmed_at = folds
        signs = torch.zeros(len(self.healthy), 2, dtype=torch.float64)
        for i in range(FOLDS):
            rest = harmed_at != i
            models = Models.of(
                self.healthy.take(at != i), self.harmed.take(rest), self.drop[rest], self.chance
            )
            signs[at == i] = models.signs(self.healthy.take(at == i))
        return signs


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
        Read.of(data.to("cpu"), arch, agreed)
        for data in (parts.train, parts.val, damaged.train, damaged.val)
    )
    learned = Learned(train, harmed, damaged.train_drop, chance)
    return fit_read(
        agreed, learned, learned.unseen_signs(_folds(parts.train, damaged)), val, harmed_val,
        predicted.double(), predicted_damaged.double(),
    )  # fmt: skip


def fit_read(
    agreed: Tensor,
    learned: Learned,
    unseen: Tensor,
    val: Read,
    harmed_val: Read,
    predicted: Tensor,
    predicted_damaged: Tensor,
) -> Guard:
    """The same from networks that were read.

    Args:
        agreed: the inputs they were asked.
        learned: from training networks.
        unseen: signs of the healthy ones among these, by models that never saw their runs,
            ``[n, 2]``: more networks than validation has tell better what is usual.
        val: healthy networks that calibrate.
        harmed_val: damaged ones that calibrate.
        predicted: what the predictor says of ``val``.
        predicted_damaged: what it says of ``harmed_val``.
    """
    models = learned.models
    least = radius((predicted - val.accuracy).numpy())
    # Harm brings accuracy down to chance: where that is within reach anyway, nobody is misled.
    floor = learned.chance + 0.75 * min(least, HARM)
    gap = predicted - models.opinion(val.answers)
    guard = replace(
        Guard.blank(tuple(agreed.shape), val.fit.shape[1]),
        agreed=agreed.double(),
        opinion=models.opinion,
        harm=models.harm,
        distance=models.distance,
        usual_gap=Curve.of(predicted, gap),
        gap_spread=_spread(predicted, gap),
        error=Curve.of_size(predicted, predicted - val.accuracy, smallest=SMALLEST),
        floor=_scalar(floor),
        radius=_scalar(least),
    )
    signs = torch.cat([models.signs(val), _gap_by_others(predicted, gap)[:, None]], 1)
    guard = _with_limits(
        guard, signs, predicted > floor, unseen[learned.healthy.accuracy > floor]
    )
    guard = _with_intervals(guard, val, signs, predicted)
    return _with_strange_intervals(guard, val, harmed_val, predicted_damaged)


def _check_enough(what: str, there: Tensor) -> None:
    if int(there.sum()) < FEWEST:
        raise RunError(f"not enough {what}: {int(there.sum())}, {FEWEST} are needed")


def _folds(networks: Dataset, damaged: Damaged) -> tuple[Tensor, Tensor]:
    """For each healthy and each damaged training network its fold; relatives share theirs."""
    runs, own = (d.columns["run"].astype(str).tolist() for d in (networks, damaged.train))
    fold = {run: i % FOLDS for i, run in enumerate(dict.fromkeys(runs))}
    return torch.tensor([fold[run] for run in runs]), torch.tensor([fold.get(r, -1) for r in own])


def _spread(predicted: Tensor, gap: Tensor) -> Curve:
    mean, square = Curve.of(predicted, gap).values, Curve.of(predicted, gap.square()).values
    return Curve(_deviation(mean, square))


def _gap_by_others(predicted: Tensor, gap: Tensor) -> Tensor:
    """`Guard.gap` of the networks that it is fitted on, each judged by all the others."""
    mean, square = (smoothed_by_others(predicted, y) for y in (gap, gap.square()))
    return (gap - mean) / _deviation(mean, square)


def _deviation(mean: Tensor, square: Tensor) -> Tensor:
    """The standard deviation of what has this mean and this mean of squares."""
    return (square - mean.square()).clamp(min=SMALLEST**2).sqrt()


def _with_limits(guard: Guard, signs: Tensor, above: Tensor, unseen: Tensor) -> Guard:
    """The guard with the limits of its signs, which few healthy networks exceed.

    Args:
        guard: without.
        signs: of validation networks, ``[n, SIGNS]``; the last needs the predictor.
        above: which of them may be warned of.
        unseen: signs of training networks that may be warned of, ``[m, 2]``.
    """
    # A gap of networks near chance is not strange either; their answers are.
    gaps = signs[above, 2] if int(above.sum()) >= FEWEST else signs[:, 2]
    each = [*torch.cat([signs[above, :2], unseen]).unbind(-1), gaps]
    centre = torch.stack([x.quantile(0.5) for x in each])
    alarms = (HARM_ALARM, FIT_ALARM, GAP_ALARM)
    limits = torch.stack([_at_rank(x, 1 - a) for x, a in zip(each, alarms, strict=True)])
    width = (limits - centre).clamp(min=1e-6)
    # What few networks do not exceed, others may: validation is small, and the predictor saw it.
    width[2] *= 1 + 1 / math.sqrt(len(gaps))
    return replace(guard, centre=centre, width=width)


def _with_intervals(guard: Guard, healthy: Read, signs: Tensor, predicted: Tensor) -> Guard:
    """The guard with the reach of intervals of networks that it does not warn of."""
    said, first = guard.opinion(healthy.answers), guard.scaled(signs).amax(-1)
    beyond = torch.maximum(
        torch.minimum(predicted, said) - healthy.accuracy,
        healthy.accuracy - torch.maximum(predicted, said),
    )
    error = smoothed_by_others(predicted, (predicted - healthy.accuracy).square())
    expected = error.sqrt().clamp(min=SMALLEST) * widening(first)
    quiet = (first <= 1) | (predicted <= guard.floor)
    ratio = (beyond / expected)[quiet].clamp(min=0)
    return replace(guard, reach=_scalar(SLACK * _highest(ratio.numpy(), HEALTHY_LEVEL)))


def _with_strange_intervals(
    guard: Guard, healthy: Read, harmed: Read, predicted_harmed: Tensor
) -> Guard:
    """The guard with intervals of networks whose number is the opinion's."""
    said, said_harmed = guard.opinion(healthy.answers), guard.opinion(harmed.answers)
    wrong, wrong_harmed = said - healthy.accuracy, said_harmed - harmed.accuracy
    error = Curve.of_size(
        torch.cat([said, said_harmed]),
        torch.cat([wrong, wrong_harmed]),
        _even(len(healthy), len(harmed)),
        smallest=SMALLEST,
    )
    judged = guard.judge_read(harmed.answers, harmed.fit, predicted_harmed)
    warned = judged.strangeness > 1
    counted = warned if int(warned.sum()) >= FEWEST else torch.ones_like(warned)
    ratio = (wrong_harmed.abs() / error(said_harmed))[counted]
    return replace(
        guard, opinion_error=error, strange_reach=_scalar(_highest(ratio.numpy(), LEVEL))
    )


def _even(healthy: int, harmed: int) -> Tensor:
    """Weights of so many of each, with which both count the same in all."""
    both = [torch.ones(healthy), torch.full((harmed,), healthy / harmed)]
    return torch.cat(both).double()


def _highest(sizes: np.ndarray, level: float) -> float:
    """The size that a new one stays below with probability ``level``, or the highest possible."""
    return rank_quantile(sizes, min(level, len(sizes) / (len(sizes) + 1)))


def _at_rank(values: Tensor, level: float) -> Tensor:
    """The value that a new one exceeds with probability ``1 - level`` at most, or the highest."""
    rank = math.ceil(level * (len(values) + 1))
    return values.sort().values[min(rank, len(values)) - 1]


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
