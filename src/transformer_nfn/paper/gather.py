"""The runs of a report, and those that can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.models.predictor import BUILT, model_name, model_place
from transformer_nfn.paper.numbers import (
    LEARNING_CURVE,
    MIXED,
    PAPER_TABLES,
    TABLE_3,
    TABLE_5,
    TABLE_6,
    TRANSFER,
    WHOLE,
)
from transformer_nfn.paper.rows import OurCell, result_rows, zoo_label
from transformer_nfn.paper.table_text import TableView, check_topic, curve_lines, lay_out
from transformer_nfn.prediction.runs import (
    CONFIGURATION,
    LOG_FILE,
    PREDICTIONS_FILE,
    RunError,
    RunRecord,
    find_runs,
    read_log,
    read_predictions,
)
from transformer_nfn.prediction.target import ACCURACY_COLUMN, Target

ABOUT = "reports are about accuracies, which are numbers from 0 to 1 in a column named so"
"""Why a run may be left out."""
# Tables whose cells change the predictor itself are never compared.
_VARIANTS = (TABLE_3.topic, TABLE_5.topic, TABLE_6.topic, TRANSFER.topic)
_NEEDED = ("seed", "split", "row", "accuracy", "predicted")
# A predictor may leave the range of accuracies, though not by far.
_FAR = (-1000.0, 1000.0)
_BOUNDS = {"accuracy": (0.0, 1.0), "predicted": _FAR, "low": _FAR, "high": _FAR}
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """One run folder; predictions and log are read on access."""

    folder: Path
    record: RunRecord

    @property
    def name(self) -> str:
        """Display name of the predictor."""
        return model_name(self.record.model)

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self.record.status == "done"

    @cached_property
    def target(self) -> Target:
        """What is predicted."""
        return self.record.predicts

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of its results."""
        return result_rows([self.record])

    @cached_property
    def cell(self) -> OurCell:
        """Its mean τ over the seeds."""
        return OurCell.of([row for row in self.rows if "seed" in row] or self.rows[:1])

    @property
    def rank(self) -> float:
        """Sorts the highest τ first, and runs without one last."""
        return 2.0 if self.cell.value is None else -self.cell.value

    @property
    def own(self) -> bool:
        """Whether the networks were brought by a user."""
        return self.record.kind != BUILT

    @property
    def percent(self) -> Any:
        """Part of the training after which networks were read; None for all checkpoints."""
        return None if self.own else self.record.selection.get("percent")

    @property
    def label(self) -> str:
        """Label of the zoo, with the target where it is another than that of built zoos."""
        zoo = zoo_label(self.rows[0])
        return zoo if self.target.column == ACCURACY_COLUMN else f"{zoo}, {self.target.what}"

    @property
    def sample(self) -> tuple[Any, ...]:
        """The choice of networks; equal for comparable runs."""
        chosen = self.record.selection
        return self.percent, chosen.get("min_accuracy") or None, chosen.get("augment")

    def part(self, split: str) -> Columns:
        """Predictions of all seeds on a part, ``val`` or ``test``; no rows where none were kept."""
        columns = self.predictions
        chosen = (columns["split"] == split) & np.isfinite(columns["accuracy"])
        if split == "test":
            chosen &= np.isfinite(columns["predicted"])
        return {key: values[chosen] for key, values in columns.items()}

    @cached_property
    def predictions(self) -> Columns:
        """All predictions of a finished run, with every column that the report needs."""
        path = self.folder / PREDICTIONS_FILE
        if not self.done or not path.exists():
            return {name: np.zeros(0) for name in (*_NEEDED, *_BOUNDS)}
        columns = read_predictions(self.folder)
        if missing := [name for name in _NEEDED if name not in columns]:
            raise RunError(f"'{path}' has no column '{missing[0]}'")
        for name in ("row", "seed"):
            if not np.issubdtype(columns[name].dtype, np.integer):
                raise RunError(
                    f"'{path}': expected whole numbers in column '{name}', found "
                    f"{columns[name].dtype}"
                )
        for name, (low, high) in _BOUNDS.items():
            given = columns.get(name, np.full(len(columns["row"]), np.nan))
            try:
                columns[name] = given.astype(float)
            except (TypeError, ValueError) as error:
                raise RunError(f"'{path}': column '{name}' is not of numbers") from error
            finite = columns[name][np.isfinite(columns[name])]
            outside = finite[(finite < low) | (finite > high)]
            if len(outside):
                raise RunError(
                    f"'{path}': expected {low:g} to {high:g} in column '{name}', found "
                    f"{outside[0]:g}"
                )
        for name in CONFIGURATION:
            columns.setdefault(name, np.full(len(columns["row"]), None, dtype=object))
        if "kind" in columns and "run" in columns:  # run names are unique within a size only
            pairs = zip(columns["kind"].tolist(), columns["run"].tolist(), strict=True)
            columns["run"] = np.array([f"{kind}/{run}" for kind, run in pairs], dtype=object)
        return columns

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """The lines of the training log, empty where there is none."""
        path = self.folder / LOG_FILE
        return read_log(path) if path.is_file() else []


@dataclass(frozen=True)
class ZooStudy:
    """The runs on one zoo that predict one accuracy.

    Attributes:
        label: `Run.label`.
        runs: all runs.
        main: the compared runs: one for each model, on the same choice of networks.
    """

    label: str
    runs: list[Run]
    main: list[Run]

    @property
    def finished(self) -> list[Run]:
        """The compared runs that have a result, best first."""
        return sorted((run for run in self.main if run.done), key=lambda run: run.rank)

    @property
    def best(self) -> Run | None:
        """The compared run of the highest τ."""
        return self.finished[0] if self.finished else None

    @property
    def example(self) -> Run:
        """A run whose record describes the zoo."""
        return self.best or (self.main or self.runs)[0]

    def by_size(self) -> dict[str, list[OurCell]]:
        """Runs of each model by number of training networks, where there are several.

        In the order of `curve_lines`.
        """
        placed = []
        for run in (*self.runs, *self.main):
            train = run.record.selection.get("train")
            if train and self.main and run.sample == self.main[0].sample and not _varies(run):
                topic, row = LEARNING_CURVE.topic, run.record.model
                place = {"table": topic, "row": row, "column": str(train)}
                placed += [{**each, **place} for each in run.rows if "seed" in each]
        (view,) = lay_out(LEARNING_CURVE.name, placed)
        return curve_lines(view) if len({column for _, column in view.ours}) > 1 else {}


@dataclass(frozen=True)
class Study:
    """All runs of a report; learning curves by the label of their zoo.

    ``others`` are runs that predict something else than an accuracy, which are left out.
    """

    runs: list[Run]
    others: list[Run]
    zoos: list[ZooStudy]
    tables: list[TableView]
    curves: dict[str, TableView]


def gather(folders: Iterable[Path]) -> Study:
    """Read every run in or below the folders."""
    seen: dict[Path, Run] = {}
    for folder in find_runs(list(folders)):
        record = RunRecord.read(folder)
        check_topic(record, folder)
        seen.setdefault(folder.resolve(), Run(folder, record))
    runs = [run for run in seen.values() if run.target.is_accuracy]
    others = [run for run in seen.values() if not run.target.is_accuracy]
    if not runs:
        columns = ", ".join(dict.fromkeys(f"'{run.target.column[:60]}'" for run in others))
        raise RunError(f"the runs predict {columns}: {ABOUT}")
    by_zoo: dict[str, list[Run]] = {}
    for run in runs:
        by_zoo.setdefault(run.label, []).append(run)

    for label, group in by_zoo.items():
        zoos = {sha: str(run.folder) for run in group if (sha := run.record.zoo.get("sha256"))}
        if len(zoos) > 1:
            raise RunError(f"runs on several zoos called '{label}': {', '.join(zoos.values())}")

    rows = [row for run in runs for row in run.rows]

    def filled(name: str) -> list[TableView]:
        return [view for view in lay_out(name, rows) if view.ours]

    return Study(
        runs=runs,
        others=others,
        zoos=[ZooStudy(label, group, _compared(group)) for label, group in by_zoo.items()],
        tables=[view for name in (*PAPER_TABLES, MIXED.name) for view in filled(name)],
        curves={view.zoo: view for view in filled(LEARNING_CURVE.name)},
    )


def _compared(runs: list[Run]) -> list[Run]:
    """The choice of networks that most models share, the largest of those; a run for each model."""
    plain = [run for run in runs if not _varies(run)]
    groups: dict[tuple[Any, ...], dict[str, Run]] = {}
    for run in sorted(plain, key=lambda run: run.record.table is not None):
        group = groups.setdefault((run.sample, run.record.selection.get("train")), {})
        group.setdefault(run.record.model, run)
    if not groups:
        return []

    def weight(key: tuple[Any, ...]) -> tuple[Any, ...]:
        (_, threshold, augment), train = key
        members = groups[key].values()
        finished = sum(run.done for run in members)
        return augment is None, finished, threshold is None, len(members), train or 0

    chosen = groups[max(groups, key=weight)]
    return sorted(chosen.values(), key=lambda run: model_place(run.record.model))


def _varies(run: Run) -> bool:
    """Whether a run is another predictor than its model by default, or part of one."""
    topic, column = run.rows[0]["table"], run.rows[0]["column"]
    return topic in _VARIANTS or (topic == MIXED.topic and column != WHOLE)
