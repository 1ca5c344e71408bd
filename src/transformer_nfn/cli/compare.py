"""The command `compare`: two checkpoints, or all of a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from transformer_nfn.cli.console import echo_json, echo_result, passing_bar, table_console
from transformer_nfn.cli.options import (
    NETWORK,
    ArchitectureOption,
    BaseOption,
    FamilyOption,
    JsonOption,
    SetOption,
    open_options,
)
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import OpenOptions
    from transformer_nfn.checkpoints.pairs import AllPairs, Pair
    from transformer_nfn.networks import Network

EXIT = {True: 0, False: 1, None: 3}
"""Exit code by whether what is expected holds: yes, no, undecidable."""
HOLDS: dict[str, dict[str, bool | None]] = {
    "same": {
        "same": True, "consistent with a disguise, not proved": None, "unclear": None,
    },
    "derived": {
        "same": True, "same backbone": True, "consistent with a disguise, not proved": True,
        "derived": True, "different": None, "unclear": None,
    },
}  # fmt: skip
"""Whether an expectation holds, by verdict; it does not with others."""
LISTED = ("same", "same backbone", "derived", "partly", "embeddings only", "unclear", "failed")
"""Verdicts whose pairs are listed; the others are counted."""


def compare_command(
    first: Annotated[str | None, typer.Argument(help=NETWORK)] = None,
    second: Annotated[str | None, typer.Argument(help=NETWORK)] = None,
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    base: BaseOption = None,
    prove: Annotated[
        bool | None,
        typer.Option(
            "--prove/--no-prove",
            help="Also look for token ids that tell apart what scores call different; or leave it "
            "at scores. By default a disguise is proved, an element verified on every tensor.",
            show_default=False,
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", help="Draw blocks of A against blocks of B here."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="same|same-function|derived",
            help="What exit code 0 stands for: the verdict same, the same function with proof (as "
            "without the option), or the verdict derived or one of a closer relation.",
        ),
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            "--matrix",
            metavar="<path>",
            help="Instead of A and B: all pairs of checkpoints below here.",
        ),
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
    cannot be seen from weights.

    Two tests say how sure that is: log10 p of an exact test that B was trained independently
    of A, which permuted units defeat, and p of the score among trained strangers, which no
    disguise defeats; models unlike those strangers are labelled as extrapolated.

    Exit code 0 if they are the same function, with proof, or what --expect names; 1 if not; 3 if
    that is undecided (also with --no-prove); 2 for bad input. Shapes that no disguise can change
    (other widths, other norms) are another function; whether one is derived from the other is
    undecided then.

    [bold]Examples[/bold]

      tnfn compare gpt2/ suspect/ --figure blocks.png

      tnfn compare gpt2/ suspect/ --no-prove --json

      tnfn compare base/ suspect/ --expect derived && echo "made from base"

      tnfn compare zoo#0 network.pt

      tnfn compare model/ model.gguf

      tnfn compare merged/ adapter/ --base base/

      tnfn compare HuggingFaceTB/SmolLM2-135M hf:org/suspect@v2:weights

      tnfn compare --matrix models/ --out pairs.json --figure pairs.png
    """
    options = open_options(architecture, family, settings, base)
    if matrix is not None:
        if first is not None or prove is not None or expect is not None:
            raise TransformerNFNError(
                "--matrix compares all checkpoints of a folder: without A and B, --prove, --expect"
            )
        _compare_folder(matrix, out, engine, figure, options, json_output)
        return
    if first is None or second is None:
        raise TransformerNFNError("name two networks to compare, or a folder with --matrix")
    if out is not None or engine != "local":
        raise TransformerNFNError("--out and --engine are for --matrix")
    if expect not in (None, "same-function", *HOLDS):
        raise TransformerNFNError(
            f"--expect expected same, same-function or derived, found '{expect}'"
        )
    from transformer_nfn.networks import resolve_network

    networks = [resolve_network(name) for name in (first, second)]
    verdict, same = _compare_checkpoints(networks, options, prove, figure, json_output)
    holds = HOLDS[str(expect)].get(verdict, False) if expect in HOLDS else same
    raise typer.Exit(EXIT[holds])


def _compare_checkpoints(
    networks: Sequence[Network],
    options: OpenOptions,
    prove: bool | None,
    figure: Path | None,
    json_output: bool,
) -> tuple[str, bool | None]:
    """The verdict on two checkpoints, and whether they are the same function."""
    from transformer_nfn.checkpoints import relate
    from transformer_nfn.checkpoints.relations import draw_relation
    from transformer_nfn.networks import check_base

    check_base(networks, options)
    adapters = [network for network in networks if network.location.is_adapter]
    if len(adapters) == 2 and options.base is None:
        return _compare_adapters(adapters, figure, json_output)
    if len(adapters) == 1 and options.base is None:
        options = _with_base(networks, adapters[0], options)

    with networks[0].open_model(options) as A, networks[1].open_model(options) as B:
        relation = relate(A, B, prove=prove)
    if figure is not None and relation.matrix is not None:
        draw_relation(relation, figure, (A.where, B.where))
    echo_result(relation, json_output)
    if figure is not None and relation.matrix is None:
        typer.echo(f"no figure: there are no blocks to draw ({relation.reason})", err=True)
    return relation.verdict, relation.same_function


def _with_base(
    networks: Sequence[Network], adapter: Network, options: OpenOptions
) -> OpenOptions:
    """The other checkpoint is the base of an adapter that names no model of a hub."""
    with adapter.open_adapter() as opened:
        if opened.base is not None:
            return options
    other = next(network for network in networks if network is not adapter)
    return replace(options, base=other.name)


def _compare_adapters(
    adapters: Sequence[Network], figure: Path | None, json_output: bool
) -> tuple[str, bool | None]:
    """The verdict on two adapters by themselves, and whether they are the same change."""
    from transformer_nfn.checkpoints.adapters import compare_adapters

    if figure is not None:
        raise TransformerNFNError("--figure draws blocks: adapters need --base for that")
    with adapters[0].open_adapter() as a, adapters[1].open_adapter() as b:
        result = compare_adapters(a, b)
    echo_result(result, json_output)
    return {True: "same", False: "different", None: "unclear"}[result.same], result.same


def _compare_folder(
    folder: Path,
    out: Path | None,
    engine: str,
    figure: Path | None,
    options: OpenOptions,
    json_output: bool,
) -> None:
    """Relate all pairs of checkpoints of a folder."""
    from transformer_nfn.checkpoints.pairs import draw_pairs, relate_folder

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "pairs")
    with passing_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("comparing", total=None)

        def show(done: int, total: int, last: Pair | None) -> None:
            words = "comparing" if last is None else f"{last.a} – {last.b}: {last.verdict}"
            bar.update(task, completed=done, total=total, description=words)

        result = relate_folder(
            folder, out=out, engine=engine, options=options, progress=show  # type: ignore[arg-type]
        )
    if figure is not None:
        draw_pairs(result, figure)
    if json_output:
        echo_json(result.as_json())
        return
    _show_pairs(result)
    if out is not None:
        typer.echo(f"wrote {out}: {len(result.pairs)} pairs")


def _show_pairs(result: AllPairs) -> None:
    listed = [pair for pair in result.pairs if pair.verdict in LISTED]
    if listed:
        table = Table("A", "B", "verdict", "score", "why")
        for p in sorted(listed, key=lambda p: -(p.score or 0.0)):
            score = "" if p.score is None else f"{p.score:.3f}"
            table.add_row(p.a, p.b, p.verdict, score, p.reason)
        table_console().print(table)
    verdicts = Counter(pair.verdict for pair in result.pairs).most_common()
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts)
    typer.echo(f"{len(result.models)} models, {len(result.pairs)} pairs: {counts}")
    for group in result.groups():
        if len(group) > 1:
            typer.echo(f"related: {', '.join(group)}")
    incomparable = [pair for pair in result.pairs if pair.verdict == "not comparable"]
    if incomparable:
        typer.echo(f"not comparable, for one: {incomparable[0].reason}")
    for name, reason in result.not_read.items():
        typer.echo(f"not read: {name} ({reason})")
