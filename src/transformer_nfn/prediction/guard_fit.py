"""How a guard is made: what it learns from training networks, and what validation calibrates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Parts
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.guard_curves import Curve, smoothed_by_others
from transformer_nfn.prediction.guard_learn import (
    FEWEST,
    HARM,
    Harmed,
    Learned,
    Read,
    even_weights,
    folds_of_runs,
)
from transformer_nfn.prediction.guard_reach import (
    SLACK_DOWN,
    dead_limit,
    highest,
    near_chance,
    reach_below,
)
from transformer_nfn.prediction.intervals import LEVEL, radius
from transformer_nfn.prediction.probe_search import STEPS
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import agreed_inputs
from transformer_nfn.zoo import NetworkSizes

HARM_ALARM, FIT_ALARM, GAP_ALARM = 0.01, 0.005, 0.03
"""Of healthy networks, the share that each sign of strangeness may take for strange."""
HEALTHY_LEVEL = 0.99
"""Of healthy networks without a warning, the share that intervals hold for."""
SLACK = 1.25
"""Intervals reach so much farther: validation is small, and the predictor saw it."""
WIDEN = 1.0
"""See `Guard.widen`: near the limit of strangeness are more broken networks than healthy ones."""
SMALLEST = 0.01
"""Of an expected error."""


@dataclass(frozen=True)
class Calibration:
    """Validation networks.

    Attributes:
        healthy: as they were trained.
        predicted: what the predictor says of them.
        harmed: damaged ones.
    """

    healthy: Read
    predicted: Tensor
    harmed: Harmed


def fit_guard(
    parts: Parts,
    damaged: Damaged,
    arch: NetworkSizes,
    predicted: Tensor,
    predicted_damaged: tuple[Tensor, Tensor],
    *,
    steps: int = STEPS,
) -> Guard:
    """Learns from training networks, healthy and damaged, and calibrates on validation ones.

    Args:
        parts: healthy networks; inputs are searched for on their device.
        damaged: their relatives.
        arch: the sizes of all of them.
        predicted: what the predictor says of ``parts.val``.
        predicted_damaged: what it says of ``damaged.train`` and of ``damaged.val``.
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
    folds = folds_of_runs(parts.train, damaged.train)
    on_train, on_val = (said.double() for said in predicted_damaged)
    return fit_read(
        agreed,
        Learned(train, harmed, damaged.train_drop, chance, folds),
        Harmed(harmed, damaged.train_kinds, on_train),
        Calibration(val, predicted.double(), Harmed(harmed_val, damaged.val_kinds, on_val)),
    )


def fit_read(
    agreed: Tensor, learned: Learned, learned_harmed: Harmed, calibration: Calibration
) -> Guard:
    """The same from networks that were read.

    Args:
        agreed: the inputs they were asked.
        learned: from training networks.
        learned_harmed: the damaged ones among these.
        calibration: networks to calibrate on.
    """
    guard, healthy_need = _fitted(agreed, learned, calibration)
    short = _unseen_shortfalls(agreed, learned, learned_harmed, calibration)
    guard = replace(
        guard,
        reach_below=_scalar(SLACK_DOWN * reach_below(short, healthy_need)),
        near_chance=_scalar(
            near_chance(guard, learned.chance, learned_harmed, calibration.harmed)
        ),
    )
    return _with_strange_reach(guard, calibration.harmed)


def _unseen_shortfalls(
    agreed: Tensor, learned: Learned, learned_harmed: Harmed, calibration: Calibration
) -> Tensor | None:
    """What `reach_below` takes: each kind is judged by a guard that learned from all the others."""
    short = []
    for kind in dict.fromkeys(learned_harmed.kinds.tolist()):
        own, own_val = learned_harmed.of_kind(kind), calibration.harmed.of_kind(kind)
        others = learned.of_some(~own)
        if int((others.drop > HARM).sum()) < FEWEST:
            return None
        rest = replace(calibration, harmed=calibration.harmed.take(~own_val))
        stranger, _ = _fitted(agreed, others, rest)
        for harmed in (learned_harmed.take(own), calibration.harmed.take(own_val)):
            short.append(_unnoticed_shortfall(stranger, harmed))
    return torch.cat(short)


def _unnoticed_shortfall(guard: Guard, harmed: Harmed) -> Tensor:
    """How far networks that may be warned of, and are not, lie below both opinions."""
    answers, predicted = harmed.read.answers, harmed.predicted
    said = guard.opinion(answers)
    scaled = guard.scaled(guard.signs(answers, harmed.read.fit, predicted, said))
    believed = guard.believed(predicted, said)
    short = torch.minimum(believed, said) - harmed.read.accuracy
    unnoticed = (guard.strangeness(scaled, predicted, believed) <= 1) & (believed > guard.floor)
    return (short / guard.unsure(said, scaled.amax(-1)))[unnoticed]


def _fitted(agreed: Tensor, learned: Learned, calibration: Calibration) -> tuple[Guard, float]:
    """A guard but for how far down it reaches, and how far healthy networks need it to."""
    val, predicted = calibration.healthy, calibration.predicted
    models = learned.models
    least = radius((predicted - val.accuracy).numpy())
    # Harm brings accuracy down to chance: where that is within reach anyway, nobody is misled.
    floor = learned.chance + 0.75 * min(least, HARM)
    said = models.opinion(val.answers)
    gap, harmed = predicted - said, calibration.harmed.read
    every_said = torch.cat([said, models.opinion(harmed.answers)])
    every_accuracy = torch.cat([val.accuracy, harmed.accuracy])
    guard = replace(
        Guard.blank(tuple(agreed.shape), val.fit.shape[1]),
        agreed=agreed.double(),
        opinion=models.opinion,
        harm=models.harm,
        distance=models.distance,
        usual_gap=Curve.of(predicted, gap),
        gap_spread=_spread(predicted, gap),
        floor=_scalar(floor),
        radius=_scalar(least),
        widen=_scalar(WIDEN),
        dead=_scalar(dead_limit(learned.chance, every_said, every_accuracy)),
        opinion_error=Curve.of_size(
            every_said,
            every_said - every_accuracy,
            even_weights(len(val), len(harmed)),
            smallest=SMALLEST,
        ),
    )
    believed = guard.believed(predicted, said)
    error = Curve.of_size(believed, believed - val.accuracy, smallest=SMALLEST)
    guard = replace(guard, error=error)
    signs = torch.cat([models.signs(val), _gap_by_others(predicted, gap)[:, None]], 1)
    unseen = learned.unseen_signs()[learned.healthy.accuracy > floor]
    guard = _with_limits(guard, signs, (believed > floor, predicted > floor), unseen)
    up, down = _healthy_reaches(guard, val, signs, predicted)
    return replace(guard, reach=_scalar(SLACK * up)), down


def _check_enough(what: str, there: Tensor) -> None:
    if int(there.sum()) < FEWEST:
        raise RunError(f"not enough {what}: {int(there.sum())}, {FEWEST} are needed")


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


def _with_limits(
    guard: Guard, signs: Tensor, above: tuple[Tensor, Tensor], unseen: Tensor
) -> Guard:
    """The guard with the limits of its signs, which few healthy networks exceed.

    Args:
        guard: without.
        signs: of validation networks, ``[n, SIGNS]``; the last needs the predictor.
        above: which of them may be warned of, by any sign and by their gap.
        unseen: signs of training networks that may be warned of, ``[m, 2]``.
    """
    # A gap of networks near chance is not strange either; their answers are.
    alive, open_to_gap = above
    gaps = signs[open_to_gap, 2] if int(open_to_gap.sum()) >= FEWEST else signs[:, 2]
    each = [*torch.cat([signs[alive, :2], unseen]).unbind(-1), gaps]
    centre = torch.stack([x.quantile(0.5) for x in each])
    alarms = (HARM_ALARM, FIT_ALARM, GAP_ALARM)
    limits = torch.stack([_at_rank(x, 1 - a) for x, a in zip(each, alarms, strict=True)])
    width = (limits - centre).clamp(min=1e-6)
    # What few networks do not exceed, others may: validation is small, and the predictor saw it.
    width[2] *= 1 + 1 / math.sqrt(len(gaps))
    return replace(guard, centre=centre, width=width)


def _healthy_reaches(
    guard: Guard, healthy: Read, signs: Tensor, predicted: Tensor
) -> tuple[float, float]:
    """How far healthy networks without a warning lie beyond both opinions, and how far below.

    In units of the errors to be expected, of the predictor and of the opinion.
    """
    said, scaled = guard.opinion(healthy.answers), guard.scaled(signs)
    believed, first = guard.believed(predicted, said), scaled.amax(-1)
    below = torch.minimum(believed, said) - healthy.accuracy
    beyond = torch.maximum(below, healthy.accuracy - torch.maximum(believed, said))
    error = smoothed_by_others(believed, (believed - healthy.accuracy).square())
    expected = error.sqrt().clamp(min=SMALLEST) * guard.widening(first)
    quiet = guard.strangeness(scaled, predicted, believed) <= 1
    needs = (beyond / expected, below / guard.unsure(said, first))
    up, down = (highest(x[quiet].clamp(min=0).numpy(), HEALTHY_LEVEL) for x in needs)
    return up, down


def _with_strange_reach(guard: Guard, damaged: Harmed) -> Guard:
    """The guard with intervals of networks whose number is the opinion's."""
    read = damaged.read
    said = guard.opinion(read.answers)
    judged = guard.judge_read(read.answers, read.fit, damaged.predicted)
    warned = judged.strangeness > 1
    counted = warned if int(warned.sum()) >= FEWEST else torch.ones_like(warned)
    ratio = ((said - read.accuracy).abs() / guard.opinion_error(said))[counted]
    return replace(guard, strange_reach=_scalar(highest(ratio.numpy(), LEVEL)))


def _at_rank(values: Tensor, level: float) -> Tensor:
    """The value that a new one exceeds with probability ``1 - level`` at most, or the highest."""
    rank = math.ceil(level * (len(values) + 1))
    return values.sort().values[min(rank, len(values)) - 1]


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
