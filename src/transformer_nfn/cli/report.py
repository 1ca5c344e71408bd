"""The command ``tnfn report``: one page about any number of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUNS...", help="Run folders, or folders that hold some."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path(
        "report.html"
    ),
) -> None:
    """Writes one self-contained page: tables beside the paper's, figures, where predictors fail.

    Example: tnfn report runs --out report.html
    """
    from transformer_nfn.report import write_report

    write_report(runs, out)
    typer.echo(out)
