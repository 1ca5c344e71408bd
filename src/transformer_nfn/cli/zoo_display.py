"""Display of zoos in the terminal: the progress of a build, rows, and summaries as tables."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transformer_nfn.cli.console import echo_json, table_console
from transformer_nfn.cli.options import check_values
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.known_tasks import seeds_text
from transformer_nfn.zoo.training.plan import Progress

if TYPE_CHECKING:
    from transformer_nfn.zoo import Zoo


class BuildBar(Progress):
    """Progress bar of a build: runs, speed, time left."""

    def __init__(self, console: Console) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.fields[runs]}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("network-epochs {task.fields[speed]}"),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("build", total=None, runs="starting", speed="")
        self._runs = self._done = self._crashed = self._work = 0
        self._since = time.perf_counter()

    def __enter__(self) -> BuildBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, runs: int, done: int, work: int, note: str) -> None:
        """A build begins: ``done`` of ``runs`` are finished, ``work`` network-epochs are left."""
        self._runs, self._done = runs, done
        self._since = time.perf_counter()
        self._bar.update(self._task, total=work)
        if done:
            note = f"{done} of {runs} runs are there already; {note}"
        self._bar.console.print(note, highlight=False)
        self._show()

    def trained(self, network_epochs: int) -> None:
        """That many networks finished an epoch."""
        self._work += network_epochs
        self._bar.update(self._task, advance=network_epochs)
        self._show()

    def finished(self, shard: str, runs: int, crashed: int) -> None:
        """A shard was written."""
        self._done += runs
        self._crashed += crashed
        self._show()

    def note(self, text: str) -> None:
        """A message for the user."""
        self._bar.console.print(text, highlight=False)

    def _show(self) -> None:
        speed = self._work / max(time.perf_counter() - self._since, 1e-9)
        self._bar.update(
            self._task,
            runs=f"{self._done}/{self._runs} runs, {self._crashed} crashed",
            speed=f"{speed:.1f}/s",
        )


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print the result of `zoo.summary.summarise` as two tables and a histogram."""
    from transformer_nfn.zoo.sizes import SizeGroup

    state = "" if summary["finished"] else " (not finished)"
    facts = Table(title=f"{summary['path']}{state}", show_header=False)
    epochs = ", ".join(f"{n} at epoch {e}" for e, n in summary["by_epoch"].items())
    for name, value in (
        ("task", summary["task"]),
        ("origin", f"{summary['origin']} by {summary['made_by']}"),
        ("runs", f"{summary['runs']:,} and {summary['crashed']:,} crashed"),
        ("seeds", seeds_text(summary["seeds"])),
        ("checkpoints", f"{summary['checkpoints']:,}: {epochs}, {summary['best']} best"),
        ("weights a network", f"{summary['weights']:,}: {SizeGroup(**summary['network'])}"),
        ("on disk", f"{summary['bytes'] / 2**20:.1f} MiB"),
    ):
        facts.add_row(name, str(value))
    console.print(facts)
    spread = Table("optimizer", "checkpoints", "min", "median", "max", title="test accuracy")
    parts = [*summary["by_optimizer"].items(), ("all", summary["accuracy"])]
    for name, q in [*parts, *summary.get("by_damage", {}).items()]:
        if q["count"]:
            cells = [f"{q[k]:.1%}" for k in ("min", "median", "max")]
            spread.add_row(name or "unknown", f"{q['count']:,}", *cells)
    console.print(spread)
    counts, edges = summary["histogram"]["counts"], summary["histogram"]["edges"]
    top = max([*counts, 1])
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(40 * count / top)
        console.print(f"{low:>5.0%} to {high:<4.0%} {count:>7,} {bar}", highlight=False)


def print_mixed(console: Console, summary: dict[str, Any]) -> None:
    """Print the result of `zoo.summary.summarise` for several sizes, with a line for each."""
    state = "" if summary["finished"] else " (not finished)"
    title = f"{summary['path']}{state}: {summary['task']}, {seeds_text(summary['seeds'])}"
    table = Table(title=title)
    table.add_column("kind", no_wrap=True)
    for column in ("weights", "runs", "crashed", "networks", "min", "median", "max", "MiB"):
        table.add_column(column, justify="right")
    for name, part in [*summary["kinds"].items(), ("all", summary)]:
        unknown = "" if part["accuracy"]["count"] else "unknown"
        table.add_row(
            name,
            f"{part['weights']:,}" if "weights" in part else "",
            *(f"{part[count]:,}" for count in ("runs", "crashed", "checkpoints")),
            *(unknown or f"{part['accuracy'][k]:.1%}" for k in ("min", "median", "max")),
            f"{part['bytes'] / 2**20:.1f}",
        )
    console.print(table)
    if summary["missing"]:
        console.print(f"not begun: {', '.join(summary['missing'])}", highlight=False)


def matching_rows(
    zoo: Zoo,
    wanted: Mapping[str, Sequence[Any]],
    min_accuracy: float | None,
    max_accuracy: float | None,
) -> list[int]:
    """Rows whose targets have one of the wanted values each, and an accuracy between the bounds.

    A run is the value of that target; without one, each network is a run of its name.
    """
    from transformer_nfn.zoo.summary import needed_accuracies

    rows = [*range(len(zoo))]
    for name, values in wanted.items():
        column = "network" if name == "run" and name not in zoo.targets else name
        if not values:
            continue
        if column not in zoo.table:
            raise TransformerNFNError(
                f"'{zoo.path}' has no target '{name}': it has {', '.join(zoo.targets) or 'none'}"
            )
        texts = [_cell(value) for value in zoo.table[column].tolist()]
        accepted = [str(value) for value in values]
        check_values(str(zoo.path), name, {*texts}, accepted)
        rows = [row for row in rows if texts[row] in accepted]
    if min_accuracy is None and max_accuracy is None:
        return rows
    accuracy = zoo.targets[needed_accuracies(zoo)]
    low, high = min_accuracy or 0.0, 1.0 if max_accuracy is None else max_accuracy
    return [row for row in rows if low <= accuracy[row] <= high]


def list_rows(zoo: Zoo, name: str, rows: Sequence[int], as_json: bool) -> None:
    """Print some rows of a zoo with their targets."""
    hidden = ("checksum", "bytes", "shard")
    records: list[dict[str, Any]] = [
        {"name": f"{name}#{i}", "row": i}
        | {key: value for key, value in zoo.config(i).items() if key not in hidden}
        for i in rows
    ]
    if as_json:
        echo_json(records)
        return
    columns = [column for column in zoo.table if column not in hidden]
    title = f"{name}: {len(rows):,} of {len(zoo):,} rows"
    table = Table("row", *map(escape, columns), title=escape(title))
    for record in records:
        cells = (_cell(record[column]) for column in columns)
        table.add_row(escape(record["name"]), *map(escape, cells))
    table_console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:g}"
    return str(value)


def print_named(console: Console, summary: dict[str, Any]) -> None:
    """Print the result of `zoo.summary.summarise` for a zoo of a user."""
    families = ", ".join(f"{n:,} {name}" for name, n in summary.get("families", {}).items())
    if "layout" in summary:
        families = f"{summary['weights']:,} weights in {len(summary['layout'])} tensors each"
    title = f"{summary['path']}: {summary['networks']:,} networks"
    table = Table("target", "min", "median", "max", "missing", title=escape(title))
    for name, target in summary["targets"].items():
        if "values" in target:
            values = ", ".join(f"{value} ({n})" for value, n in target["values"].items())
            more = target["distinct"] - len(target["values"])
            text = f"{values} and {more:,} more" if more else values
            cells = [escape(text), "", ""]
        else:
            cells = [f"{target[k]:g}" if k in target else "" for k in ("min", "median", "max")]
        missing = f"{target['missing']:,}" if "missing" in target else ""
        table.add_row(escape(name), *cells, missing)
    console.print(table)
    console.print(
        f"{families or 'no networks'}; {summary['bytes'] / 2**20:.1f} MiB", highlight=False
    )
