"""The command ``tnfn report``: one page about any number of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS",
            help="Run folders, folders that hold some, or names of predictors.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path(
        "report.html"
    ),
    zoo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ZOO",
            help="The zoo of the runs, by path or name: shows all of its networks, and names rows "
            "by this path. May be given several times.",
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML page about trained predictors.

    Tables beside those of the paper, figures, and the networks that predictors fail on.

    [bold]Examples[/bold]

      tnfn report runs --out report.html

      tnfn report runs --zoo zoo --out report.html

      tnfn report mnist-nfn mnist-boosting   # by name, see `tnfn assets`
    """
    from transformer_nfn.report import write_report

    write_report(runs, out, zoos=zoo or [])
    typer.echo(out)
