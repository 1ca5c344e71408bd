"""Tables of networks, their configurations and predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.console import WIDE
from transformer_nfn.zoo.targets import names_accuracy

if TYPE_CHECKING:
    from transformer_nfn.prediction.predict import Prediction


def predictions_table(predictions: Sequence[Prediction], console: Console) -> Table:
    """Table of predictions, beside the value that a zoo recorded.

    Run and configuration, if any is recorded, and spread of the seeds are shown where the terminal
    is wide enough.
    """
    table = _predictions(predictions, wide=True)
    return table if _fits(table, console) else _predictions(predictions, wide=False)


def unique_mappings(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Where the tensors of own modules stand in their files: the ends and the first block.

    Files of one mapping are described once.
    """
    shown: list[Mapping[str, str]] = []
    for p in predictions:
        if p.mapping is None or p.mapping in shown:
            continue
        shown.append(p.mapping)
        blocks = {int(name.partition(".")[0]) for name in p.mapping if name[0].isdecimal()}
        first = [n for n in p.mapping if not n[0].isdecimal() or n.startswith("0.")]
        alike = "" if len(blocks) < 2 else ", other blocks alike"
        lines = (f"  {name} ← {p.mapping[name]}" for name in first)
        yield "\n".join([f"mapping of {p.name}{alike}:", *lines])


def _predictions(predictions: Sequence[Prediction], wide: bool) -> Table:
    in_zoo = any(p.recorded is not None for p in predictions)
    recorded = [(p.recorded or {}).get("run") for p in predictions]
    runs = ["" if run is None else _plain(str(run)) for run in recorded]
    configurations = [_configuration(p.recorded or {}) for p in predictions]
    table = Table() if wide else _frameless()
    table.add_column("network", overflow="fold")
    if wide and any(runs):
        table.add_column("run", overflow="fold")
    if wide and any(configurations):
        table.add_column("configuration")
    if in_zoo:
        table.add_column("recorded", justify="right", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    for name in ("interval", "coverage", *(["seeds ±"] if wide else []), "novelty"):
        table.add_column(name, no_wrap=True)
    for p, run, configuration in zip(predictions, runs, configurations, strict=True):
        mark = "" if p.warning is None else " [yellow]⚠[/yellow]"
        table.add_row(
            _plain(p.name),
            *([run] if wide and any(runs) else []),
            *([configuration] if wide and any(configurations) else []),
            *([_recorded(p)] if in_zoo else []),
            _value(p, p.value) if p.label is None else f"{_plain(p.label)} {p.value:.3f}",
            _plain(" or ".join(p.labels))
            if p.low is None or p.high is None
            else f"{_value(p, p.low)} to {_value(p, p.high)}",
            "unknown" if p.coverage is None else f"{100 * p.coverage:g} %",
            *(["–" if p.spread is None else _value(p, p.spread)] if wide else []),
            f"{p.novelty:z.2f}{mark}",
        )
    return table


def _value(p: Prediction, value: float) -> str:
    """A value of the target: three digits behind the point for accuracies, else four in all."""
    return f"{value:.3f}" if names_accuracy(p.target) else f"{value:.4g}"


def _recorded(p: Prediction) -> str:
    """The recorded value of the target."""
    known = (p.recorded or {}).get(p.target)
    return "" if known is None else _plain(known) if isinstance(known, str) else _value(p, known)


def _configuration(recorded: Mapping[str, Any]) -> str:
    """Training configuration of a run in one line, without unknown fields."""
    words = {
        "optimizer": "{}",
        "learning_rate": "lr {:g}",
        "l2": "l2 {:g}",
        "init_std": "std {:g}",
        "dropout": "dropout {:g}",
        "train_fraction": "of data {:g}",
    }
    parts = [text.format(recorded[k]) for k, text in words.items() if recorded.get(k) is not None]
    if recorded.get("damage") is not None:
        parts.append("{kind} {strength:g} of row {row}".format(**recorded["damage"]))
    return _plain(", ".join(parts))


def rows_table(rows: Sequence[Mapping[str, Any]], title: str, console: Console) -> Table:
    """Table of the rows of a zoo: run, configuration, checkpoint, recorded accuracy."""
    table = _rows(rows, Table(title=_plain(title)))
    return table if _fits(table, console) else _rows(rows, _frameless(_plain(title)))


def _frameless(title: str | None = None) -> Table:
    """A table for narrow terminals: columns are two spaces apart."""
    return Table(title=title, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _fits(table: Table, console: Console) -> bool:
    """Whether no cell of a table would be wrapped."""
    return Console(width=WIDE).measure(table).maximum <= console.width


def _rows(rows: Sequence[Mapping[str, Any]], table: Table) -> Table:
    table.add_column("network", overflow="fold")
    table.add_column("run", overflow="fold")
    table.add_column("configuration")
    table.add_column("checkpoint")
    table.add_column("accuracy", justify="right")
    for row in rows:
        accuracy = row["test_accuracy"]
        table.add_row(
            _plain(row["name"]),
            _plain(str(row["run"] or "")),
            _configuration(row),
            _checkpoint(row),
            "unknown" if accuracy is None else f"{accuracy:.4f}",
        )
    return table


def _checkpoint(row: Mapping[str, Any]) -> str:
    """Epoch of a checkpoint; the best one of a run has no percentage, and maybe no known epoch."""
    if row["best"]:
        return f"best, epoch {row['epoch']}" if row["epoch"] else "best"
    return f"epoch {row['epoch']} ({row['percent']} %)"


def _plain(text: str) -> str:
    """Escape brackets, which rich reads as markup."""
    return text.replace("[", "\\[")
