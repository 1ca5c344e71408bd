"""Commands about one or two networks: what acts on them, and are they the same?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn import spaces, symmetry
from transformer_nfn.cli.disguises import disguises_command
from transformer_nfn.errors import SpaceError
from transformer_nfn.files.network import save_network
from transformer_nfn.spaces import Weights, WeightSpace

SpaceOption = Annotated[
    str | None,
    typer.Option(
        "--space",
        help="The weight space: a JSON file, or NAME:SIZES such as attention_block:32,2,16,16,64. "
        "Default: what the file itself says.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
NetworkArgument = Annotated[
    str,
    typer.Argument(
        help="A network: a .safetensors or .pt file, a folder, or a row of a zoo (ZOO#12)."
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option("--part", help="Only the tensors below this name, such as blocks.0."),
]
SPACE_HELP = """NAME is one of the ready spaces, SIZES its whole numbers in order:

  multi_head:D,heads,Dk,Dv
  attention_block:D,heads,Dk,Dv,Dff   (also biased_block, rope_block, swiglu_block)
  grouped_query_block:D,groups,queries,Dk,Dv,Dff
  residual_stack:blocks,D,heads,Dk,Dv,Dff,Din,Dout
  decoder_stack:blocks,D,groups,queries,Dk,Dv,Dff,Din,Dout
"""
WITH_ENDS = {"residual_stack": 8, "decoder_stack": 9}
"""Spaces with an input and an output of their own, and how many sizes they have."""


def parse_space(text: str) -> WeightSpace:
    """Reads ``attention_block:32,2,16,16,64``, or a JSON file."""
    name, _, sizes = text.partition(":")
    if name not in spaces.READY:
        path = Path(text)
        if not path.is_file():
            raise SpaceError(
                f"'{text}' is neither a file nor a ready space ({', '.join(spaces.READY)})"
            )
        return WeightSpace.from_json(path.read_text())
    try:
        numbers = [int(n) for n in sizes.split(",")] if sizes else []
    except ValueError:
        raise SpaceError(
            f"the sizes of '{text}' must be whole numbers, as in {name}:32,2,16"
        ) from None
    build = getattr(spaces, name)
    try:
        if len(numbers) == WITH_ENDS.get(name):
            built = build(*numbers[:-2], d_in=numbers[-2], d_out=numbers[-1])
        else:
            built = build(*numbers)
    except TypeError:
        usage = next(line for line in SPACE_HELP.splitlines() if name in line).strip()
        raise SpaceError(f"'{text}' has {len(numbers)} sizes; expected {usage}") from None
    assert isinstance(built, WeightSpace)
    return built


def named_network(text: str, space: str | None, part: str | None) -> tuple[WeightSpace, Weights]:
    """The network of this library's that a user named; see `zoo.checkpoints.find_network`."""
    from transformer_nfn.zoo.checkpoints import find_network

    return find_network(text, None if space is None else parse_space(space), part)


def space_command(
    name: Annotated[str | None, typer.Argument(help="NAME:SIZES, or a JSON file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a weight space: its tensors, its axes, and what acts on them.

    Without a name, lists the ready ones.

    [bold]Examples[/bold]

      tnfn space

      tnfn space attention_block:32,2,16,16,64

      tnfn space rope_block:32,2,16,16,64 --json > rope.json
    """
    if name is None:
        if as_json:
            typer.echo(json.dumps(dict(spaces.READY)))
            return
        table = Table("name", "what it is")
        for key, words in spaces.READY.items():
            table.add_row(key, words)
        Console().print(table)
        typer.echo(SPACE_HELP)
        return
    space = parse_space(name)
    typer.echo(space.to_json(indent=2) if as_json else str(space))


def sample_command(
    name: Annotated[str, typer.Argument(help="NAME:SIZES, or a JSON file.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Draw a random network of a space (standard normal weights) and write it to a file.

    [bold]Example[/bold]

      tnfn sample attention_block:32,2,16,16,64 --out net.safetensors
    """
    space = parse_space(name)
    generator = torch.Generator().manual_seed(seed)
    save_network(out, space, space.randn(1, generator=generator))
    typer.echo(f"wrote {out}: one network of {space.name}, {space.num_weights:,} weights")


def fingerprint_command(
    files: Annotated[
        list[str], typer.Argument(help="Networks: files, folders, or rows of a zoo (ZOO#12).")
    ],
    space: SpaceOption = None,
    part: PartOption = None,
    size: Annotated[int, typer.Option(help="How many numbers.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """A short vector that every disguise of a network shares; several files also by distance.

    [bold]Example[/bold]

      tnfn fingerprint net.safetensors other.safetensors

      tnfn fingerprint mnist-sample#0 mnist-sample#1   # by name, see `tnfn assets`
    """
    loaded = [named_network(file, space, part) for file in files]
    if any(found != loaded[0][0] for found, _ in loaded):
        raise SpaceError("the files lie in different weight spaces; fingerprints do not compare")
    prints = torch.cat([symmetry.fingerprint(found, w, size=size) for found, w in loaded])
    apart = torch.cdist(prints, prints) / prints.norm(dim=1).mean().clamp_min(1e-300)
    if as_json:
        rows = {f: p.tolist() for f, p in zip(files, prints, strict=True)}
        typer.echo(json.dumps({"fingerprints": rows, "relative_distances": apart.tolist()}))
        return
    table = Table("file", "fingerprint", "distance to the first")
    for file, row, away in zip(files, prints, apart[0].tolist(), strict=True):
        start = " ".join(f"{x:+.3f}" for x in row[:3].tolist()) + " …"
        table.add_row(file, start, f"{away:.1e}")
    Console().print(table)


def canonical_command(
    file: NetworkArgument,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    space: SpaceOption = None,
    part: PartOption = None,
) -> None:
    """Write the representative of a network's orbit: the same file for every disguise.

    [bold]Example[/bold]

      tnfn canonical net.safetensors --out canonical.safetensors
    """
    found, weights = named_network(file, space, part)
    save_network(out, found, symmetry.canonical_form(found, weights))
    typer.echo(f"wrote {out}: the canonical form of {file}")


def register(app: typer.Typer) -> None:
    """Adds these commands to the root."""
    for name, command in (
        ("space", space_command),
        ("sample", sample_command),
        ("fingerprint", fingerprint_command),
        ("canonical", canonical_command),
        ("disguises", disguises_command),
    ):
        app.command(name)(command)
