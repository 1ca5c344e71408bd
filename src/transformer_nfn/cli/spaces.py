"""Commands of weight spaces: `space`, `sample` and `canonical`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.console import echo_json
from transformer_nfn.cli.options import (
    SPACE_HELP,
    JsonOption,
    NetworkArgument,
    PartOption,
    SeedOption,
    SpaceOption,
    named_network,
    parse_space,
)


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
        typer.echo(f"a state dict does not record its space: other commands need --space {name}")


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

    of, weights = named_network(file, space, part)
    save_network(out, of, symmetry.canonical_form(of, weights))
    typer.echo(f"wrote {out}: the canonical form of {file}")
