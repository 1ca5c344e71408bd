"""`tnfn inspect`: sizes, symmetries, spectra and redundant units of one network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.console import echo_json, passing_bar
from transformer_nfn.cli.options import (
    ArchitectureOption,
    FamilyOption,
    JsonOption,
    NetworkArgument,
    SetOption,
    open_options,
)
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from torch import Tensor

    from transformer_nfn.checkpoints.inspection import BlockReport, Inspection
    from transformer_nfn.checkpoints.units import Redundancy
    from transformer_nfn.networks import Network

FETCH = "which are large and not on this machine: fetch them first by `hf download`"


def inspect_command(
    file: NetworkArgument,
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

    A checkpoint is read block by block; of a large model of a hub only the headers are fetched,
    which show sizes and symmetries. Spectra are those of the reduced form (norms folded in),
    which every disguise of the checkpoint shares. Of an adapter (LoRA) rank, targets and the
    spectra of its changes are reported.

    [bold]Examples[/bold]

      tnfn inspect gpt2/

      tnfn inspect gpt2/ --figure spectra.png

      tnfn inspect openai-community/gpt2   # of a hub

      tnfn inspect mnist-sample#0 --json
    """
    from transformer_nfn.checkpoints.inspection import draw_spectra, inspect
    from transformer_nfn.networks import resolve_network

    options = open_options(architecture, family, settings)
    network = resolve_network(file)
    if network.location.is_adapter:
        if figure is not None:
            raise TransformerNFNError(f"--figure draws blocks, and '{file}' is an adapter (LoRA)")
        _inspect_adapter(network, as_json)
        return
    outlined = network.location.is_large
    if outlined and figure is not None:
        raise TransformerNFNError(f"--figure draws the weights of '{file}', {FETCH}")
    opened = network.open_outline if outlined else network.open_model
    with opened(options) as model, passing_bar() as bar:
        task = bar.add_task("blocks", total=len(model.description.blocks))
        report = inspect(model, lambda _: bar.advance(task), weights=not outlined)
    if outlined:
        typer.echo(f"no spectra and units: they need the weights, {FETCH}", err=True)
    if figure is not None:
        draw_spectra(report, figure)
    if as_json:
        echo_json(report.as_json())
        return
    _print(Console(), report)
    if figure is not None:
        typer.echo(f"wrote {figure}")


def _inspect_adapter(network: Network, as_json: bool) -> None:
    from transformer_nfn.checkpoints.adapters import effective_rank, inspect_adapter

    with network.open_adapter() as adapter:
        report = inspect_adapter(adapter)
    if as_json:
        echo_json(report.as_json())
        return
    console = Console()
    base = report.base or "an unnamed base"
    console.print(f"[bold]{report.where}[/bold]: LoRA adapter of {base}")
    table = Table(
        "matrix", "times", "rank", "scale", "norm", "largest singular value", "effective rank"
    )
    for target, changes in report.targets().items():
        ranks = sorted({change.rank for change in changes})
        scales = sorted({change.scale for change in changes})
        columns = (
            [change.norm for change in changes],
            [float(change.values[0]) for change in changes],
            [effective_rank(change.values) for change in changes],
        )
        spans = (f"{min(column):.3g}–{max(column):.3g}" for column in columns)
        table.add_row(
            target, str(len(changes)), ", ".join(map(str, ranks)),
            ", ".join(f"{scale:g}" for scale in scales), *spans,
        )  # fmt: skip
    console.print(table)
    console.print(
        f"free in the inner bases: {report.free:,} parameters; norm, singular values and effective "
        "rank are those of scale · B A"
    )
    for name in report.replaced:
        console.print(f"stored in full: {name}")


def _print(console: Console, report: Inspection) -> None:
    from transformer_nfn.checkpoints.inspection import axis_actions
    from transformer_nfn.checkpoints.units import DEAD, DUPLICATE

    console.print(f"[bold]{report.where}[/bold]: {report.family}")
    console.print(", ".join(f"{name} {_text(value)}" for name, value in report.sizes.items()))
    for tie in report.ties:
        console.print(f"tied: {tie}")
    tensors = Table("tensor", "count", "shape", "axes")
    for line in report.tensors:
        shape = " × ".join(str(n) for n in line.shape)
        tensors.add_row(line.name, str(line.times), shape, " ".join(line.axes))
    console.print(tensors)
    axes = Table("axis", "what acts on it")
    for name, acts in axis_actions(report.tensors).items():
        axes.add_row(name, "; ".join(acts) or "–")
    console.print(axes)
    group = Table("symmetry", "places", "continuous parameters", "log10 of permutations and signs")
    for row in report.symmetries:
        finite = f"{row.finite:,.1f}" if row.finite else "–"
        group.add_row(
            row.name, str(row.times), f"{row.continuous:,}" if row.continuous else "–", finite
        )
    group.add_section()
    group.add_row("the group", "", f"{report.continuous:,}", f"{report.finite:,.1f}")
    console.print(group)
    if report.blocks:
        console.print(_blocks(report.blocks))
        console.print(
            "spectra: largest singular value · stable rank (‖W‖²F / ‖W‖²₂), over heads. dead: at "
            f"most {DEAD:g} of the block's median; alike: cosine at least {DUPLICATE}."
        )


def _blocks(blocks: tuple[BlockReport, ...]) -> Table:
    maps = list(dict.fromkeys(name for block in blocks for name in block.spectra))
    table = Table("block", *maps, "heads", "neurons")
    for block in blocks:
        spectra = [
            _spectrum(block.spectra[name]) if name in block.spectra else "" for name in maps
        ]
        heads = "; ".join(
            _redundant(r) if not part else f"{part}{_redundant(r)}"
            for part, r in block.heads.items()
        )
        table.add_row(block.name, *spectra, heads, _redundant(block.neurons))
    return table


def _redundant(units: Redundancy | None) -> str:
    """``2 dead (3, 7), 1 alike (0 = 5)``; a dash where there is nothing."""
    if units is None or not (units.dead or units.duplicates):
        return "–"
    parts = []
    if units.dead:
        parts.append(f"{len(units.dead)} dead ({_some([str(i) for i in units.dead])})")
    if units.duplicates:
        pairs = _some([f"{i} = {j}" for i, j, _ in units.duplicates])
        parts.append(f"{len(units.duplicates)} alike ({pairs})")
    return ", ".join(parts)


def _some(items: list[str]) -> str:
    return ", ".join(items[:4]) + (", …" if len(items) > 4 else "")


def _spectrum(values: Tensor) -> str:
    """Largest singular value and stable rank, over heads from the least to the largest."""
    from transformer_nfn.checkpoints.units import stable_rank

    top, rank = values.amax(-1).flatten(), stable_rank(values).flatten()
    return f"{_span(top, '.2g')} · {_span(rank, '.1f')}"


def _span(x: Tensor, form: str) -> str:
    low, high = format(float(x.min()), form), format(float(x.max()), form)
    return low if low == high else f"{low}–{high}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " + ".join(f"{n} {name}" if len(value) > 1 else f"{n}" for name, n in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
