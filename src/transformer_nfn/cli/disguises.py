"""The symmetry story on one network: disguise it, find it, change it, catch the change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.seed_option import seed_from

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from transformer_nfn.spaces import Weights, WeightSpace
    from transformer_nfn.symmetry import Comparison

WORDS = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "[yellow]undecided[/yellow]"}


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
        found = symmetry.compare(space, U, V, group=group)  # type: ignore[arg-type]
        spent = time.perf_counter() - start
        moved = float((symmetry.fingerprint(space, V) - base).norm() / base.norm())
        save_network(out / f"{name.replace(' ', '_').replace(',', '')}.safetensors", space, V)
        table.add_row(
            name,
            WORDS[found.same_function],
            f"{WORDS[found.same_orbit]} ({found.group})",
            _proof(found),
            f"{moved:.1e}",
            f"{1000 * spent:.0f} ms",
        )
    console.print(table)
    console.print(
        f"\nTry: tnfn compare {out}/original.safetensors {out}/group_element.safetensors",
        highlight=False,
    )


def _proof(found: Comparison) -> str:
    if found.element_error is not None:
        return f"group element, error {found.element_error:.0e}"
    if found.witness is not None:
        tokens, apart = len(found.witness.X), found.witness.difference
        return f"witness of {tokens} tokens, outputs {apart:.0e} apart"
    return found.reason


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
