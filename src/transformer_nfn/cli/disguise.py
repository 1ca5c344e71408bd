"""`tnfn disguise`: write the same function with other weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
from rich.table import Table

from transformer_nfn.cli.console import passing_bar
from transformer_nfn.cli.options import (
    ArchitectureOption,
    BaseOption,
    FamilyOption,
    NetworkArgument,
    SeedOption,
    SetOption,
    open_options,
)


def disguise_command(
    file: NetworkArgument,
    out: Annotated[
        Path,
        typer.Option("--out", help="The file to write; a new folder where a folder is read."),
    ],
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    base: BaseOption = None,
    seed: SeedOption = 0,
    condition: Annotated[
        float, typer.Option(help="Condition number of every matrix that acts.")
    ] = 10.0,
    keep_tie: Annotated[
        bool,
        typer.Option(
            "--keep-tie",
            help="Keep the output matrix tied to the token embedding; else a tied checkpoint is "
            "written untied.",
        ),
    ] = False,
) -> None:
    """Write the same function with other weights.

    A random element of the symmetry group acts on a checkpoint of a known family (see `tnfn
    architectures`). It is written in the layout and dtype of its file, so that its own library
    loads it.

    [bold]Examples[/bold]

      tnfn disguise mnist-sample#0 --out other.safetensors --seed 7

      tnfn disguise gpt2/ --out disguised/ --condition 10
    """
    import torch

    from transformer_nfn.checkpoints.disguises import disguise
    from transformer_nfn.networks import check_base, resolve_network

    options = open_options(architecture, family, settings, base)
    network = resolve_network(file)
    check_base([network], options)
    generator = torch.Generator().manual_seed(seed)
    columns = ("disguising", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with network.open_model(options) as model, passing_bar(*columns) as bar:
        width = model.dtype.itemsize
        total = sum(math.prod(shape) for shape in model.names.values()) * width
        task = bar.add_task("disguise", total=total)
        done = disguise(
            model, out, generator, condition=condition, keep_tie=keep_tie,
            progress=lambda weights: bar.advance(task, weights * width),
        )  # fmt: skip
    table = Table("symmetry", "times")
    for name, times in done.acted.items():
        if times:
            table.add_row(name, str(times))
    Console().print(table)
    if model.description.tied and not done.description.tied:
        typer.echo("the output matrix was the token embedding and is its own now (--keep-tie)")
    typer.echo(f"wrote {out}: the function of {file} with other weights")
    options = replace(options, base=None)  # what is written has its weights
    if options:
        typer.echo(f"open it with the same options: {options}")
