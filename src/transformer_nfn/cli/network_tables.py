"""Networks and what is said of them, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from transformer_nfn.prediction.predict import Prediction


ROOM = 150
"""Columns of a screen on which a configuration has a column of its own."""


def predictions_table(found: Sequence[Prediction], width: int) -> Table:
    """One row a network; what a zoo recorded stands beside the prediction.

    Args:
        found: the predictions.
        width: of the screen; on a narrow one run and configuration stand below the name.
    """
    in_zoo, narrow = any(p.recorded is not None for p in found), width < ROOM
    table = Table(show_lines=in_zoo and narrow)
    table.add_column("network", overflow="fold")
    if in_zoo:
        if not narrow:
            table.add_column("run", overflow="fold")
            table.add_column("configuration")
        table.add_column("recorded", justify="right", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    for name in ("90 % interval", "seeds ±", "novelty"):
        table.add_column(name, no_wrap=True)
    for p in found:
        mark = "" if p.warning is None else " [yellow]⚠[/yellow]"
        table.add_row(
            *(_recorded(p, narrow) if in_zoo else (plain(p.name),)),
            f"{p.accuracy:.3f}",
            f"{p.low:.3f} to {p.high:.3f}",
            f"{p.spread:.3f}",
            f"{p.novelty:z.2f}{mark}",
        )
    return table


def _recorded(p: Prediction, narrow: bool) -> list[str]:
    """Name, run, configuration and recorded accuracy; on a narrow screen the first three in one."""
    recorded = p.recorded or {}
    name, how = plain(p.name), configuration_text(recorded)
    run, accuracy = plain(str(recorded.get("run") or "")), recorded.get("test_accuracy")
    told = "" if accuracy is None else f"{accuracy:.3f}"
    if narrow:
        return [f"{name}\n[dim]run {run}: {how}[/dim]" if run else name, told]
    return [name, run, how, told]


def configuration_text(recorded: Mapping[str, Any]) -> str:
    """How a run was trained, in one line; what is not known is not mentioned."""
    words = {
        "optimizer": "{}",
        "learning_rate": "lr {:g}",
        "l2": "l2 {:g}",
        "init_std": "std {:g}",
        "dropout": "dropout {:g}",
        "train_fraction": "of data {:g}",
    }
    told = [text.format(recorded[k]) for k, text in words.items() if recorded.get(k) is not None]
    if recorded.get("damage") is not None:
        told.append("{kind} {strength:g} of row {row}".format(**recorded["damage"]))
    return plain(", ".join(told))


def rows_table(rows: Iterable[Mapping[str, Any]], title: str) -> Table:
    """Rows of a zoo: run, configuration, checkpoint, recorded accuracy."""
    table = Table(title=plain(title))
    table.add_column("network", overflow="fold")
    table.add_column("run", overflow="fold")
    table.add_column("configuration")
    table.add_column("checkpoint")
    table.add_column("test accuracy", justify="right")
    for row in rows:
        epoch = f"epoch {row['epoch']} ({row['percent']} %)"
        accuracy = row["test_accuracy"]
        table.add_row(
            plain(row["name"]),
            plain(str(row["run"] or "")),
            configuration_text(row),
            (f"best, {epoch}" if row["epoch"] else "best") if row["best"] else epoch,
            "unknown" if accuracy is None else f"{accuracy:.4f}",
        )
    return table


def plain(text: str) -> str:
    """A text that rich shows as it is: brackets in the name of a file are no markup."""
    return text.replace("[", "\\[")
