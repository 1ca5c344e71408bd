"""Commands about one or two networks: what acts on them, and are they the same?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.disguises import disguises_command
from transformer_nfn.cli.output import echo_json
from transformer_nfn.cli.seed_option import seed_from
from transformer_nfn.errors import SpaceError

if TYPE_CHECKING:
    from transformer_nfn.networks import Network
    from transformer_nfn.spaces import Weights, WeightSpace

SpaceOption = Annotated[
    str | None,
    typer.Option(
        "--space",
        help="The weight space: a JSON file, or NAME:SIZES such as attention_block:32,2,16,16,64. "
        "Default: what the file itself says.",
    ),
]
SeedOption = Annotated[
    int, typer.Option(help="Seed of all random numbers.", callback=seed_from(-(2**63)))
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
NETWORK = "A network: a .safetensors or .pt file, a folder, or a row of a zoo (ZOO#12)."
NetworkArgument = Annotated[str, typer.Argument(help=NETWORK)]
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
LARGEST = 2**31 - 1
DEEPEST = 10_000
"""Blocks of a stack; writing out the axes of more takes minutes."""


def sizes_in(text: str) -> list[int] | None:
    """Whole numbers separated by commas; None where they are none, or beyond any network."""
    words = text.split(",") if text else []
    if not all(re.fullmatch(r"\s*-?[0-9]{1,10}\s*", word) for word in words):
        return None
    found = [int(word) for word in words]
    return found if all(number <= LARGEST for number in found) else None


def parse_space(text: str) -> WeightSpace:
    """Reads ``attention_block:32,2,16,16,64``, or a JSON file."""
    from transformer_nfn import spaces
    from transformer_nfn.io.json_fields import read_object
    from transformer_nfn.spaces import WeightSpace

    name, _, sizes = text.partition(":")
    if name not in spaces.READY:
        path = Path(text)
        if not path.is_file():
            raise SpaceError(
                f"'{text}' is neither a file nor a ready space ({', '.join(spaces.READY)})"
            )
        return WeightSpace.from_object(read_object(path, SpaceError))
    numbers = sizes_in(sizes)
    if numbers is None:
        raise SpaceError(
            f"the sizes of '{text}' must be whole numbers up to {LARGEST:,}, as in {name}:32,2,16"
        )
    if name in WITH_ENDS and numbers[:1] > [DEEPEST]:
        raise SpaceError(f"'{text}' has {numbers[0]:,} blocks, at most {DEEPEST:,} are taken")
    build = getattr(spaces, name)
    try:
        if len(numbers) == WITH_ENDS.get(name):
            built = build(*numbers[:-2], d_in=numbers[-2], d_out=numbers[-1])
        else:
            built = build(*numbers)
    except TypeError:
        usage = next(line for line in SPACE_HELP.splitlines() if name in line).split()[0]
        expected = usage.partition(":")[2]
        raise SpaceError(
            f"'{text}' has {len(numbers)} sizes; expected {name}:{expected}"
        ) from None
    assert isinstance(built, WeightSpace)
    return built


def named_network(
    network: str | Network, space: str | None, part: str | None, *, in_network: bool = False
) -> tuple[WeightSpace, Weights]:
    """The weights of a network in its space; see `Network.in_space`."""
    from transformer_nfn.networks import resolve_network

    given = None if space is None else parse_space(space)
    opened = resolve_network(network) if isinstance(network, str) else network
    return opened.in_space(given, part, in_network=in_network)


def space_command(
    name: Annotated[str | None, typer.Argument(help="NAME:SIZES, or a JSON file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a weight space: tensors, axes and their symmetries.

    Without a name, lists the ready ones.

    [bold]Examples[/bold]

      tnfn space

      tnfn space attention_block:32,2,16,16,64

      tnfn space rope_block:32,2,16,16,64 --json > rope.json
    """
    from transformer_nfn import spaces

    if name is None:
        if as_json:
            echo_json(dict(spaces.READY))
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
    seed: SeedOption = 0,
) -> None:
    """Write a random network of a weight space.

    Weights are standard normal. A .pt, .pth or .bin file is a PyTorch state dict, which does not
    record its space; any other file is safetensors, which does.

    [bold]Example[/bold]

      tnfn sample attention_block:32,2,16,16,64 --out net.safetensors
    """
    import torch

    from transformer_nfn.io.checkpoint import STATE_DICTS
    from transformer_nfn.io.files import check_memory
    from transformer_nfn.networks import save_network

    space = parse_space(name)
    check_memory(space.num_weights * 4, f"a network of {space.name}")
    generator = torch.Generator().manual_seed(seed)
    save_network(out, space, space.randn(1, generator=generator))
    typer.echo(f"wrote {out}: one network of {space.name}, {space.num_weights:,} weights")
    if out.suffix in STATE_DICTS:
        typer.echo(f"a state dict does not say its space: other commands need --space {name}")


def canonical_command(
    file: NetworkArgument,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")],
    space: SpaceOption = None,
    part: PartOption = None,
) -> None:
    """Write the canonical form of a network.

    Every disguise of a network has the same canonical form: the same up to rounding (about 1e-6 in
    float32, relative to each tensor), not to the bit, and where no two heads, neurons or singular
    values are alike. It computes what the network computes, in the same dtype. Only the tensors of
    the space are kept, nothing else that the file holds.

    [bold]Example[/bold]

      tnfn canonical net.safetensors --out canonical.safetensors
    """
    from transformer_nfn import symmetry
    from transformer_nfn.networks import save_network

    found, weights = named_network(file, space, part)
    save_network(out, found, symmetry.canonical_form(found, weights))
    typer.echo(f"wrote {out}: the canonical form of {file}")


def register(app: typer.Typer) -> None:
    """Adds these commands to the root."""
    for name, command in (
        ("space", space_command),
        ("sample", sample_command),
        ("canonical", canonical_command),
        ("disguises", disguises_command),
    ):
        app.command(name)(command)
