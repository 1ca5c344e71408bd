"""Predictions of the compared runs for held-out networks, and the zoos these come from.

Values are rounded once. Tables, sentences and figures of the report are computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from transformer_nfn.io.assets import resolve
from transformer_nfn.paper.gather import Columns, Run, ZooStudy
from transformer_nfn.prediction.runs import CONFIGURATION, RunError
from transformer_nfn.zoo import MixedZoo, ModelZoo, Zoo, open_zoo

DIGITS = 6
MILLION = 10**DIGITS
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
class SeedPart:
    """Predictions of one seed for its test networks; ``network`` are indices into `Networks`."""

    seed: int
    network: np.ndarray
    predicted: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class TestedModel:
    """The test predictions of one run, seed by seed."""

    run: Run
    seeds: list[SeedPart]

    @cached_property
    def rows(self) -> SeedPart:
        """All seeds concatenated; the seed of the result has no meaning."""
        return SeedPart(
            -1,
            *(
                np.concatenate([getattr(part, name) for part in self.seeds])
                for name in ("network", "predicted", "low", "high")
            ),
        )

    @cached_property
    def mean(self) -> SeedPart:
        """Mean over the seeds that tested each network."""
        network, which = np.unique(self.rows.network, return_inverse=True)
        times = np.bincount(which)
        columns = (self.rows.predicted, self.rows.low, self.rows.high)
        return SeedPart(-1, network, *(np.bincount(which, column) / times for column in columns))


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
    models: list[TestedModel]
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
            mask[model.rows.network] = True
        return mask

    @cached_property
    def always(self) -> tuple[float, int] | None:
        """Mean accuracy of the networks outside the test parts, and their number.

        Of the validation part alone where the training networks are not available.
        """
        accuracy = self.networks.accuracy
        if self.everything is None:
            known = accuracy[sorted(self.networks.validation)]
            total, count = float(known.sum()), len(known)
        else:
            total = float(self.everything.sum()) - float(accuracy[self.is_test].sum())
            count = len(self.everything) - int(self.is_test.sum())
        return (total / count, count) if count > 0 else None

    def within(self, text: str, opened: Zoo | MixedZoo | ModelZoo) -> HeldOut | None:
        """The same with the rows and all accuracies of a zoo; None if it is not that of the runs.

        It is if it holds every held-out network of the runs: from the same training run, with the
        same accuracy.
        """
        run, keys = self.zoo.best, self.networks.index
        if run is None or not keys or run.own != isinstance(opened, ModelZoo):
            return None
        chosen = list(_networks_of(opened, run))
        places, everything = dict(chosen), np.array([accuracy for (_, accuracy), _ in chosen])
        if not places.keys() >= {*keys}:
            return None
        networks = replace(self.networks, place=[places[key] for key in keys])
        return replace(self, networks=networks, reference=text, everything=everything)

    def of(self, run: Run) -> TestedModel | None:
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
        which = networks.add(tested)
        low, predicted, high = (_rounded(tested[name]) for name in ("low", "predicted", "high"))
        seeds = []
        for seed in dict.fromkeys(tested["seed"].tolist()):
            chosen = tested["seed"] == seed
            part = (which[chosen], predicted[chosen], low[chosen], high[chosen])
            seeds.append(SeedPart(int(seed), *part))
        models.append(TestedModel(run, seeds))
    return HeldOut(index, zoo, networks, models, reference)


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
        opened = open_zoo(resolve(text, "zoo"))
        found = [part.within(text, opened) for part in parts]
        if not any(found):
            raise RunError(
                f"'{text}' is not the zoo of these runs: expected the networks that they were "
                "tested on, by training and accuracy, found others"
            )
        parts = [new or old for new, old in zip(found, parts, strict=True)]
    return parts


def _networks_of(opened: Zoo | MixedZoo | ModelZoo, run: Run) -> Iterator[tuple[Key, str]]:
    """Key and place of every network of a zoo that the run could choose."""
    column, chosen = run.target.column, run.record.selection
    if isinstance(opened, ModelZoo):
        values = opened.targets.get(column, np.array([]))
        if values.dtype.kind == "f":
            for row, accuracy in enumerate(_identical(values)):
                yield (f"#{row}", accuracy), f"#{row}"
        return
    zoos = opened.zoos if isinstance(opened, MixedZoo) else {"": opened}
    for kind, zoo in zoos.items():
        if kind in chosen.get("left_out", ()):
            continue
        rows = zoo.select(percent=run.percent, min_accuracy=chosen.get("min_accuracy") or None)
        inside = f"{kind}/" if kind else ""
        accuracies = _identical(zoo.table[column][rows])
        for row, accuracy in zip(rows.tolist(), accuracies, strict=True):
            if np.isfinite(accuracy):
                key = (f"{inside}{zoo.table['run'][row]}", accuracy)
                yield key, f"/{kind}#{row}" if kind else f"#{row}"
