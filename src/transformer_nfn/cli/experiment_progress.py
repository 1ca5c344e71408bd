"""What a user sees while predictors are trained: bars for epochs and cells, and result tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from transformer_nfn.prediction.records import RunRecord


def counting_bar(console: Console) -> Progress:
    """A bar with a count, a note and the time; its task has the field ``note``."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def epochs_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar that moves with the epochs a training reports."""
    console = Console(stderr=True, quiet=quiet)
    with counting_bar(console) as bar:
        task = bar.add_task(what, total=1, note="")

        def report(line: dict[str, Any]) -> None:
            note = ""
            if "val_tau" in line:
                note = f"loss {line['loss']:.4f}  validation τ {line['val_tau']:.3f}"
            bar.update(task, total=line["epochs"], completed=line["epoch"], note=note)

        yield report


def result_table(records: list[RunRecord], title: str) -> Table:
    """One row a predictor: τ ± standard error, R², mean error, how often the interval holds."""
    table = Table(title=title)
    for name in ("model", "Kendall τ"):
        table.add_column(name, no_wrap=True)
    for name in ("R²", "error", "90 % holds", "size", "s"):
        table.add_column(name, justify="right")
    for record in sorted(records, key=lambda r: -float(r.summary.get("tau", -2))):
        if record.status != "done":
            table.add_row(record.model, record.status)
            continue
        s = record.summary
        size = "trees" if record.num_parameters is None else f"{record.num_parameters / 1e6:.3f} M"
        table.add_row(
            record.model,
            plus_minus(s["tau"], s["tau_se"]),
            f"{s['r2']:.3f}",
            f"{s['mae']:.3f}",
            f"{100 * s['coverage']:.1f} %",
            size,
            f"{record.seeds[0]['seconds']:.1f}",
        )
    return table


def plus_minus(value: float, error: float | None) -> str:
    """``0.812 ± 0.004``, or the value alone where one seed gives no error."""
    if error is None or math.isnan(error):
        return f"{value:.3f}"
    return f"{value:.3f} ± {error:.3f}"
