"""What a user sees while predictors are trained: bars for epochs and cells, and result tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from transformer_nfn.paper.numbers import NOTHING, mean_text

if TYPE_CHECKING:
    from transformer_nfn.prediction.runs import RunRecord


@contextmanager
def counting_bar(
    what: str, total: int = 1, note: str = "", *, quiet: bool = False
) -> Iterator[tuple[Progress, TaskID]]:
    """A bar with a count, a note and the time, and its task, which has the field ``note``."""
    console = Console(stderr=True, quiet=quiet)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        yield bar, bar.add_task(what, total=total, note=note)


@contextmanager
def trainings_bar(
    what: str, total: int, *, quiet: bool = False
) -> Iterator[Callable[[str, Mapping[str, Any]], None]]:
    """A bar over several trainings, moved by the name of one and a line of its progress.

    Its last line has ``result``, a text that is printed.
    """
    with counting_bar(what, total, quiet=quiet) as (bar, task):

        def report(name: str, line: Mapping[str, Any]) -> None:
            if "result" in line:
                bar.console.print(f"{name}: {line['result']}", highlight=False)
                bar.advance(task)
            elif "note" in line:
                bar.update(task, note=f"{name}, {line['note']}")
            elif "epoch" in line:
                bar.update(task, note=f"{name}, epoch {line['epoch']}/{line['epochs']}")

        yield report


@contextmanager
def epochs_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar that moves with the epochs a training reports."""
    with counting_bar(what, quiet=quiet) as (bar, task):

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
    with counting_bar(what, note="networks", quiet=quiet) as (bar, task):
        yield lambda done, total: bar.update(task, completed=done, total=total)


def result_table(records: list[RunRecord], title: str) -> Table:
    """One row a predictor: τ ± standard error, R², mean error, how often the interval holds.

    Under τ stands that of all seeds together: of their mean, which is what `tnfn predict` answers.
    """
    columns = ("R²", "error", "90 % holds", "size", "s")
    table = _table(title, ("model", "Kendall τ"), columns)
    for record in sorted(records, key=_rank):
        if record.status != "done":
            table.add_row(record.model, record.status)
            continue
        s = record.summary
        together = s.get("tau_together") if len(record.seeds) > 1 else None
        table.add_row(
            record.model,
            tau_text(record) + ("" if together is None else f"\ntogether {mean_text(together)}"),
            mean_text(s["r2"]),
            mean_text(s["mae"]) if record.predicts.is_accuracy else f"{s['mae']:.3g}",
            _percent(s),
            _size_text(record),
            f"{record.seeds[0]['seconds']:.1f}",
        )
    return table


def class_table(records: list[RunRecord], title: str) -> Table:
    """One row a predictor of classes: accuracy, AUROC, calibration, how often the set holds."""
    columns = ("accuracy", "most frequent", "AUROC", "calibration error", "90 % holds", "size")
    table = _table(title, ("model",), columns)
    for record in sorted(records, key=lambda record: -record.summary["accuracy"]):
        s = record.summary
        table.add_row(
            record.model,
            mean_text(s["accuracy"], s["accuracy_se"]),
            *(mean_text(s[name]) for name in ("chance", "auroc", "calibration_error")),
            _percent(s),
            _size_text(record),
        )
    return table


def kinds_table(summary: Mapping[str, Any]) -> Table:
    """One row per kind of a mixed zoo, those left out of training last, and under them all."""
    title = "Kinds of networks: test parts, and all networks of those left out"
    table = _table(title, ("kind",), ("networks", "Kendall τ", "R²", "error", "90 % holds"))
    shown = list(summary["kinds"].items())
    shown += [(f"{kind}, left out", found) for kind, found in summary["left_out"].items()]
    for words, found in shown:
        tau = mean_text(found["tau"], found["tau_se"])
        scores = (mean_text(found["r2"]), mean_text(found["mae"]))
        held = _percent(found) if "coverage" in found else ""
        table.add_row(words, str(found["networks"]), tau, *scores, held)
    table.add_row("mean within kinds", "", mean_text(summary["tau_within"]))
    return table


def tau_by_kind_table(records: Mapping[str, list[RunRecord]]) -> Table:
    """One row per predictor, τ ± standard error on each kind of zoo; best on the last kind first.

    Args:
        records: for every kind of seeds the runs on its zoo, a run per predictor.
    """
    columns = (*map(seeds_text, records), "size")
    table = _table("Kendall's τ on test networks never seen", ("model",), columns)
    by_model: dict[str, dict[str, RunRecord]] = {}
    for kind, runs in records.items():
        for record in runs:
            by_model.setdefault(record.model, {})[kind] = record
    last = list(records)[-1]
    for model, row in sorted(by_model.items(), key=lambda item: _rank(item[1].get(last))):
        cells = [tau_text(row.get(kind)) for kind in records]
        table.add_row(model, *cells, _size_text(next(iter(row.values()))))
    return table


def tau_text(record: RunRecord | None) -> str:
    """τ of a run ± its standard error, or why there is none."""
    if record is None or record.status != "done":
        return NOTHING if record is None else record.status
    return mean_text(record.summary["tau"], record.summary["tau_se"])


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table with columns of text and of numbers."""
    table = Table(title=title)
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    return table


def _rank(record: RunRecord | None) -> float:
    """Sorts the highest τ first."""
    return 2.0 if record is None else -float(record.summary.get("tau", -2))


def _percent(summary: Mapping[str, Any]) -> str:
    return f"{100 * summary['coverage']:.1f} %"


def _size_text(record: RunRecord) -> str:
    return "trees" if record.num_parameters is None else f"{record.num_parameters / 1e6:.3f} M"
