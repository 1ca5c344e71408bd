"""What do the compared runs say of networks they did not train on? Rounded once, for all to count.

Tables, sentences and charts of the report count from these values, and the page carries them as
they are here: whoever counts again from the page's own data finds the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from transformer_nfn.paper.gather import Columns, Run, ZooStudy
from transformer_nfn.prediction.runs import CONFIGURATION, PREDICTIONS_FILE, RunError

DIGITS = 6
MILLION = 10**DIGITS
FAR = 1000.0


@dataclass(frozen=True)
class Networks:
    """Held-out networks, each once whichever runs tested it.

    Attributes:
        row: of the zoo, as ``ZOO#row`` names it; None where runs count its rows differently, as
            after a zoo was packed again.
        run: which training it comes from, as the zoo calls it.
        accuracy: true.
        configuration: how it was trained, a column for each setting.
        validation: places of those in a validation part.
    """

    row: list[int | None]
    run: list[Any]
    accuracy: np.ndarray
    configuration: dict[str, list[Any]]
    validation: np.ndarray

    @property
    def millionths(self) -> np.ndarray:
        """True accuracies as whole numbers, so that a bound of a band belongs to one band."""
        return np.asarray(np.rint(self.accuracy * MILLION), dtype=np.int64)


@dataclass(frozen=True)
class SeedPart:
    """What one seed says of its test networks; ``network`` are places in `Networks`."""

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
        """How the predictor is called."""
        return self.run.name

    @cached_property
    def rows(self) -> SeedPart:
        """All seeds one after the other; the seed of the result means nothing."""
        return SeedPart(
            -1,
            *(
                np.concatenate([getattr(part, name) for part in self.seeds])
                for name in ("network", "predicted", "low", "high")
            ),
        )

    @cached_property
    def mean(self) -> SeedPart:
        """For each network the mean over the seeds that tested it."""
        network, which = np.unique(self.rows.network, return_inverse=True)
        times = np.bincount(which)
        columns = (self.rows.predicted, self.rows.low, self.rows.high)
        return SeedPart(-1, network, *(np.bincount(which, column) / times for column in columns))


@dataclass(frozen=True)
class HeldOut:
    """The held-out networks of a zoo, and what each compared model says of its test networks.

    Attributes:
        networks: in validation and test parts.
        models: best first.
        everything: accuracies of all networks to choose from, where the zoo itself is at hand.
    """

    networks: Networks
    models: list[TestedModel]
    everything: np.ndarray | None = None

    @cached_property
    def test(self) -> np.ndarray:
        """Places of the networks in any test part."""
        parts = [model.rows.network for model in self.models]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, dtype=int)

    @cached_property
    def always(self) -> tuple[float, int] | None:
        """What a predictor that looks at no weights says, and from how many networks it knows.

        The mean accuracy of all networks outside the test parts; of the validation part where
        those to train on are not at hand.
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
        """The same, with rows as the zoo at hand counts them, and all of its accuracies."""
        networks = replace(self.networks, row=row)
        return replace(self, networks=networks, everything=everything)

    def of(self, run: Run) -> TestedModel | None:
        """What a run said, None where it kept no predictions."""
        return next((model for model in self.models if model.run is run), None)


def held_out(zoo: ZooStudy) -> HeldOut:
    """Reads the predictions of the compared runs, best first."""
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
    """Refuses what cannot be counted: rows that are no numbers, accuracies that are none."""
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
    """Networks met so far, told apart by the training they come from and their accuracy."""

    def __init__(self) -> None:
        self._place: dict[tuple[Any, float], int] = {}
        self._row: list[int | None] = []
        self._run: list[Any] = []
        self._configuration: dict[str, list[Any]] = {name: [] for name in CONFIGURATION}
        self._validation: set[int] = set()

    def places(self, part: Columns) -> np.ndarray:
        # Kinds of a mixed zoo count their own rows, which name no network by themselves.
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
