"""The command ``tnfn zoo damage``: damaged relatives of a zoo's networks, with their accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from transformer_nfn.cli.console import echo_json
from transformer_nfn.cli.options import named


def damage(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="ZOO", help="The zoo: its folder, or its name.", callback=named("zoo")
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the damaged networks go.")],
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:STRENGTH],…",
            help="shuffled, tensor, block, exchanged, untrained, noise, pruned, quantised (all).",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Networks of each kind (one of each run).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other damage.")] = 0,
    percent: Annotated[int, typer.Option(help="Which checkpoint of each run: 50, 75, 100.")] = 75,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The task's files; fetched if not given."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where networks are tested: cpu or cuda.")
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for another program.")] = (
        False
    ),
) -> None:
    """Damage the networks of a zoo, test them and store them.

    For `tnfn train --damaged`, which makes predictors that detect broken networks. Entries of
    every tensor shuffled (by half, or all), one tensor or one block initialised anew, blocks
    exchanged between networks, untrained networks, noise, pruning, quantisation to few bits.
    Run the same command again to resume an interrupted one.

    [bold]Examples[/bold]

      tnfn zoo damage zoos/digits --out zoos/digits-damaged
      tnfn zoo damage mnist-sample --out damaged --kinds shuffled:1,noise
    """
    from transformer_nfn.cli.train import pick_device
    from transformer_nfn.zoo.summary import summarise
    from transformer_nfn.zoo.training.damage import damage_zoo

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("networks", total=None)
        zoo = damage_zoo(
            path,
            out,
            kinds=kinds,
            count=count,
            seed=seed,
            percent=percent,
            data=data,
            device=pick_device(device),
            tick=lambda done, total: bar.update(task, completed=done, total=total),
        )
    found = summarise(zoo)
    if as_json:
        echo_json(found)
        return
    typer.echo(f"{out}: {found['checkpoints']} damaged networks of {found['runs']} runs")
    for name, spread in found["by_damage"].items():
        typer.echo(
            f"  {name}: {spread['count']}, test accuracy {spread['min']:.1%} to "
            f"{spread['max']:.1%} (median {spread['median']:.1%})"
        )
