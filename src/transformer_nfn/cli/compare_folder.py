"""How does `tnfn compare --matrix` tell of all pairs of a folder? A bar, a table, a picture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from transformer_nfn.cli.output import echo_json, table_console

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import OpenOptions
    from transformer_nfn.checkpoints.pairs import AllPairs, Pair

LISTED = ("same", "same backbone", "derived", "partly", "embeddings only", "unclear", "failed")
"""Verdicts whose pairs are listed; the others are counted."""


def compare_folder(
    folder: Path,
    *,
    out: Path | None,
    engine: str,
    figure: Path | None,
    options: OpenOptions,
    json_output: bool,
) -> None:
    """Relates all pairs, and tells."""
    from transformer_nfn.checkpoints.pairs import draw_pairs, relate_folder

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("pairs"),
        TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("comparing", total=None)

        def show(done: int, total: int, last: Pair | None) -> None:
            words = "comparing" if last is None else f"{last.a} – {last.b}: {last.verdict}"
            bar.update(task, completed=done, total=total, description=words)

        result = relate_folder(
            folder, out=out, engine=engine, options=options, progress=show  # type: ignore[arg-type]
        )
    if figure is not None:
        draw_pairs(result, figure)
    if json_output:
        echo_json(result.as_json())
        return
    _show(result)
    if out is not None:
        typer.echo(f"wrote {out}: {len(result.pairs)} pairs")


def _show(result: AllPairs) -> None:
    listed = [pair for pair in result.pairs if pair.verdict in LISTED]
    if listed:
        table = Table("A", "B", "verdict", "score", "why")
        for p in sorted(listed, key=lambda p: -(p.score or 0.0)):
            score = "" if p.score is None else f"{p.score:.3f}"
            table.add_row(p.a, p.b, p.verdict, score, p.reason)
        table_console().print(table)
    counts = Counter(pair.verdict for pair in result.pairs)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    typer.echo(f"{len(result.models)} models, {len(result.pairs)} pairs: {told}")
    for group in result.groups():
        if len(group) > 1:
            typer.echo(f"related: {', '.join(group)}")
    apart = [pair for pair in result.pairs if pair.verdict == "not comparable"]
    if apart:
        typer.echo(f"not comparable, for one: {apart[0].reason}")
    for name, reason in result.not_read.items():
        typer.echo(f"not read: {name} ({reason})")
