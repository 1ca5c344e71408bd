"""Commands of weight spaces: `space`, `sample`, `canonical` and `disguises`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    seed_from,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from transformer_nfn.spaces import Weights, WeightSpace
    from transformer_nfn.symmetry import Comparison

ANSWERS = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "[yellow]undecided[/yellow]"}


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


def disguises_command(
    out: Annotated[Path, typer.Option("--out", help="Folder for the networks.")] = Path("demo"),
    seed: Annotated[
        int, typer.Option(help="Seed of all random numbers.", callback=seed_from(0))
    ] = 0,
) -> None:
    """Compare one network with six disguises of it.

    Writes the networks, so that `tnfn compare` and `tnfn fingerprint` can be tried on them.
    """
    import torch

    from transformer_nfn import spaces, symmetry
    from transformer_nfn.networks import save_network

    console = Console()
    space = spaces.attention_block(d_model=32, heads=2, d_k=16, d_v=16, d_ff=64)
    generator = torch.Generator().manual_seed(seed)
    U = space.randn(1, generator=generator, dtype=torch.float64)
    console.print(str(space), highlight=False)
    console.print()
    base = symmetry.fingerprint(space, U)
    save_network(out / "original.safetensors", space, U)
    table = Table("disguise", "same function", "same orbit", "proof", "fingerprint moves", "time")
    for name, group, make in _disguises(space, generator):
        V = make(U)
        start = time.perf_counter()
        comparison = symmetry.compare(space, U, V, group=group)  # type: ignore[arg-type]
        spent = time.perf_counter() - start
        moved = float((symmetry.fingerprint(space, V) - base).norm() / base.norm())
        save_network(out / f"{name.replace(' ', '_').replace(',', '')}.safetensors", space, V)
        table.add_row(
            name,
            ANSWERS[comparison.same_function],
            f"{ANSWERS[comparison.same_orbit]} ({comparison.group})",
            _proof(comparison),
            f"{moved:.1e}",
            f"{1000 * spent:.0f} ms",
        )
    console.print(table)
    console.print(
        f"\nTry: tnfn compare {out}/original.safetensors {out}/group_element.safetensors",
        highlight=False,
    )


def _proof(comparison: Comparison) -> str:
    if comparison.element_error is not None:
        return f"group element, error {comparison.element_error:.0e}"
    if comparison.witness is not None:
        tokens, difference = len(comparison.witness.X), comparison.witness.difference
        return f"witness of {tokens} tokens, outputs {difference:.0e} apart"
    return comparison.reason


def _disguises(
    space: WeightSpace, generator: torch.Generator
) -> list[tuple[str, str, Callable[[Weights], Weights]]]:
    import torch

    from transformer_nfn import symmetry

    def changed(U: Weights, name: str, change: Callable[[Tensor], Tensor]) -> Weights:
        return {**U, name: change(U[name].clone())}

    def dead_neuron(U: Weights) -> Weights:
        return changed(U, "W_B", lambda w: w.index_fill_(2, torch.tensor([0]), 3.0))

    def noise(U: Weights) -> Weights:
        return {
            name: w * (1 + 1e-6 * torch.randn(w.shape, generator=generator, dtype=w.dtype))
            for name, w in U.items()
        }

    g = space.group.random(generator)
    enlarged = symmetry.random_enlarged(space, generator)
    return [
        ("group element", "paper", g.act),
        ("canonical form", "paper", lambda U: symmetry.canonical_form(space, U)),
        ("rounded to float32", "paper", lambda U: {n: w.float() for n, w in g.act(U).items()}),
        ("LayerNorm and ReLU scales", "enlarged", enlarged.act),
        ("group element, noise 1e-6", "paper", lambda U: g.act(noise(U))),
        ("one neuron's output replaced", "paper", lambda U: g.act(dead_neuron(U))),
    ]
