"""Rows of results: one for each cell, split and seed, with all that says how it was made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformer_nfn.paper.numbers import PaperTable, table_of
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


def result_rows(records: Iterable[RunRecord]) -> dict[str, list[Any]]:
    """Columns of the rows of runs; a run without a result has one row, which says why."""
    return as_columns([row for record in records for row in _rows(record)])


def as_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns of rows, None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _rows(record: RunRecord) -> list[dict[str, Any]]:
    table = record.table or {}
    topic, row, column = (str(table.get(key, "")) for key in ("table", "row", "column"))
    task, target = record.zoo.get("task"), record.target or {}
    paper: PaperTable | None = table_of(topic, task)
    printed = paper.cell(row, column) if paper is not None else None
    agreement: Mapping[str, Any] = record.summary.get("agreement") or {}
    made: Mapping[str, Any] = record.made or {}
    same = {
        "table": topic, "row": row, "column": column, "model": record.model,
        "options": json.dumps(record.protocol.get("options", {}), sort_keys=True),
        **{f"zoo_{name}": record.zoo.get(name) for name in ZOO},
        "target": target.get("column", "test_accuracy"),
        **{name: record.selection.get(name) for name in SELECTED},
        "epochs": record.protocol.get("epochs"), "parameters": record.num_parameters,
        "status": record.status,
        "paper": printed.value if printed else None,
        "paper_error": printed.error if printed else None,
        **{name: record.summary.get(name) for name in SUMMARY},
        **{f"agreement_{dtype}": agreement.get(dtype) for dtype in PRECISIONS},
        **{name: made.get(name) for name in MADE},
    }  # fmt: skip
    return [{**same, **each} for each in record.seeds] or [same]
