"""Fits a guard beside a run folder that is kept, without training its predictors again.

python tools/guard_run.py RUN ZOO DAMAGED… [--hold-out KINDS] [--split-seed 0]

RUN: a run folder, changed in place (guard.safetensors, and `guarded` in its run.json).
ZOO: networks of its sizes that are new to it, or the zoo and split it was trained on.
DAMAGED: one or several, from `tnfn zoo damage ZOO`.
For runs from before guards, and for guards from before a change of their rules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from transformer_nfn.cli.console import explained
from transformer_nfn.prediction.guard.fit import guard_run
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import parse_damages

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="A run folder, as `tnfn train` writes it.")],
    zoo: Annotated[Path, typer.Argument(help="A zoo folder.")],
    damaged: Annotated[list[Path], typer.Argument(help="Damaged relatives of its networks.")],
    hold_out: Annotated[str, typer.Option(help="Kinds of damage to ignore.")] = "",
    split_seed: Annotated[int, typer.Option(help="As the run was trained with.")] = 0,
) -> None:
    """Fits the guard and prints how it does on healthy test networks."""
    relatives = [Zoo.open(folder) for folder in damaged]
    ignored = parse_damages(hold_out) if hold_out else None
    record = guard_run(run, Zoo.open(zoo), relatives, hold_out=ignored, split_seed=split_seed)
    typer.echo(json.dumps(record.summary["guarded"]))


if __name__ == "__main__":
    with explained():
        app()
