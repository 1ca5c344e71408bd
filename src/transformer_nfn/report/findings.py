"""Where does a predictor fail: on which networks, by which optimiser, at which accuracy?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from transformer_nfn.paper.gather import Columns, Run, ZooStudy
from transformer_nfn.prediction.records import CONFIGURATION

_OPTIMIZERS = ("sgd", "sgdm", "adam", "rmsprop")


@dataclass(frozen=True)
class ErrorTable:
    """Mean absolute errors by a property of the networks.

    Attributes:
        title: the property.
        groups: its values in words, with the number of networks.
        rows: for each model the error in each group, None where there is no network.
    """

    title: str
    groups: list[tuple[str, int]]
    rows: list[tuple[str, list[float | None]]]

    def worst(self, name: str, least: int = 5) -> tuple[str, float] | None:
        """The group where a model errs most, of those with a few networks."""
        errors = dict(self.rows)[name]
        known = [
            (error, group)
            for error, (group, count) in zip(errors, self.groups, strict=True)
            if error is not None and count >= least
        ]
        if len(known) < 2:
            return None
        error, group = max(known)
        return group, error


@dataclass(frozen=True)
class WorstNetwork:
    """A network whose accuracy was predicted badly; predictions are means over the seeds."""

    row: int
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


def errors_by_optimizer(zoo: ZooStudy) -> ErrorTable | None:
    """Mean absolute error of each model by the optimiser of the network."""
    parts = _tested(zoo)
    names = {str(name) for _, part in parts for name in part["optimizer"] if name is not None}
    order = [name for name in _OPTIMIZERS if name in names]
    order += sorted(names - set(order))
    if not order:
        return None
    masks = [[part["optimizer"].astype(str) == name for name in order] for _, part in parts]
    return _table("optimiser", order, parts, masks)


def errors_by_accuracy(zoo: ZooStudy) -> ErrorTable | None:
    """Mean absolute error of each model by the true accuracy, in five bins."""
    parts = [(run, part) for run, part in _tested(zoo) if len(part["accuracy"])]
    if not parts:
        return None
    values = np.concatenate([part["accuracy"] for _, part in parts])
    low, high = float(values.min()), float(values.max())
    if high - low > 0.5:
        edges = np.linspace(0.0, 1.0, 6)
    else:
        # Whole percents, so that the labels say exactly what was counted.
        step = max(0.01, np.ceil(20 * (high - low)) / 100)
        edges = np.floor(100 * low) / 100 + step * np.arange(6)
    labels = [f"{100 * a:.0f}–{100 * b:.0f} %" for a, b in pairwise(edges)]
    last = len(labels) - 1
    masks = [
        [
            (part["accuracy"] >= edges[i]) & ((part["accuracy"] < edges[i + 1]) | (i == last))
            for i in range(len(labels))
        ]
        for _, part in parts
    ]
    return _table("true accuracy", labels, parts, masks)


def worst_networks(run: Run, count: int = 8) -> list[WorstNetwork]:
    """The networks furthest from their prediction, averaged over the seeds that tested them."""
    part = run.tested
    if part is None or not len(part["row"]):
        return []
    rows, first, which = np.unique(part["row"], return_index=True, return_inverse=True)
    times = np.bincount(which)

    def mean(name: str) -> np.ndarray:
        return np.bincount(which, part[name]) / times

    accuracy, predicted, low, high = (
        mean(name) for name in ("accuracy", "predicted", "low", "high")
    )
    order = np.argsort(-np.abs(predicted - accuracy), kind="stable")[:count]
    return [
        WorstNetwork(
            row=int(rows[i]),
            run=part["run"][first[i]] if "run" in part else int(rows[i]),
            configuration={name: part[name][first[i]] for name in CONFIGURATION},
            accuracy=float(accuracy[i]),
            predicted=float(predicted[i]),
            low=float(low[i]),
            high=float(high[i]),
        )
        for i in order
    ]


def _tested(zoo: ZooStudy) -> list[tuple[Run, Columns]]:
    return [(run, run.tested) for run in zoo.finished if run.tested is not None]


def _table(
    title: str,
    labels: list[str],
    parts: list[tuple[Run, Columns]],
    masks: list[list[np.ndarray]],
) -> ErrorTable:
    """Errors over all seeds; a group counts the different networks in any test part."""
    networks: list[set[int]] = [set() for _ in labels]
    rows = []
    for (run, part), chosen in zip(parts, masks, strict=True):
        error = np.abs(part["predicted"] - part["accuracy"])
        rows.append((run.name, [float(error[m].mean()) if m.any() else None for m in chosen]))
        for group, mask in zip(networks, chosen, strict=True):
            group.update(part["row"][mask].tolist())
    groups = [(label, len(group)) for label, group in zip(labels, networks, strict=True)]
    return ErrorTable(title, groups, rows)
