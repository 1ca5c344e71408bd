"""Differences of τ between two predictors on the same test networks, with their intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.prediction.data import TWIN
from transformer_nfn.prediction.metrics import kendall_tau, resampled_taus
from transformer_nfn.prediction.runs import (
    PREDICTIONS_FILE,
    RunRecord,
    predictions_on_test,
    read_predictions,
)

SAMPLES = 1000
INTERVAL = (0.025, 0.975)
ALONE = "_alone"
"""End of the columns about networks without a twin in training."""
Places = Mapping[str, Mapping[int, Path]]


def paired_rows(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """A row for every two predictors in a column of a table: the difference of their τ.

    τ is the mean over seeds and over the splits that both have. For its 95 % interval test runs are
    drawn with replacement: the same ones for both, and in all splits.

    Args:
        folders: of the cells of one zoo; those without predictions of numbers are left out.
    """
    columns: dict[str, dict[str, dict[int, Path]]] = {}
    for folder in folders:
        if not (folder / PREDICTIONS_FILE).is_file():
            continue
        record = RunRecord.read(folder)
        if record.table is not None and record.predicts.kind != "class":
            row, column = str(record.table["row"]), str(record.table["column"])
            split = record.selection.get("split_seed", 0)
            columns.setdefault(column, {}).setdefault(row, {})[split] = folder
    return [each for column, rows in columns.items() for each in _of_column(column, rows)]


def _of_column(column: str, rows: Places) -> list[dict[str, Any]]:
    found = []
    taus: dict[tuple[str, tuple[int, ...]], dict[str, np.ndarray]] = {}
    for row, other in itertools.combinations(rows, 2):
        splits = tuple(sorted(rows[row].keys() & rows[other].keys()))
        if not splits:
            continue
        for name in (row, other):
            if (name, splits) not in taus:
                taus[name, splits] = _taus([rows[name][split] for split in splits])
        ours, theirs = taus[row, splits], taus[other, splits]
        pair: dict[str, Any] = {"column": column, "row": row, "against": other}
        for part in ("", ALONE) if f"tau{ALONE}" in ours else ("",):
            differences = ours[f"tau{part}"] - theirs[f"tau{part}"]
            low, high = np.quantile(differences[1:], INTERVAL)
            pair |= {
                f"tau{part}": float(ours[f"tau{part}"][0]),
                f"tau_against{part}": float(theirs[f"tau{part}"][0]),
                f"difference{part}": float(differences[0]),
                f"low{part}": float(low), f"high{part}": float(high),
            }  # fmt: skip
        found.append({**pair, "splits": len(splits), "samples": SAMPLES})
    return found


def _taus(folders: list[Path]) -> dict[str, np.ndarray]:
    """τ over splits and seeds of all test networks, then of `SAMPLES` draws of their runs."""
    splits = [read_predictions(folder) for folder in folders]
    tested = [{k: v[columns["split"] == "test"] for k, v in columns.items()} for columns in splits]
    runs = np.unique(np.concatenate([columns["run"] for columns in tested]))
    draws = np.random.default_rng(0).multinomial(len(runs), [1 / len(runs)] * len(runs), SAMPLES)
    parts = ("", ALONE) if all(TWIN in columns for columns in tested) else ("",)
    taus: dict[str, list[np.ndarray]] = {f"tau{part}": [] for part in parts}
    for columns, every in zip(tested, splits, strict=True):
        accuracy, predicted = predictions_on_test(every)
        count = len(accuracy)
        drawn = draws[:, np.searchsorted(runs, columns["run"][:count])]  # every seed has the same
        for part in parts:
            kept = ~columns[TWIN][:count] if part else np.ones(count, bool)
            for each in predicted:
                truth, guess = accuracy[kept], each[kept]
                sampled = resampled_taus(truth, guess, drawn[:, kept])
                taus[f"tau{part}"].append(np.append(kendall_tau(truth, guess), sampled))
    return {name: np.mean(each, 0) for name, each in taus.items()}
