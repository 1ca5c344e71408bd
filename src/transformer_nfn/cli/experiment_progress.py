"""What a user sees while predictors are trained: bars for epochs and cells, and result tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from transformer_nfn.known_tasks import seeds_text

if TYPE_CHECKING:
    from transformer_nfn.prediction.runs import RunRecord


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
        disable=not console.is_terminal,
    )


def count_one(
    bar: Progress, task: TaskID, what: str, line: Mapping[str, Any], said: str | None
) -> None:
    """Tells of one of several trainings: what came out of it, or which epoch it is in.

    Args:
        bar: from `counting_bar`.
        task: of the bar.
        what: is trained.
        line: what its training reports.
        said: what came out; None while it goes on.
    """
    if said is not None:
        bar.console.print(f"{what}: {said}", highlight=False)
        bar.advance(task)
    elif "note" in line:
        bar.update(task, note=f"{what}, {line['note']}")
    elif "epoch" in line:
        bar.update(task, note=f"{what}, epoch {line['epoch']}/{line['epochs']}")


@contextmanager
def epochs_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar that moves with the epochs a training reports."""
    console = Console(stderr=True, quiet=quiet)
    with counting_bar(console) as bar:
        task = bar.add_task(what, total=1, note="")

        def report(line: dict[str, Any]) -> None:
            if "note" in line:
                bar.update(task, note=line["note"])
                return
            note = ""
            if "val_tau" in line:
                note = f"loss {line['loss']:.4f}  validation τ {line['val_tau']:.3f}"
            bar.update(task, total=line["epochs"], completed=line["epoch"], note=note)

        yield report


@contextmanager
def networks_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar that moves with the networks that are read."""
    with counting_bar(Console(stderr=True, quiet=quiet)) as bar:
        task = bar.add_task(what, total=1, note="networks")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def result_table(records: list[RunRecord], title: str) -> Table:
    """One row a predictor: τ ± standard error, R², mean error, how often the interval holds.

    Under τ stands that of all seeds together: of their mean, which is what `tnfn predict` answers.
    """
    table = Table(title=title)
    for name in ("model", "Kendall τ"):
        table.add_column(name, no_wrap=True)
    for name in ("R²", "error", "90 % holds", "size", "s"):
        table.add_column(name, justify="right")
    for record in sorted(records, key=lambda record: -_tau(record)):
        if record.status != "done":
            table.add_row(record.model, record.status)
            continue
        s = record.summary
        table.add_row(
            record.model,
            plus_minus(s["tau"], s["tau_se"]) + _together_text(record),
            decimal(s["r2"]),
            decimal(s["mae"], ".3f" if record.predicts.is_accuracy else ".3g"),
            f"{100 * s['coverage']:.1f} %",
            _size_text(record),
            f"{record.seeds[0]['seconds']:.1f}",
        )
    return table


def class_table(records: list[RunRecord], title: str) -> Table:
    """One row a predictor of classes: accuracy, AUROC, calibration, how often the set holds."""
    table = Table(title=title)
    table.add_column("model", no_wrap=True)
    for name in ("accuracy", "most frequent", "AUROC", "calibration error", "90 % holds", "size"):
        longest = max(map(len, name.split()))
        table.add_column(name, justify="right", min_width=longest)
    for record in sorted(records, key=lambda record: -record.summary["accuracy"]):
        s = record.summary
        table.add_row(
            record.model,
            plus_minus(s["accuracy"], s["accuracy_se"]),
            f"{s['chance']:.3f}",
            decimal(s["auroc"]),
            f"{s['calibration_error']:.3f}",
            f"{100 * s['coverage']:.1f} %",
            _size_text(record),
        )
    return table


def kinds_table(summary: Mapping[str, Any]) -> Table:
    """One row per kind of a mixed zoo, those left out of training last, and under them all."""
    table = Table(title="Kinds of networks: test parts, and all networks of those left out")
    table.add_column("kind", no_wrap=True)
    for name in ("networks", "Kendall τ", "R²", "error", "90 % holds"):
        table.add_column(name, justify="right")
    shown = list(summary["kinds"].items())
    shown += [(f"{kind}, left out", found) for kind, found in summary["left_out"].items()]
    for words, found in shown:
        held = f"{100 * found['coverage']:.1f} %" if "coverage" in found else ""
        table.add_row(
            words,
            str(found["networks"]),
            plus_minus(found["tau"], found["tau_se"]),
            decimal(found["r2"]),
            f"{found['mae']:.3f}",
            held,
        )
    table.add_row("mean within kinds", "", f"{summary['tau_within']:.3f}")
    return table


def tau_by_kind_table(records: Mapping[str, list[RunRecord]]) -> Table:
    """One row per predictor, τ ± standard error on each kind of zoo; best on the last kind first.

    Args:
        records: for every kind of seeds the runs on its zoo, a run per predictor.
    """
    table = Table(title="Kendall's τ on test networks never seen")
    table.add_column("model", no_wrap=True)
    for kind in records:
        table.add_column(seeds_text(kind), no_wrap=True, justify="right")
    table.add_column("size", justify="right")
    by_model: dict[str, dict[str, RunRecord]] = {}
    for kind, runs in records.items():
        for record in runs:
            by_model.setdefault(record.model, {})[kind] = record
    last = list(records)[-1]
    for model, row in sorted(by_model.items(), key=lambda item: -_tau(item[1].get(last))):
        cells = [tau_text(row.get(kind)) for kind in records]
        table.add_row(model, *cells, _size_text(next(iter(row.values()))))
    return table


def _tau(record: RunRecord | None) -> float:
    return -2.0 if record is None else float(record.summary.get("tau", -2))


def tau_text(record: RunRecord | None) -> str:
    """τ of a run ± its standard error, or why there is none."""
    if record is None or record.status != "done":
        return "–" if record is None else record.status
    return plus_minus(record.summary["tau"], record.summary["tau_se"])


def _together_text(record: RunRecord) -> str:
    together = record.summary.get("tau_together")
    if together is None or len(record.seeds) < 2:
        return ""
    return f"\ntogether {together:.3f}"


def _size_text(record: RunRecord) -> str:
    return "trees" if record.num_parameters is None else f"{record.num_parameters / 1e6:.3f} M"


def plus_minus(value: float, error: float | None) -> str:
    """``0.812 ± 0.004``, or the value alone where one seed gives no error."""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def decimal(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else format(value, form)
