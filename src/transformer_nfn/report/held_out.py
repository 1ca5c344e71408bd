"""Predictions of the compared runs for held-out networks, and the zoos these come from.

Values are rounded once. Tables, sentences and charts of the report are computed from them, and the
page carries them, so that its numbers can be recomputed from its data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from transformer_nfn.io.assets import resolve
from transformer_nfn.paper.gather import Columns, Run, Study, ZooStudy
from transformer_nfn.prediction.runs import CONFIGURATION, PREDICTIONS_FILE, RunError
from transformer_nfn.zoo import Zoo

DIGITS = 6
MILLION = 10**DIGITS
FAR = 1000.0


@dataclass(frozen=True)
class Networks:
    """Held-out networks, each once.

    Attributes:
        row: row of the zoo, as in ``ZOO#row``; None where runs number its rows differently, as
            after a zoo was packed again.
        run: training run in the zoo.
        accuracy: measured accuracy.
        configuration: training settings, one column each.
        validation: indices of those in a validation part.
    """

    row: list[int | None]
    run: list[Any]
    accuracy: np.ndarray
    configuration: dict[str, list[Any]]
    validation: np.ndarray

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
        networks: in validation and test parts.
        models: best first.
        everything: accuracies of all networks that could be chosen, where the zoo was named.
    """

    networks: Networks
    models: list[TestedModel]
    everything: np.ndarray | None = None

    @cached_property
    def test(self) -> np.ndarray:
        """Indices of the networks in any test part."""
        parts = [model.rows.network for model in self.models]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=int)

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

    def within(self, row: list[int | None], everything: np.ndarray) -> HeldOut:
        """The same with the rows and all accuracies of the named zoo."""
        networks = replace(self.networks, row=row)
        return replace(self, networks=networks, everything=everything)

    def of(self, run: Run) -> TestedModel | None:
        """Predictions of a run, None where it kept none."""
        return next((model for model in self.models if model.run is run), None)


def held_out(zoo: ZooStudy) -> HeldOut:
    """Read the predictions of the compared runs, best first."""
    gathered = _Gathered()
    models = []
    for run in zoo.finished:
        if run.predictions is not None:
            _check(run, run.predictions)
            gathered.note_validation(run.predictions)
        tested = run.tested
        if tested is None or not len(tested["row"]):
            continue
        place = gathered.places(tested)
        low, predicted, high = (_rounded(tested[name]) for name in ("low", "predicted", "high"))
        seeds = []
        for seed in dict.fromkeys(tested["seed"].tolist()):
            chosen = tested["seed"] == seed
            part = (place[chosen], predicted[chosen], low[chosen], high[chosen])
            seeds.append(SeedPart(int(seed), *part))
        models.append(TestedModel(run, seeds))
    return HeldOut(gathered.networks(), models)


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
    """Networks seen so far, identified by training run and accuracy."""

    def __init__(self) -> None:
        self._place: dict[tuple[Any, float], int] = {}
        self._row: list[int | None] = []
        self._run: list[Any] = []
        self._configuration: dict[str, list[Any]] = {name: [] for name in CONFIGURATION}
        self._validation: set[int] = set()

    def places(self, part: Columns) -> np.ndarray:
        # Rows of a mixed zoo are numbered per size, so they identify no network.
        rows = [None] * len(part["row"]) if "kind" in part else part["row"].astype(int).tolist()
        runs = part["run"].tolist() if "run" in part else [None] * len(rows)
        accuracy = np.round(part["accuracy"], DIGITS).tolist()
        out = np.zeros(len(rows), dtype=int)
        for i, (row, run, value) in enumerate(zip(rows, runs, accuracy, strict=True)):
            key = (row if run is None else str(run), value)
            place = self._place.setdefault(key, len(self._place))
            if place == len(self._row):
                self._row.append(row)
                self._run.append(run)
                for name, column in self._configuration.items():
                    column.append(part[name][i])
            elif self._row[place] != row:
                self._row[place] = None
            out[i] = place
        return out

    def note_validation(self, everything: Columns) -> None:
        chosen = (everything["split"] == "val") & np.isfinite(everything["accuracy"])
        part = {name: values[chosen] for name, values in everything.items()}
        self._validation.update(self.places(part).tolist())

    def networks(self) -> Networks:
        return Networks(
            row=self._row,
            run=self._run,
            accuracy=np.array([accuracy for _, accuracy in self._place], dtype=float),
            configuration=self._configuration,
            validation=np.array(sorted(self._validation), dtype=int),
        )


@dataclass(frozen=True)
class NamedZoo:
    """A zoo named by the user.

    Attributes:
        text: its path or name, as in ``tnfn predict RUN text#row``.
        row: rows of all networks that could be chosen.
        run: training run of each.
        accuracy: accuracy of each.
    """

    text: str
    row: np.ndarray
    run: np.ndarray
    accuracy: np.ndarray

    def rows_of(self, networks: Networks) -> list[int | None]:
        """Rows of networks in this zoo, by training run and accuracy."""
        keys = zip(self.run.tolist(), self.accuracy.tolist(), strict=True)
        place = dict(zip(keys, self.row.tolist(), strict=True))
        pairs = zip(networks.run, networks.accuracy.tolist(), strict=True)
        return [place.get((str(run), accuracy)) for run, accuracy in pairs]


def named_zoos(study: Study, texts: list[str]) -> dict[str, NamedZoo]:
    """Match named zoos to runs, by the label of the runs.

    A zoo matches if it holds every held-out network of the runs: from the same training run, with
    the same accuracy.
    """
    sources: dict[str, NamedZoo] = {}
    for text in texts:
        opened = Zoo.open(resolve(text, "zoo"))
        fitting = {zoo.label: source for zoo in study.zoos if (source := _if_of(text, opened, zoo))}
        if not fitting:
            raise RunError(
                f"'{text}' is not the zoo of these runs: expected the networks that they were "
                "tested on, by training and accuracy, found others"
            )
        sources |= fitting
    return sources


def _if_of(text: str, opened: Zoo, zoo: ZooStudy) -> NamedZoo | None:
    networks = held_out(zoo).networks
    if zoo.best is None or not len(networks.row):
        return None
    chosen = zoo.best.record.selection
    rows = opened.select(
        percent=chosen.get("percent"), min_accuracy=chosen.get("min_accuracy") or None
    )
    accuracy = np.round(opened.table["test_accuracy"][rows].astype(float), DIGITS)
    source = NamedZoo(text, rows, opened.table["run"][rows].astype(str), accuracy)
    return None if None in source.rows_of(networks) else source
