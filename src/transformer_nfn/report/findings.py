"""Errors of the predictors by optimiser and accuracy, worst networks, and calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from transformer_nfn.paper.gather import Run
from transformer_nfn.prediction.metrics import r_squared
from transformer_nfn.report.held_out import MILLION, HeldOut, SeedPart, TestedModel

Z = 1.96
"""Standard errors of a 95 % interval."""
ALWAYS_THE_MEAN = "Always the mean"
OPTIMIZERS = ("sgd", "sgdm", "adam", "rmsprop")


@dataclass(frozen=True)
class Group:
    """Networks that share a property: its value, a mask, and their number."""

    label: str
    member: np.ndarray
    count: int


@dataclass(frozen=True)
class Grouping:
    """The test networks grouped by a property."""

    title: str
    groups: list[Group]


@dataclass(frozen=True)
class GroupTable:
    """One number by a property of the networks.

    Attributes:
        grouping: by that property.
        rows: for each model the value in each group, None where there is no network.
    """

    grouping: Grouping
    rows: list[tuple[str, list[float | None]]]


@dataclass(frozen=True)
class WorstNetwork:
    """A network with a large error; predictions are means over the seeds."""

    place: str | None
    run: Any
    configuration: dict[str, Any]
    accuracy: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted less true."""
        return self.predicted - self.accuracy

    @property
    def outside(self) -> bool:
        """Whether the interval misses the true accuracy."""
        return self.accuracy < self.low or self.accuracy > self.high


@dataclass(frozen=True)
class Baseline:
    """Baseline without weights: one accuracy predicted for every test network.

    Attributes:
        predicted: that accuracy, a mean.
        networks: number of networks in the mean.
        r2: R² of this prediction.
        mae: mean absolute error of this prediction.
    """

    predicted: float
    networks: int
    r2: float | None
    mae: float


@dataclass(frozen=True)
class Calibration:
    """Coverage of a model's intervals on test networks, over all its seeds.

    Attributes:
        inside: share of the networks in their interval.
        below: share whose accuracy is below it.
        above: share whose accuracy is above it.
        width: mean width.
        networks: number of different networks.
    """

    inside: float
    below: float
    above: float
    width: float
    networks: int

    @property
    def sampled(self) -> tuple[float, float]:
        """95 % interval (Wilson) of the share of networks like these that are inside.

        Seeds add no networks: what they predict for one network is nearly the same.
        """
        n, share = self.networks, self.inside
        middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
        return middle - half, middle + half

    def falls_short(self, level: float | None) -> bool:
        """Whether the intervals hold for significantly less than they aim at."""
        return level is not None and self.sampled[1] < level


def groupings(tested: HeldOut) -> list[Grouping]:
    """By optimiser, and by true accuracy."""
    found = (_by_optimizer(tested), _by_accuracy(tested))
    return [grouping for grouping in found if grouping is not None]


def error_table(tested: HeldOut, grouping: Grouping) -> GroupTable:
    """Mean absolute error of each model, and of predicting the mean."""
    accuracy = tested.networks.accuracy
    table = _table(tested, grouping, lambda part: np.abs(part.predicted - accuracy[part.network]))
    if tested.always is not None:
        off = np.abs(accuracy - tested.always[0])
        row = [_mean(off[group.member & tested.is_test]) for group in grouping.groups]
        table.rows.append((ALWAYS_THE_MEAN, row))
    return table


def inside_table(tested: HeldOut, grouping: Grouping) -> GroupTable:
    """The share of test networks inside their interval, for models that give intervals."""
    accuracy = tested.networks.accuracy
    table = _table(tested, grouping, lambda part: _inside(part, accuracy))
    rows = [(name, row) for name, row in table.rows if any(value is not None for value in row)]
    return GroupTable(grouping, rows)


def worst_networks(
    tested: HeldOut, model: TestedModel, count: int | None = 8
) -> list[WorstNetwork]:
    """The networks furthest from their prediction, averaged over the seeds that tested them."""
    networks, part = tested.networks, model.mean
    accuracy = networks.accuracy[part.network]
    order = np.argsort(-np.abs(part.predicted - accuracy), kind="stable")[:count]
    return [
        WorstNetwork(
            place=networks.place[part.network[i]],
            run=networks.run[part.network[i]],
            configuration={
                name: networks.configuration[name][part.network[i]] for name in networks.settings
            },
            accuracy=float(accuracy[i]),
            predicted=float(part.predicted[i]),
            low=float(part.low[i]),
            high=float(part.high[i]),
        )
        for i in order
    ]


def baseline(tested: HeldOut) -> Baseline | None:
    """The mean accuracy of networks outside the test parts, predicted for every test network."""
    accuracy = tested.networks.accuracy[tested.is_test]
    if tested.always is None or not len(accuracy):
        return None
    mean, networks = tested.always
    predicted = np.full_like(accuracy, mean)
    mae = float(np.abs(accuracy - mean).mean())
    return Baseline(mean, networks, r_squared(accuracy, predicted), mae)


def calibration(tested: HeldOut, run: Run) -> Calibration | None:
    """Calibration over all seeds and test networks that have an interval."""
    model = tested.of(run)
    if model is None:
        return None
    part, accuracy = model.rows, tested.networks.accuracy
    held, truth = _inside(part, accuracy), accuracy[part.network]
    known = np.isfinite(held)
    if not known.any():
        return None
    return Calibration(
        inside=float(held[known].mean()),
        below=float((truth < part.low)[known].mean()),
        above=float((truth > part.high)[known].mean()),
        width=float((part.high - part.low)[known].mean()),
        networks=len(np.unique(part.network[known])),
    )


def _by_optimizer(tested: HeldOut) -> Grouping | None:
    column = np.array([str(name) for name in tested.networks.configuration["optimizer"]])
    names = {*column[tested.is_test].tolist()} - {"None"}
    order = [name for name in OPTIMIZERS if name in names]
    order += sorted(names - set(order))
    if not order:
        return None
    return Grouping("optimiser", [_group(tested, name, column == name) for name in order])


def _by_accuracy(tested: HeldOut) -> Grouping | None:
    """Five bands; bounds are integer percents, so that the labels are exact."""
    values, tests = tested.networks.millionths, tested.networks.millionths[tested.is_test]
    if not len(tests):
        return None
    low, high = int(tests.min()), int(tests.max())
    percent = MILLION // 100
    if high - low > MILLION // 2:
        edges = [20 * i for i in range(6)]
    else:
        first = low // percent
        step = max(1, -(-(high - first * percent) // (5 * percent)))
        first = max(0, min(first, 100 - 5 * step))
        edges = [first + step * i for i in range(6)]
    groups = []
    for a, b in pairwise(edges):
        inside = (values >= a * percent) & (values < b * percent)
        if b == edges[-1]:
            inside |= values >= b * percent
        groups.append(_group(tested, f"{a}–{b} %", inside))
    return Grouping("true accuracy", groups)


def _group(tested: HeldOut, label: str, member: np.ndarray) -> Group:
    return Group(label, member, int((member & tested.is_test).sum()))


def _inside(part: SeedPart, accuracy: np.ndarray) -> np.ndarray:
    """1 inside, 0 outside, NaN without an interval."""
    truth = accuracy[part.network]
    held = (part.low <= truth) & (truth <= part.high)
    known = np.isfinite(part.low) & np.isfinite(part.high)
    return np.where(known, held.astype(float), np.nan)


def _table(
    tested: HeldOut, grouping: Grouping, measure: Callable[[SeedPart], np.ndarray]
) -> GroupTable:
    """Means over all seeds; a group counts the distinct networks in any test part."""
    rows = []
    for model in tested.models:
        values, places = measure(model.rows), model.rows.network
        row = [_mean(values[group.member[places]]) for group in grouping.groups]
        rows.append((model.run.name, row))
    return GroupTable(grouping, rows)


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None
