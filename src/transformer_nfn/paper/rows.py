"""Rows of results: one for each cell, split and seed, with all that says how it was made.

Everything that is shown of a result is computed from its rows: labels of zoos, means, tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_nfn.known_tasks import seeds_text, task_title
from transformer_nfn.models.predictor import BUILT
from transformer_nfn.paper.numbers import (
    ALL_KINDS,
    LEFT_OUT,
    MIXED,
    NOTHING,
    WITHIN,
    mean_text,
    table_of,
)
from transformer_nfn.prediction.metrics import mean, standard_error
from transformer_nfn.prediction.runs import ENSEMBLE_TAU, RunRecord

SELECTED = (
    "percent", "min_accuracy", "augment", "max_train", "split", "split_seed", "train", "val",
    "test",
)  # fmt: skip
SUMMARY = (ENSEMBLE_TAU, "coverage")
"""Figures of all seeds together, which stand in the row of each."""
ZOO = ("name", "task", "seeds", "runs", "networks", "sha256")
MADE = ("commit", "version", "device", "updates")
PRECISIONS = ("float32", "float64")
Row = Mapping[str, Any]


def result_rows(records: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """The rows of runs; a run without a result has one row, which says why."""
    return [row for record in records for row in _rows(record)]


def as_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Columns of rows, None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _rows(record: RunRecord) -> list[dict[str, Any]]:
    table = record.table or {}
    topic, row, column = (str(table.get(key, "")) for key in ("table", "row", "column"))
    paper = table_of(topic, record.zoo.get("task"))
    printed = paper.cell(row, column) if paper is not None else None
    agreement: Row = record.summary.get("agreement") or {}
    made: Row = record.made or {}
    same = {
        "table": topic, "row": row, "column": column, "model": record.model,
        "options": json.dumps(record.protocol.get("options", {}), sort_keys=True),
        **{f"zoo_{name}": record.zoo.get(name) for name in ZOO},
        "zoo_kind": None if record.kind == BUILT else record.kind,
        "target": (record.target or {}).get("column", "test_accuracy"),
        **{name: record.selection.get(name) for name in SELECTED},
        "epochs": record.protocol.get("epochs"), "parameters": record.num_parameters,
        "status": record.status,
        "paper": printed.value if printed else None,
        "paper_error": printed.error if printed else None,
        **{name: record.summary.get(name) for name in SUMMARY},
        **{f"agreement_{dtype}": agreement.get(dtype) for dtype in PRECISIONS},
        **{name: made.get(name) for name in MADE},
    }  # fmt: skip
    rows = [{**same, **each} for each in record.seeds] or [same]
    sizes = _sizes(record, row, column) if topic == MIXED.topic and record.status == "done" else {}
    for size, values in sizes.items():
        figures = {name: values.get(name) for name in ("tau", "tau_se", "coverage", ENSEMBLE_TAU)}
        several = {} if len(record.seeds) != 1 else {"tau_se": None}
        rows.append({**same, "row": size, **figures, **several, "test": values.get("networks")})
    return rows


def _sizes(record: RunRecord, row: str, column: str) -> dict[str, Row]:
    """Figures of all seeds on the networks of each size; their rows have no seed."""
    summary = record.summary
    if column == LEFT_OUT:
        return {row: summary.get(LEFT_OUT, {}).get(row, {})}
    every = {**summary, "networks": record.selection.get("test")}
    within = {"tau": summary.get("tau_within")}
    return {**summary.get("kinds", {}), ALL_KINDS: every, WITHIN: within}


@dataclass(frozen=True)
class OurCell:
    """One reproduced cell: a number, or the reason why there is none.

    Attributes:
        rows: of its splits and seeds; none for a number that follows from other cells.
        value: mean τ, or another number.
        error: its standard error over seeds, or over splits; None for one.
        text: as shown.
        together: τ of the mean over the seeds; None for one seed.
    """

    rows: Sequence[Row]
    value: float | None = None
    error: float | None = None
    text: str = NOTHING
    together: float | None = None

    @staticmethod
    def of(rows: Sequence[Row]) -> OurCell:
        """Mean over the seeds of one split."""
        first = rows[0]
        if first["status"] != "done":
            return OurCell(rows)
        name = "tau" if first.get("auroc") is None else "auroc"
        values = [finite(row.get(name)) for row in rows]
        value, several = mean(values), len(rows) > 1
        if name == "auroc":
            return OurCell(rows, value, None, f"AUROC {mean_text(value)}")
        known = [each for each in values if each is not None]
        error = standard_error(known) if several else finite(first.get("tau_se"))
        error = None if value is None else error
        together = finite(first.get(ENSEMBLE_TAU)) if several else None
        return OurCell(rows, value, error, mean_text(value, error), together)

    @staticmethod
    def count(rows: Sequence[Row], name: str) -> OurCell:
        """A number of parameters or networks."""
        count = rows[0].get(name)
        return OurCell(rows, count, None, NOTHING if count is None else f"{count:,}")

    @staticmethod
    def over_splits(cells: Sequence[OurCell]) -> OurCell:
        """Mean over splits of the zoo, and its standard error; a single one as it is."""
        values = [cell.value for cell in cells if cell.value is not None]
        if len(values) < 2 or isinstance(values[0], int):  # numbers of parameters
            return next((cell for cell in cells if cell.value is not None), cells[0])
        value, error = float(np.mean(values)), standard_error(values)
        rows = [row for cell in cells for row in cell.rows]
        together = mean([cell.together for cell in cells])
        return OurCell(rows, value, error, mean_text(value, error), together)

    @property
    def reason(self) -> str | None:
        """Why the cell is empty, None where it is not."""
        if self.value is not None or self.rows[0]["status"] == "done":
            return None
        return str(self.rows[0]["status"])

    @property
    def train(self) -> int | None:
        """Number of training networks."""
        return self.rows[0].get("train") if self.rows else None


def finite(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if np.isfinite(value) else None


def zoo_label(row: Row) -> str:
    """Label of a zoo: task, name if it differs, size and seeds."""
    task = str(row.get("zoo_task") or "unknown task")
    name, title = str(row.get("zoo_name") or task), task_title(task)
    if name not in (task, title, "zoo"):
        title = f"{title} ({name})"
    size, seeds = zoo_size(row), zoo_seeds(row)
    words = [title]
    words += [] if size is None else [f"{size:,} networks"]
    words += [] if seeds is None else [seeds_text(seeds)]
    return ", ".join(words)


def zoo_seeds(row: Row) -> str | None:
    """The kind of seeds of a zoo; None where it has none, and for a user's checkpoints."""
    kind = row.get("zoo_seeds")
    return None if kind is None or row.get("zoo_kind") else str(kind)


def zoo_size(row: Row) -> int | None:
    """Number of trained networks of the zoo; in built zoos checkpoints of a run count once."""
    for key in ("zoo_networks",) if row.get("zoo_kind") else ("zoo_runs", "zoo_networks"):
        if isinstance(row.get(key), int):
            return int(row[key])
    return None
