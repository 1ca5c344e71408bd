"""Networks and what is said of them, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from transformer_nfn.prediction.predict import Prediction


def predictions_table(found: Sequence[Prediction]) -> Table:
    """One row a network; what a zoo recorded stands beside the prediction."""
    in_zoo = any(p.recorded is not None for p in found)
    table = Table()
    table.add_column("network", overflow="fold")
    if in_zoo:
        table.add_column("run", overflow="fold")
        table.add_column("configuration")
        table.add_column("recorded", justify="right")
    table.add_column("predicted", justify="right")
    for name in ("90 % interval", "seeds differ by", "novelty"):
        table.add_column(name)
    for p in found:
        mark = "" if p.warning is None else " [yellow]⚠[/yellow]"
        table.add_row(
            plain(p.name),
            *(_recorded(p.recorded or {}) if in_zoo else ()),
            f"{p.accuracy:.3f}",
            f"{p.low:.3f} to {p.high:.3f}",
            f"{p.spread:.3f}",
            f"{p.novelty:.2f}{mark}",
        )
    return table


def _recorded(recorded: Mapping[str, Any]) -> tuple[str, str, str]:
    accuracy = recorded.get("test_accuracy")
    return (
        plain(str(recorded.get("run") or "")),
        configuration_text(recorded),
        "" if accuracy is None else f"{accuracy:.3f}",
    )


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
