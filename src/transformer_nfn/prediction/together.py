"""How good is what a run answers, the mean over its seeds? Better than its seeds, usually."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.prediction.records import (
    PREDICTIONS_FILE,
    RunError,
    RunRecord,
    read_predictions,
)

TOGETHER = "tau_together"
"""Where a record's summary has τ of the mean over its seeds."""
_NEEDED = ("seed", "split", "accuracy", "predicted")


def seeds_on_test(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Of the test part the true accuracies, ``[n]``, and what each seed says, ``[seeds, n]``.

    Args:
        columns: of ``predictions.parquet``; every seed has the same networks in the same order.
    """
    for name in _NEEDED:
        if name not in columns:
            raise RunError(f"predictions have no column '{name}'")
    tested = columns["split"] == "test"
    seeds = list(dict.fromkeys(columns["seed"][tested]))
    if not seeds:
        raise RunError("predictions have no rows of the split 'test'")
    try:
        accuracy, predicted = (
            [columns[name][tested & (columns["seed"] == seed)].astype(float) for seed in seeds]
            for name in ("accuracy", "predicted")
        )
    except (TypeError, ValueError) as error:
        raise RunError(f"predictions are not all numbers ({error})") from error
    if any(not np.array_equal(accuracy[0], other) for other in accuracy):
        raise RunError("predictions of the seeds are not of the same test networks")
    return accuracy[0], np.stack(predicted)


def tau_together(columns: Mapping[str, np.ndarray]) -> float:
    """Kendall's τ on the test part, of the mean over all seeds; see `seeds_on_test`."""
    accuracy, predicted = seeds_on_test(columns)
    return kendall_tau(accuracy, predicted.mean(0))


def with_together(record: RunRecord, folder: Path) -> RunRecord:
    """A record from before `TOGETHER` was kept, completed from the predictions beside it."""
    path = folder / PREDICTIONS_FILE
    if not record.seeds or TOGETHER in record.summary or not path.is_file():
        return record
    columns = read_predictions(folder)
    try:
        tau = tau_together(columns)
    except RunError as error:
        raise RunError(f"'{path}': {error}") from error
    return replace(record, summary={**record.summary, TOGETHER: tau})
