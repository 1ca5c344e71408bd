"""The command that looks at one checkpoint: what is in it, and what acts on it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from transformer_nfn.cli.options import (
    ArchitectureOption,
    FamilyOption,
    JsonOption,
    NetworkArgument,
    PartOption,
    SetOption,
    SpaceOption,
    named_network,
    open_options,
    refuse_options,
)
from transformer_nfn.cli.output import echo_json

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model
    from transformer_nfn.checkpoints.inspection import BlockReport, Inspection


def inspect_command(
    file: NetworkArgument,
    space: SpaceOption = None,
    part: PartOption = None,
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", help="Draw the spectra into this file (png, pdf or svg)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report sizes, symmetries, spectra, dead and duplicate units.

    A checkpoint is read block by block. Spectra are those of the reduced form (norms folded in),
    which every disguise of the checkpoint shares.

    [bold]Examples[/bold]

      tnfn inspect gpt2/

      tnfn inspect gpt2/ --figure spectra.png

      tnfn inspect mnist-sample#0 --json
    """
    from transformer_nfn.checkpoints.inspection import draw_spectra, inspect_network
    from transformer_nfn.networks import resolve_network

    options = open_options(architecture, family, settings)
    network = resolve_network(file)
    model = network.open_model(options) if space is None and part is None else None
    if model is not None:
        with model:
            found = _inspect(model)
    else:
        refuse_options(options, file)
        network.check_no_nan()
        found = inspect_network(file, *named_network(network, space, part))
    if figure is not None:
        draw_spectra(found, figure)
    if as_json:
        echo_json(found.as_json())
        return
    _print(Console(), found)
    if figure is not None:
        typer.echo(f"wrote {figure}")


def _inspect(model: Model) -> Inspection:
    from transformer_nfn.checkpoints.inspection import inspect

    console = Console(stderr=True)
    blocks = sum(len(stack.blocks) for stack in model.about.stacks)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("blocks", total=blocks)
        return inspect(model, lambda _: bar.advance(task))


def _print(console: Console, found: Inspection) -> None:
    from transformer_nfn.checkpoints.inspection import DEAD, DUPLICATE
    from transformer_nfn.checkpoints.inspection.tensors import axis_actions

    console.print(f"[bold]{found.where}[/bold]: {found.family}")
    console.print(", ".join(f"{name} {_said(value)}" for name, value in found.sizes.items()))
    for tie in found.ties:
        console.print(f"tied: {tie}")
    tensors = Table("tensor", "count", "shape", "axes")
    for line in found.tensors:
        shape = " × ".join(str(n) for n in line.shape)
        tensors.add_row(line.name, str(line.times), shape, " ".join(line.axes))
    console.print(tensors)
    axes = Table("axis", "what acts on it")
    for name, acts in axis_actions(found.tensors).items():
        axes.add_row(name, "; ".join(acts) or "–")
    console.print(axes)
    group = Table("symmetry", "places", "continuous parameters", "log10 of permutations and signs")
    for row in found.symmetries:
        finite = f"{row.finite:,.1f}" if row.finite else "–"
        group.add_row(
            row.name, str(row.times), f"{row.continuous:,}" if row.continuous else "–", finite
        )
    group.add_section()
    group.add_row("the group", "", f"{found.continuous:,}", f"{found.finite:,.1f}")
    console.print(group)
    if found.blocks:
        console.print(_blocks(found.blocks))
        console.print(
            "spectra: largest singular value · stable rank (‖W‖²F / ‖W‖²₂), over heads. dead: at "
            f"most {DEAD:g} of the block's median; alike: cosine at least {DUPLICATE}."
        )


def _blocks(blocks: tuple[BlockReport, ...]) -> Table:
    from transformer_nfn.checkpoints.inspection.words import repeats_in_words, spectrum_in_words

    maps = list(dict.fromkeys(name for block in blocks for name in block.spectra))
    table = Table("block", *maps, "heads", "neurons")
    for block in blocks:
        spectra = [
            spectrum_in_words(block.spectra[name]) if name in block.spectra else "" for name in maps
        ]
        heads = "; ".join(
            repeats_in_words(r) if not part else f"{part}{repeats_in_words(r)}"
            for part, r in block.heads.items()
        )
        table.add_row(block.name, *spectra, heads, repeats_in_words(block.neurons))
    return table


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return " + ".join(f"{n} {name}" if len(value) > 1 else f"{n}" for name, n in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def register(app: typer.Typer) -> None:
    """Adds the command to the root."""
    app.command("inspect")(inspect_command)
