"""The command that lists the families of checkpoints, and the options that choose among them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.console import echo_json
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Family, OpenOptions

ArchitectureOption = Annotated[
    Path | None,
    typer.Option(
        "--architecture",
        help="A data file (TOML) that says what the tensors of a checkpoint are; it may extend a "
        "known family, see `tnfn architectures`.",
    ),
]
FamilyOption = Annotated[
    str | None,
    typer.Option("--family", help="Read checkpoints as this family, see `tnfn architectures`."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="A config field that the files do not state, such as nhead=8; may be repeated, and "
        "holds for every checkpoint of the command.",
    ),
]
SETTING = re.compile(r"([A-Za-z_]\w*)=(.+)", re.DOTALL)
WORDS = {"True": True, "False": False, "None": None}


def open_options(
    architecture: Path | None, family: str | None, settings: Sequence[str] | None
) -> OpenOptions:
    """The options of a command that say how its checkpoints are opened."""
    from transformer_nfn.checkpoints.families import OpenOptions
    from transformer_nfn.checkpoints.families.family import known_family

    if family is not None:
        known_family(family)
    parsed: dict[str, Any] = {}
    for text in settings or ():
        match = SETTING.fullmatch(text)
        if match is None:
            raise TransformerNFNError(f"--set expected FIELD=VALUE, as in nhead=8, found '{text}'")
        if match[1] in parsed:
            raise TransformerNFNError(f"--set states '{match[1]}' twice")
        parsed[match[1]] = _setting(match[1], match[2])
    return OpenOptions(architecture, family, parsed)


def _setting(name: str, text: str) -> Any:
    """A value in JSON or as Python writes it; anything else is text."""
    if text in WORDS:
        return WORDS[text]
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict | list):
        raise TransformerNFNError(
            f"--set {name} expected a number, true, false or text, found '{text}'"
        )
    return value


def refuse_options(options: OpenOptions, file: str) -> None:
    """Refuse options for checkpoints where a network of a weight space is read."""
    if options:
        raise TransformerNFNError(
            f"{options} is for checkpoints of transformers, and '{file}' is read as a network of a "
            "weight space"
        )


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
    from transformer_nfn.checkpoints.families import families, read_family

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
