"""The command about families of checkpoints: which transformers of others can be read?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.output import echo_json

if TYPE_CHECKING:
    from transformer_nfn.architectures.families import Family

ArchitectureOption = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        help="A data file (TOML) that says what the tensors of a checkpoint are; it may extend a "
        "known family, see `tnfn architectures`.",
    ),
]


def architectures_command(
    architecture: ArchitectureOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """List the families of checkpoints that can be read.

    With --architecture, check a data file that describes another family.

    [bold]Examples[/bold]

      tnfn architectures

      tnfn architectures --architecture mine.toml
    """
    from transformer_nfn.architectures.families import families, read_family

    shown = list(families().values()) if architecture is None else [read_family(architecture)]
    if as_json:
        echo_json({family.name: _as_json(family) for family in shown})
        return
    table = Table("family", "name", "config.json says", "what is read")
    for family in shown:
        table.add_row(family.title, family.name, _recognised(family), family.reads)
    Console().print(table)


def _recognised(family: Family) -> str:
    if family.model_types:
        return f"model_type {', '.join(family.model_types)}"
    if family.architectures:
        return f"architecture {', '.join(family.architectures)}"
    return "nothing: known by its tensors"


def _as_json(family: Family) -> dict[str, Any]:
    return {
        "title": family.title,
        "model_types": list(family.model_types),
        "architectures": list(family.architectures),
        "reads": family.reads,
        "prefixes": list(family.prefixes),
        "tensors": {
            line.key: ", ".join(f"{s.tensor}: {s.layout.text}" for s in line.slots) or "kept"
            for line in family.lines
        },
    }


def register(app: typer.Typer) -> None:
    """Adds this command to the root."""
    app.command("architectures")(architectures_command)
