"""`tnfn disguise`: write the same function with other weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
from rich.table import Table

from transformer_nfn.cli.console import passing_bar
from transformer_nfn.cli.options import (
    ArchitectureOption,
    FamilyOption,
    NetworkArgument,
    PartOption,
    SeedOption,
    SetOption,
    SpaceOption,
    named_network,
    open_options,
    refuse_options,
)

if TYPE_CHECKING:
    import torch

    from transformer_nfn.checkpoints.families import Model

CONDITION = 10.0
"""Default condition number of the matrices that act on a checkpoint."""


def disguise_command(
    file: NetworkArgument,
    out: Annotated[
        Path,
        typer.Option("--out", help="The file to write; a new folder where a folder is read."),
    ],
    space: SpaceOption = None,
    part: PartOption = None,
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    seed: SeedOption = 0,
    condition: Annotated[
        float | None,
        typer.Option(help="Condition number of every matrix; 10 for checkpoints."),
    ] = None,
    max_condition: Annotated[
        float, typer.Option(help="Without --condition: the worst allowed in the paper's spaces.")
    ] = 100.0,
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

    A random element of the symmetry group acts on the network.

    A checkpoint of a known family (see `tnfn architectures`) is written with every symmetry that
    it has, in the layout and dtype of its file, so that its own library loads it.

    [bold]Examples[/bold]

      tnfn disguise net.safetensors --out other.safetensors --seed 7

      tnfn disguise gpt2/ --out disguised/ --condition 10
    """
    import torch

    from transformer_nfn.networks import resolve_network, save_network

    options = open_options(architecture, family, settings)
    network = resolve_network(file)
    model = network.open_model(options) if space is None and part is None else None
    generator = torch.Generator().manual_seed(seed)
    if model is not None:
        with model:
            _checkpoint(
                model, file, out, generator, CONDITION if condition is None else condition, keep_tie
            )
        if options:
            typer.echo(f"open it with the same options: {options}")
        return
    refuse_options(file, options, keep_tie=keep_tie)
    weight_space, weights = named_network(network, space, part)
    element = weight_space.group.random(generator, max_condition=max_condition, condition=condition)
    save_network(out, weight_space, element.act(weights))
    what = file if part is None else f"{part} of {file}"
    typer.echo(f"wrote {out}: the function of {what} with other weights")


def _checkpoint(
    model: Model,
    file: str,
    out: Path,
    generator: torch.Generator,
    condition: float,
    keep_tie: bool,
) -> None:
    from transformer_nfn.checkpoints.disguises import disguise

    width = model.dtype.itemsize
    total = sum(math.prod(shape) for shape in model.names.values()) * width
    columns = ("disguising", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with passing_bar(*columns) as bar:
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
