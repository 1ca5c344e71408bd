"""Predictions of the compared runs for held-out networks, and the zoos these come from.

Values are rounded once. Tables, sentences and figures of the report are computed from them: errors
by optimiser and accuracy, worst networks, and coverage of intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from transformer_nfn.paper.gather import Columns, Run, ZooStudy
from transformer_nfn.prediction.runs import CONFIGURATION, RunError
from transformer_nfn.zoo import Zoo

DIGITS = 6
MILLION = 10**DIGITS
Z = 1.96
"""Standard errors of a 95 % interval."""
ALWAYS_THE_MEAN = "Always the mean"
OPTIMIZERS = ("sgd", "sgdm", "adam", "rmsprop")
Key = tuple[Any, float]
"""What identifies a network: its training run, or its row in a zoo of checkpoints, and accuracy."""


@dataclass
class Networks:
    """Held-out networks, each once, by its key.

    Rows of zoos of checkpoints never change, and checkpoints of a run may be equally accurate; a
    built zoo may be packed again, with other rows.

    Attributes:
        by_row: whether rows are part of the key in place of training runs.
        index: of each key.
        place: what its name has after that of the zoo, ``#row`` or, of a mixed zoo, ``/size#row``;
            None where runs number the rows differently, as after a zoo was packed again.
        run: training run in the zoo.
        configuration: training settings, one column each.
        validation: indices of those in a validation part.
    """

    by_row: bool
    index: dict[Key, int] = field(default_factory=dict)
    place: list[str | None] = field(default_factory=list)
    run: list[Any] = field(default_factory=list)
    configuration: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in CONFIGURATION}
    )
    validation: set[int] = field(default_factory=set)

    @property
    def accuracy(self) -> np.ndarray:
        """Measured accuracy of each."""
        return np.array([accuracy for _, accuracy in self.index], dtype=float)

    def add(self, part: Columns) -> np.ndarray:
        """Add networks of some rows of predictions that are not there yet; the indices of all."""
        rows = part["row"].astype(int).tolist()
        kinds = part["kind"].tolist() if "kind" in part else [None] * len(rows)
        runs = part["run"].tolist() if "run" in part else [None] * len(rows)
        accuracy = _identical(part["accuracy"])
        out = np.zeros(len(rows), dtype=int)
        for i, (row, kind, run) in enumerate(zip(rows, kinds, runs, strict=True)):
            place = f"#{row}" if kind is None else f"/{kind}#{row}"
            key = (place if run is None or self.by_row else str(run), accuracy[i])
            index = self.index.setdefault(key, len(self.index))
            if index == len(self.place):
                self.place.append(place)
                self.run.append(run)
                for name, column in self.configuration.items():
                    column.append(plain(part[name][i]))
            elif self.place[index] != place:
                self.place[index] = None
            out[i] = index
        return out

    @property
    def settings(self) -> list[str]:
        """Names of the training settings that are known of any network."""
        return [name for name, column in self.configuration.items() if {*column} - {None}]

    @property
    def millionths(self) -> np.ndarray:
        """Accuracies as integers, so that a bound of a band belongs to one band."""
        return np.asarray(np.rint(self.accuracy * MILLION), dtype=np.int64)


@dataclass(frozen=True)
class Tested:
    """The test predictions of one run, of all its seeds; ``network`` are indices of `Networks`."""

    run: Run
    seeds: list[int]
    network: np.ndarray
    predicted: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @cached_property
    def mean(self) -> Tested:
        """Mean over the seeds that tested each network."""
        network, which = np.unique(self.network, return_inverse=True)
        times = np.bincount(which)
        columns = (np.bincount(which, each) for each in (self.predicted, self.low, self.high))
        return Tested(self.run, self.seeds, network, *(each / times for each in columns))

    @property
    def bounded(self) -> np.ndarray:
        """Mask of the predictions that have an interval."""
        return np.asarray(np.isfinite(self.low) & np.isfinite(self.high))

    def inside(self, accuracy: np.ndarray) -> np.ndarray:
        """Mask of the predictions whose interval holds the accuracy of their network."""
        truth = accuracy[self.network]
        return np.asarray((self.low <= truth) & (truth <= self.high))


@dataclass(frozen=True)
class Coverage:
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


Rows = list[tuple[str, list[float | None]]]
"""Names of models, each with its value in every group of networks, None where there is none."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out networks of a zoo, and the predictions of each compared model.

    Attributes:
        index: of the zoo on the page.
        zoo: its runs.
        networks: in validation and test parts.
        models: best first.
        reference: name of the zoo for ``tnfn predict``, before the ``#``.
        everything: accuracies of all networks that could be chosen, where the zoo was named.
    """

    index: int
    zoo: ZooStudy
    networks: Networks
    models: list[Tested]
    reference: str
    everything: np.ndarray | None = None

    @property
    def key(self) -> str:
        """What the keys of the zoo's numbers begin with."""
        return f"z{self.index}"

    @cached_property
    def is_test(self) -> np.ndarray:
        """Mask of the networks in any test part."""
        mask = np.zeros(len(self.networks.accuracy), dtype=bool)
        for model in self.models:
            mask[model.network] = True
        return mask

    @cached_property
    def always(self) -> tuple[float, int] | None:
        """Mean accuracy of the networks outside the test parts, and their number.

        Of the validation part alone where the training networks are not available. It is predicted
        for every test network, as a baseline without weights.
        """
        accuracy = self.networks.accuracy
        if self.everything is None:
            known = accuracy[sorted(self.networks.validation)]
            total, count = float(known.sum()), len(known)
        else:
            total = float(self.everything.sum()) - float(accuracy[self.is_test].sum())
            count = len(self.everything) - int(self.is_test.sum())
        return (total / count, count) if count > 0 else None

    @cached_property
    def groupings(self) -> dict[str, dict[str, np.ndarray]]:
        """Masks of the test networks: by optimiser, where it is known, and by true accuracy."""
        found = {"optimiser": self._by_optimizer(), "true accuracy": self._by_accuracy()}
        return {title: groups for title, groups in found.items() if groups}

    def _by_optimizer(self) -> dict[str, np.ndarray]:
        column = np.array([str(name) for name in self.networks.configuration["optimizer"]])
        names = {*column[self.is_test].tolist()} - {"None"}
        order = [*(name for name in OPTIMIZERS if name in names), *sorted(names - {*OPTIMIZERS})]
        return {name: (column == name) & self.is_test for name in order}

    def _by_accuracy(self) -> dict[str, np.ndarray]:
        """Five bands; bounds are integer percents, so that the labels are exact."""
        values = self.networks.millionths
        if not self.is_test.any():
            return {}
        low, high = int(values[self.is_test].min()), int(values[self.is_test].max())
        first, step, percent = 0, 20, MILLION // 100
        if high - low <= MILLION // 2:
            first = low // percent
            step = max(1, -(-(high - first * percent) // (5 * percent)))
            first = max(0, min(first, 100 - 5 * step))
        band = np.clip((values // percent - first) // step, None, 4)
        return {
            f"{first + step * i}–{first + step * (i + 1)} %": (band == i) & self.is_test
            for i in range(5)
        }

    def errors(self, groups: Mapping[str, np.ndarray]) -> Rows:
        """Mean absolute error of each model in groups of networks, and of predicting the mean."""
        accuracy = self.networks.accuracy
        off = [(model.run.name, np.abs(model.predicted - accuracy[model.network]), model.network)
               for model in self.models]  # fmt: skip
        if self.always is not None:
            every = np.arange(len(accuracy))
            off.append((ALWAYS_THE_MEAN, np.abs(accuracy - self.always[0]), every))
        return [(name, _means(values, networks, groups)) for name, values, networks in off]

    def coverages(self, groups: Mapping[str, np.ndarray]) -> Rows:
        """The share inside their interval in groups of networks, of models that give intervals."""
        rows = []
        for model in self.models:
            known = model.bounded
            inside = model.inside(self.networks.accuracy)[known].astype(float)
            rows.append((model.run.name, _means(inside, model.network[known], groups)))
        return [(name, row) for name, row in rows if any(value is not None for value in row)]

    def coverage(self, run: Run) -> Coverage | None:
        """Coverage over all seeds and test networks that have an interval."""
        model = self.of(run)
        if model is None or not (known := model.bounded).any():
            return None
        truth, low, high = (
            each[known] for each in (self.networks.accuracy[model.network], model.low, model.high)
        )
        shares = (model.inside(self.networks.accuracy)[known], truth < low, truth > high)
        inside, below, above = (float(share.mean()) for share in shares)
        networks = len(np.unique(model.network[known]))
        return Coverage(inside, below, above, float((high - low).mean()), networks)

    def worst(self, model: Tested, count: int = 8) -> list[int]:
        """Places in the mean prediction with the largest errors."""
        off = np.abs(model.mean.predicted - self.networks.accuracy[model.mean.network])
        worst: list[int] = np.argsort(-off, kind="stable")[:count].tolist()
        return worst

    def within(self, text: str, opened: Zoo) -> HeldOut | None:
        """The same with the rows and all accuracies of a zoo; None if it is not that of the runs.

        It is if it holds every held-out network of the runs: from the same training run, with the
        same accuracy.
        """
        run, keys = self.zoo.best, self.networks.index
        if run is None or not keys or run.own is not opened.named:
            return None
        chosen = list(_networks_of(opened, run))
        places, everything = dict(chosen), np.array([accuracy for (_, accuracy), _ in chosen])
        if not places.keys() >= {*keys}:
            return None
        networks = replace(self.networks, place=[places[key] for key in keys])
        return replace(self, networks=networks, reference=text, everything=everything)

    def of(self, run: Run) -> Tested | None:
        """Predictions of a run, None where it kept none."""
        return next((model for model in self.models if model.run is run), None)


def held_out(index: int, zoo: ZooStudy) -> HeldOut:
    """Read the predictions of the compared runs, best first."""
    about = zoo.example.record.zoo
    reference = str(about.get("name") or about.get("task") or "ZOO")
    networks = Networks(by_row=any(run.own for run in zoo.runs))
    models = []
    for run in zoo.finished:
        networks.validation.update(networks.add(run.part("val")).tolist())
        tested = run.part("test")
        if not len(tested["row"]):
            continue
        columns = (_rounded(tested[name]) for name in ("predicted", "low", "high"))
        seeds = list(dict.fromkeys(map(int, tested["seed"])))
        models.append(Tested(run, seeds, networks.add(tested), *columns))
    return HeldOut(index, zoo, networks, models, reference)


def _means(
    values: np.ndarray, networks: np.ndarray, groups: Mapping[str, np.ndarray]
) -> list[float | None]:
    """Mean of the values in each group; ``networks`` are those that the values are about."""
    parts = (values[member[networks]] for member in groups.values())
    return [float(part.mean()) if len(part) else None for part in parts]


def _rounded(values: np.ndarray) -> np.ndarray:
    """Rounded; NaN where there is no finite number."""
    return np.where(np.isfinite(values), np.round(values, DIGITS), np.nan)


def _identical(accuracy: np.ndarray) -> list[float]:
    """Accuracies rounded, equal for a zoo and for predictions, which went through float32."""
    rounded: list[float] = np.round(accuracy.astype(np.float32).astype(float), DIGITS).tolist()
    return rounded


def plain(value: Any) -> Any:
    """A value of a configuration as JSON has it; None where an imported zoo does not know it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value == "" or (isinstance(value, float) and not np.isfinite(value)):
        return None
    return value if value is None or isinstance(value, int | float | str) else str(value)


def within_zoos(parts: Sequence[HeldOut], texts: Iterable[str]) -> list[HeldOut]:
    """The same with all networks of the zoos that were named; each must be that of some runs."""
    parts = list(parts)
    for text in texts:
        opened = Zoo.open(text)
        found = [part.within(text, opened) for part in parts]
        if not any(found):
            raise RunError(
                f"'{text}' is not the zoo of these runs: expected the networks that they were "
                "tested on, by training and accuracy, found others"
            )
        parts = [new or old for new, old in zip(found, parts, strict=True)]
    return parts


def _networks_of(opened: Zoo, run: Run) -> Iterator[tuple[Key, str]]:
    """Key and place of every network of a zoo that the run could choose."""
    column, chosen = run.target.column, run.record.selection
    if opened.named:
        values = opened.targets.get(column, np.array([]))
        if values.dtype.kind == "f":
            for row, accuracy in enumerate(_identical(values)):
                yield (f"#{row}", accuracy), f"#{row}"
        return
    for kind, zoo in opened.parts.items():
        if kind in chosen.get("left_out", ()):
            continue
        rows = zoo.select(percent=run.percent, min_accuracy=chosen.get("min_accuracy") or None)
        inside = f"{kind}/" if kind else ""
        accuracies = _identical(zoo.table[column][rows])
        for row, accuracy in zip(rows.tolist(), accuracies, strict=True):
            if np.isfinite(accuracy):
                key = (f"{inside}{zoo.table['run'][row]}", accuracy)
                yield key, f"/{kind}#{row}" if kind else f"#{row}"
