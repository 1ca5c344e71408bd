"""`tnfn align`: move one network as close to another as its symmetries allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import SpinnerColumn
from rich.table import Table

from transformer_nfn.cli.console import echo_json, passing_bar
from transformer_nfn.cli.options import (
    ArchitectureOption,
    BaseOption,
    FamilyOption,
    JsonOption,
    NetworkArgument,
    SetOption,
    open_options,
)


def align_command(
    first: NetworkArgument,
    second: NetworkArgument,
    out: Annotated[Path, typer.Option("--out", help="A new folder (or file, if A is one).")],
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    base: BaseOption = None,
    rounds: Annotated[
        int | None, typer.Option(help="Limit of rounds over all blocks.", min=1)
    ] = None,
    untie: Annotated[
        bool,
        typer.Option(
            "--untie",
            help="Write a tied checkpoint untied: then orthogonal matrices act on its stream, not "
            "only permutations.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring network A as close to B as its symmetries allow.

    For merging and interpolation.

    The network that is written computes what A computes, which is checked by running both. Only
    weights are used, no data and no activations.

    [bold]Examples[/bold]

      tnfn align mine/ theirs/ --out aligned/

      tnfn align mnist-sample#0 mnist-sample#1 --out aligned.safetensors
    """
    from transformer_nfn.checkpoints.alignment import align
    from transformer_nfn.networks import check_base, resolve_network

    options = open_options(architecture, family, settings, base)
    networks = [resolve_network(name) for name in (first, second)]
    check_base(networks, options)
    limit: dict[str, Any] = {} if rounds is None else {"rounds": rounds}
    with (
        networks[0].open_model(options) as A,
        networks[1].open_model(options) as B,
        passing_bar(SpinnerColumn(), "aligning, block {task.fields[block]}") as bar,
    ):
        task = bar.add_task("align", total=None, block="")
        aligned = align(
            A, B, out, untie=untie, progress=lambda name: bar.update(task, block=name), **limit
        )
    if as_json:
        echo_json(aligned.as_json() | {"out": str(out)})
        return
    table = Table("part", "distance to B before", "after")
    for name, (before, after) in aligned.parts.items():
        table.add_row(name, f"{before:.4g}", f"{after:.4g}")
    table.add_section()
    table.add_row("all weights", f"{aligned.before:.4g}", f"{aligned.after:.4g}")
    console = Console()
    console.print(table)
    console.print(f"distance ‖A − B‖ / ‖B‖; stream: {aligned.action}; {aligned.rounds} rounds")
    typer.echo(
        f"wrote {out}: the function of {first} (outputs on random inputs differ by "
        f"{aligned.difference or 0.0:.1e}, rounding explains {aligned.noise:.1e})"
    )
    options = replace(options, base=None)  # what is written has its weights
    if options:
        typer.echo(f"open it with the same options: {options}")
