"""The command that compares two networks of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transformer_nfn.cli.architectures import (
    ArchitectureOption,
    FamilyOption,
    SetOption,
    open_options,
    refuse_options,
)
from transformer_nfn.cli.compare_folder import compare_folder
from transformer_nfn.cli.output import json_text
from transformer_nfn.cli.symmetry import (
    NETWORK,
    JsonOption,
    PartOption,
    SpaceOption,
    named_network,
)
from transformer_nfn.errors import SpaceError, TransformerNFNError

if TYPE_CHECKING:
    from torch import Tensor

    from transformer_nfn.checkpoints.families import Model
    from transformer_nfn.symmetry import Comparison

IN_NETWORK = (
    "A block of a network is compared up to the order of the coordinates of its input and output, "
    "where the network around it may permute them."
)
UNLIKE = 0.1
"""Relative difference from which on a tensor of a block has been replaced or turned."""
EXIT = {True: 0, False: 1, None: 3}
"""Exit code by whether the two are the same function: yes, no, undecidable."""


def compare_command(
    first: Annotated[str | None, typer.Argument(help=NETWORK)] = None,
    second: Annotated[str | None, typer.Argument(help=NETWORK)] = None,
    space: SpaceOption = None,
    part: PartOption = None,
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    group: Annotated[
        str, typer.Option(help="'paper', or 'enlarged' with LayerNorm and ReLU scalings.")
    ] = "paper",
    prove: Annotated[
        bool | None,
        typer.Option(
            "--prove/--no-prove",
            help="Checkpoints: also look for token ids that tell apart what scores call different; "
            "or leave it at scores. By default a disguise is proved, an element verified on every "
            "tensor. Networks of a weight space are always proved.",
            show_default=False,
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", help="Checkpoints: draw blocks of A against blocks of B here."),
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option("--matrix", help="Instead of A and B: all pairs of checkpoints below here."),
    ] = None,
    engine: Annotated[str, typer.Option(help="With --matrix: 'local' or 'ray'.")] = "local",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --matrix: keep finished pairs here, and go on from them."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Compare two networks: same function, related or unrelated.

    Checkpoints of a known family (see `tnfn architectures`) are same, same backbone (only
    output heads differ), derived, partly (which blocks agree), share embeddings only, or are
    unrelated; where that cannot be decided, the verdict is unclear. Same is always proved:
    an element of the symmetry group is verified on every tensor. Which of the two came first
    cannot be seen from weights. Networks of a weight space are compared with proof, too.

    Exit code 0 if they are the same function, with proof; 1 if they are not; 3 if that is
    undecided (also with --no-prove, and where no forward is known for a space); 2 for bad input.
    Shapes that no disguise can change (other widths, other norms) are a no.

    [bold]Examples[/bold]

      tnfn compare gpt2/ suspect/ --figure blocks.png

      tnfn compare gpt2/ suspect/ --no-prove --json

      tnfn compare net.safetensors other.safetensors

      tnfn compare zoo#0 network.pt --part blocks.1

      tnfn compare --matrix models/ --out pairs.json --figure pairs.png
    """
    options = open_options(architecture, family, settings)
    if matrix is not None:
        if first is not None or space is not None or part is not None or prove is not None:
            raise TransformerNFNError(
                "--matrix compares all checkpoints of a folder: without A and B, --space, --part "
                "and --prove"
            )
        compare_folder(
            matrix, out=out, engine=engine, figure=figure, options=options,
            json_output=json_output,
        )  # fmt: skip
        return
    if first is None or second is None:
        raise TransformerNFNError("name two networks to compare, or a folder with --matrix")
    if out is not None or engine != "local":
        raise TransformerNFNError("--out and --engine are for --matrix")
    from transformer_nfn.zoo.checkpoints import open_checkpoint, open_transformer

    with ExitStack() as stack:
        models: list[Model | None] = [None, None]
        if space is None and part is None:
            for i, name in enumerate((first, second)):
                models[i] = open_transformer(name, options)
                if (model := models[i]) is not None:
                    stack.enter_context(model)
        A, B = models
        if A is not None and B is not None:
            _compare_checkpoints(A, B, prove=prove, figure=figure, json_output=json_output)
        if A is not None or B is not None:
            known, other = (first, second) if A is not None else (second, first)
            open_checkpoint(other).close()  # which says what is wrong, if something is
            raise SpaceError(
                f"'{known}' is a checkpoint of a transformer and '{other}' a network of a weight "
                "space: they do not compare"
            )
    refuse_options(options, first)
    if figure is not None:
        raise TransformerNFNError(
            f"--figure is for checkpoints of transformers, and '{first}' is read as a network of a "
            "weight space"
        )
    _compare_networks(first, second, space, part, group, json_output)


def _compare_checkpoints(
    A: Model, B: Model, *, prove: bool | None, figure: Path | None, json_output: bool
) -> None:
    from transformer_nfn.checkpoints import relate
    from transformer_nfn.checkpoints.relations import as_json, draw_relation

    relation = relate(A, B, prove=prove)
    if figure is not None and relation.matrix is not None:
        draw_relation(relation, figure, (A.where, B.where))
    typer.echo(json_text(as_json(relation)) if json_output else str(relation))
    if figure is not None and relation.matrix is None:
        typer.echo(f"no figure: there are no blocks to draw ({relation.reason})", err=True)
    raise typer.Exit(EXIT[relation.same_function])


def _compare_networks(
    first: str, second: str, space: str | None, part: str | None, group: str, json_output: bool
) -> None:
    from transformer_nfn import symmetry
    from transformer_nfn.functional.zoo_network import BLOCK

    left, U = named_network(first, space, part, in_network=True)
    right, V = named_network(second, space, part, in_network=True)
    if left != right:
        raise SpaceError(
            f"'{first}' lies in {left.name} and '{second}' in {right.name}: the spaces do not match"
        )
    if group not in ("paper", "enlarged"):
        raise TransformerNFNError(f"--group must be 'paper' or 'enlarged', found '{group}'")
    result = symmetry.compare(left, U, V, group=group)  # type: ignore[arg-type]
    in_network = left.architecture == BLOCK
    if in_network and result.same_function is False and _turned(result, U, V):
        result = replace(
            result, same_function=None, same_orbit=None, witness=None,
            reason="no order of coordinates joins the blocks, though their heads agree up to "
            "orthogonal matrices, which the network around them may hide: compare the whole "
            "networks",
        )  # fmt: skip
    if in_network and result.same_function is None:
        # More is known of what a block by itself computes than of one in other coordinates.
        alone, _ = named_network(first, None, part)
        by_itself = symmetry.compare(alone, U, V, group=group)  # type: ignore[arg-type]
        if by_itself.same_function:
            result, in_network = by_itself, False
    typer.echo(json_text(_as_json(result)) if json_output else str(result))
    if in_network and not json_output:
        typer.echo(IN_NETWORK)
    raise typer.Exit(EXIT[result.same_function])


def _turned(result: Comparison, U: Mapping[str, Tensor], V: Mapping[str, Tensor]) -> bool:
    """Whether two blocks have nothing in common but what LayerNorms let `align` turn."""
    from transformer_nfn.symmetry.layer_norm import turned_alike

    return min(result.residuals.values()) > UNLIKE and turned_alike(U, V)


def _as_json(result: Comparison) -> dict[str, Any]:
    witness = result.witness
    return {
        "same_function": result.same_function,
        "same_orbit": result.same_orbit,
        "group": result.group,
        "reason": result.reason,
        "resolution": result.resolution,
        "element_error": result.element_error,
        "residuals": dict(result.residuals),
        "witness": witness
        and {
            "difference": witness.difference,
            "noise": witness.noise,
            "input": witness.X.tolist(),
        },
    }


def register(app: typer.Typer) -> None:
    """Adds the command to the root."""
    app.command("compare")(compare_command)
