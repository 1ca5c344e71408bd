"""Predictions of the compared runs for held-out networks, and the zoos these come from.

Values are rounded once. Tables, sentences and charts of the report are computed from them, and the
page carries them, so that its numbers can be recomputed from its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from transformer_nfn.io.assets import resolve
from transformer_nfn.paper.gather import Columns, Run, ZooStudy
from transformer_nfn.prediction.runs import CONFIGURATION, PREDICTIONS_FILE, RunError
from transformer_nfn.zoo import MixedZoo, ModelZoo, Zoo, open_zoo

DIGITS = 6
MILLION = 10**DIGITS
FAR = 1000.0
Key = tuple[Any, float]
"""What identifies a network: its training run, or its row in a zoo of checkpoints, and accuracy."""


@dataclass(frozen=True)
class Networks:
    """Held-out networks, each once.

    Attributes:
        key: of each network.
        place: what its name has after that of the zoo, ``#row`` or, of a mixed zoo, ``/size#row``;
            None where runs number the rows differently, as after a zoo was packed again.
        run: training run in the zoo.
        accuracy: measured accuracy.
        configuration: training settings, one column each.
        validation: indices of those in a validation part.
    """

    key: list[Key]
    place: list[str | None]
    run: list[Any]
    accuracy: np.ndarray
    configuration: dict[str, list[Any]]
    validation: np.ndarray

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

    @property
    def name(self) -> str:
        """Display name of the predictor."""
        return self.run.name

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

    @property
    def test(self) -> np.ndarray:
        """Indices of the networks in any test part."""
        return np.flatnonzero(self.is_test)

    @cached_property
    def always(self) -> tuple[float, int] | None:
        """Mean accuracy of the networks outside the test parts, and their number.

        Of the validation part alone where the training networks are not available.
        """
        accuracy = self.networks.accuracy
        if self.everything is None:
            known = accuracy[self.networks.validation]
            total, count = float(known.sum()), len(known)
        else:
            total = float(self.everything.sum()) - float(accuracy[self.test].sum())
            count = len(self.everything) - len(self.test)
        return (total / count, count) if count > 0 else None

    def within(self, text: str, opened: Zoo | MixedZoo | ModelZoo) -> HeldOut | None:
        """The same with the rows and all accuracies of a zoo; None if it is not that of the runs.

        It is if it holds every held-out network of the runs: from the same training run, with the
        same accuracy.
        """
        run, keys = self.zoo.best, self.networks.key
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
    gathered = _Gathered(by_row=any(run.own for run in zoo.runs))
    models = []
    for run in zoo.finished:
        if run.predictions is not None:
            _check(run, run.predictions)
            gathered.note_validation(run.predictions)
        tested = run.tested
        if tested is None or not len(tested["row"]):
            continue
        which = gathered.indices(tested)
        low, predicted, high = (_rounded(tested[name]) for name in ("low", "predicted", "high"))
        seeds = []
        for seed in dict.fromkeys(tested["seed"].tolist()):
            chosen = tested["seed"] == seed
            part = (which[chosen], predicted[chosen], low[chosen], high[chosen])
            seeds.append(SeedPart(int(seed), *part))
        models.append(TestedModel(run, seeds))
    return HeldOut(index, zoo, gathered.networks(), models, reference)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Rounded; NaN where there is no finite number."""
    return np.where(np.isfinite(values), np.round(values, DIGITS), np.nan)


def _check(run: Run, columns: Columns) -> None:
    """Reject rows that are no integers and values that are no accuracies."""
    path = run.folder / PREDICTIONS_FILE
    for name in ("row", "seed"):
        values = columns[name]
        if not np.issubdtype(values.dtype, np.integer):
            raise RunError(
                f"'{path}': expected whole numbers in column '{name}', found {values.dtype}"
            )
    # A predictor may leave the range of accuracies, though not by far.
    bounds = {"accuracy": (0.0, 1.0), **dict.fromkeys(("predicted", "low", "high"), (-FAR, FAR))}
    for name, (low, high) in bounds.items():
        values = columns[name][np.isfinite(columns[name])]
        outside = values[(values < low) | (values > high)]
        if len(outside):
            raise RunError(
                f"'{path}': expected {low:g} to {high:g} in column '{name}', found {outside[0]:g}"
            )


class _Gathered:
    """Networks seen so far, each by its key.

    Rows of zoos of checkpoints never change, and checkpoints of a run may be equally accurate; a
    built zoo may be packed again, with other rows.
    """

    def __init__(self, *, by_row: bool) -> None:
        self._by_row = by_row
        self._index: dict[Key, int] = {}
        self._place: list[str | None] = []
        self._run: list[Any] = []
        self._configuration: dict[str, list[Any]] = {name: [] for name in CONFIGURATION}
        self._validation: set[int] = set()

    def indices(self, part: Columns) -> np.ndarray:
        rows = part["row"].astype(int).tolist()
        kinds = part["kind"].tolist() if "kind" in part else [None] * len(rows)
        runs = part["run"].tolist() if "run" in part else [None] * len(rows)
        accuracy = _identical(part["accuracy"])
        out = np.zeros(len(rows), dtype=int)
        for i, (row, kind, run) in enumerate(zip(rows, kinds, runs, strict=True)):
            place = f"#{row}" if kind is None else f"/{kind}#{row}"
            key = (place if run is None or self._by_row else str(run), accuracy[i])
            index = self._index.setdefault(key, len(self._index))
            if index == len(self._place):
                self._place.append(place)
                self._run.append(run)
                for name, column in self._configuration.items():
                    column.append(plain(part[name][i]))
            elif self._place[index] != place:
                self._place[index] = None
            out[i] = index
        return out

    def note_validation(self, everything: Columns) -> None:
        chosen = (everything["split"] == "val") & np.isfinite(everything["accuracy"])
        part = {name: values[chosen] for name, values in everything.items()}
        self._validation.update(self.indices(part).tolist())

    def networks(self) -> Networks:
        return Networks(
            key=[*self._index],
            place=self._place,
            run=self._run,
            accuracy=np.array([accuracy for _, accuracy in self._index], dtype=float),
            configuration=self._configuration,
            validation=np.array(sorted(self._validation), dtype=int),
        )


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
