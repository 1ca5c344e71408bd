"""A zoo's summary as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from transformer_nfn.seed_kinds import seeds_text
from transformer_nfn.zoo.sizes import Kind


def print_summary(console: Console, found: dict[str, Any]) -> None:
    """What `zoo.summary.summarise` found, as two tables and a histogram."""
    state = "" if found["finished"] else " (not finished)"
    facts = Table(title=f"{found['path']}{state}", show_header=False)
    epochs = ", ".join(f"{n} at epoch {e}" for e, n in found["by_epoch"].items())
    for name, value in (
        ("task", found["task"]),
        ("origin", f"{found['origin']} by {found['made_by']}"),
        ("runs", f"{found['runs']:,} and {found['crashed']:,} crashed"),
        ("seeds", seeds_text(found["seeds"])),
        ("checkpoints", f"{found['checkpoints']:,}: {epochs}, {found['best']} best"),
        ("weights a network", f"{found['weights']:,}: {Kind(**found['network'])}"),
        ("on disk", f"{found['bytes'] / 2**20:.1f} MiB"),
    ):
        facts.add_row(name, str(value))
    console.print(facts)
    spread = Table("optimizer", "checkpoints", "min", "median", "max", title="test accuracy")
    for name, q in [*found["by_optimizer"].items(), ("all", found["accuracy"])]:
        if q["count"]:
            cells = [f"{q[k]:.1%}" for k in ("min", "median", "max")]
            spread.add_row(name or "unknown", f"{q['count']:,}", *cells)
    for name, q in found.get("by_damage", {}).items():
        spread.add_row(name, f"{q['count']:,}", *(f"{q[k]:.1%}" for k in ("min", "median", "max")))
    console.print(spread)
    counts, edges = found["histogram"]["counts"], found["histogram"]["edges"]
    top = max([*counts, 1])
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(40 * count / top)
        console.print(f"{low:>5.0%} to {high:<4.0%} {count:>7,} {bar}", highlight=False)


def print_kinds(console: Console, found: dict[str, Any]) -> None:
    """What `zoo.summary.summarise_mixed` found, as a table with a line for each kind."""
    state = "" if found["finished"] else " (not finished)"
    title = f"{found['path']}{state}: {found['task']}, {seeds_text(found['seeds'])}"
    table = Table(title=title)
    table.add_column("kind", no_wrap=True)
    for column in ("weights", "runs", "crashed", "networks", "min", "median", "max", "MiB"):
        table.add_column(column, justify="right")
    for name, kind in [*found["kinds"].items(), ("all", found)]:
        unknown = "" if kind["accuracy"]["count"] else "unknown"
        table.add_row(
            name,
            f"{kind['weights']:,}" if "weights" in kind else "",
            *(f"{kind[count]:,}" for count in ("runs", "crashed", "checkpoints")),
            *(unknown or f"{kind['accuracy'][k]:.1%}" for k in ("min", "median", "max")),
            f"{kind['bytes'] / 2**20:.1f}",
        )
    console.print(table)
    if found["missing"]:
        console.print(f"not begun: {', '.join(found['missing'])}", highlight=False)
