"""The command that takes fingerprints of networks of any kind, keeps them and searches them."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from transformer_nfn.cli.architectures import (
    ArchitectureOption,
    FamilyOption,
    SetOption,
    open_options,
    refuse_options,
)
from transformer_nfn.cli.output import echo_json, table_console
from transformer_nfn.cli.symmetry import JsonOption, PartOption, SpaceOption, named_network
from transformer_nfn.errors import SpaceError, TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model, OpenOptions
    from transformer_nfn.checkpoints.fingerprints import Likeness, Named, Print, Relative

STORED = ".parquet"
SHOWN = 100
"""Prints up to which all distances are given, and not those to the first alone."""


def fingerprint_command(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints or networks: files, folders, rows of a zoo (ZOO#12); a .parquet "
            "file stands for the fingerprints in it."
        ),
    ],
    space: SpaceOption = None,
    part: PartOption = None,
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    size: Annotated[
        int | None, typer.Option(help="Networks of a weight space: how many numbers, 64.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Checkpoints: write a new file of fingerprints.")
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option("--add", help="Checkpoints: add to this database, or begin it."),
    ] = None,
    database: Annotated[
        Path | None,
        typer.Option("--search", help="Checkpoints: look for relatives in this database."),
    ] = None,
    most: Annotated[int, typer.Option("--top", min=1, help="Relatives shown of each.")] = 10,
    json_output: JsonOption = False,
) -> None:
    """Fingerprint networks, or search a database of fingerprints.

    A network and all its disguises share one fingerprint. For checkpoints of a known family (see
    `tnfn architectures`) it has 4.7 KiB, moves when any tensor that can affect the outputs does, is
    near in models made from one another and far in strangers, and can be searched for among 100,000
    others. A search suggests; `tnfn compare` decides.

    [bold]Examples[/bold]

      tnfn fingerprint gpt2/ suspect/

      tnfn fingerprint gpt2/ bert/ opt/ --add known.parquet

      tnfn fingerprint suspect/ --search known.parquet --top 5

      tnfn fingerprint mnist-sample#0 mnist-sample#1   # see `tnfn assets`
    """
    from transformer_nfn.checkpoints.fingerprints import (
        Database,
        add_to_database,
        search,
        write_database,
    )

    if out is not None and add is not None:
        raise TransformerNFNError("--out begins a new file and --add adds to one: give one of them")
    if out is not None and out.exists():
        raise TransformerNFNError(f"'{out}' is there already: --add adds to it")
    options = open_options(architecture, family, settings)
    found = None if space is not None or part is not None else _take(files, options)
    if found is None:
        refuse_options(options, files[0])
        for option, value in (("--out", out), ("--add", add), ("--search", database)):
            if value is not None:
                raise TransformerNFNError(
                    f"{option} is for checkpoints of transformers, and '{files[0]}' is read as a "
                    "network of a weight space"
                )
        _networks(files, space, part, 64 if size is None else size, json_output)
        return
    if size is not None:
        raise TransformerNFNError(
            f"--size is for networks of a weight space, and '{files[0]}' is a checkpoint, whose "
            "fingerprint has one size"
        )
    relatives = seconds = None
    if database is not None:
        start = time.perf_counter()
        with Database(database) as opened:
            relatives = search(opened, [entry.print for entry in found], most)
            seconds = time.perf_counter() - start, len(opened)
    # Written last, so that nobody is found to be its own relative.
    notes = []
    if out is not None:
        notes.append(f"wrote {out}: {write_database(out, found):,} fingerprints")
    if add is not None:
        added, total = add_to_database(add, found)
        notes.append(f"added {added:,} fingerprints to {add}, which now has {total:,}")
    if json_output:
        echo_json(_as_json(found, relatives))
        return
    if relatives is None:
        _show(found)
    else:
        _show_relatives(found, relatives)
        assert seconds is not None
        notes.append(f"searched {seconds[1]:,} fingerprints in {seconds[0]:.2f} s")
    for note in notes:
        typer.echo(note)


def _take(files: Sequence[str], options: OpenOptions) -> list[Named] | None:
    """Prints of checkpoints; None where these are networks of a weight space."""
    from transformer_nfn.checkpoints.fingerprints import Database, Named
    from transformer_nfn.networks import resolve_network

    found: list[Named] = []
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"),
        console=console, disable=not console.is_terminal, transient=True,
    ) as bar:  # fmt: skip
        for file in files:
            if file.endswith(STORED):
                with Database(file) as stored:
                    found += stored
                continue
            network = resolve_network(file)
            model = network.open_model(options)
            if model is None:
                if found:
                    network.check_readable()
                    raise SpaceError(
                        f"'{files[0]}' is a checkpoint of a transformer and '{file}' a network of "
                        "a weight space: their fingerprints do not compare"
                    )
                return None
            with model:
                found.append(Named(_name(file), _with_bar(model, bar, file)))
    return found


def _with_bar(model: Model, bar: Progress, file: str) -> Print:
    from transformer_nfn.checkpoints.fingerprints import take_print

    blocks = sum(len(stack.blocks) for stack in model.about.stacks)
    task = bar.add_task(_name(file), total=blocks)
    taken = take_print(model, progress=lambda _: bar.advance(task))
    bar.remove_task(task)
    return taken


def _name(file: str) -> str:
    return file.rstrip("/") or file


def _show(found: Sequence[Named]) -> None:
    from transformer_nfn.checkpoints.fingerprints import likeness
    from transformer_nfn.checkpoints.fingerprints.distances import MEANING

    columns = ["model", "family", "width", "blocks", "weights", "print"]
    several = ["distance to the first", "alike"] if len(found) > 1 else []
    table = Table(*columns, *several)
    for i, entry in enumerate(found):
        p = entry.print
        cells = [entry.name, p.family, str(p.width), str(p.depth), f"{p.weights:,}", p.checksum]
        if several:
            away = likeness(found[0].print, p)
            cells += [_distance(away), away.words() if i else ""]
        table.add_row(*cells)
    table_console().print(table)
    if len(found) > 1:
        typer.echo(MEANING)


def _show_relatives(found: Sequence[Named], relatives: Sequence[Sequence[Relative]]) -> None:
    from transformer_nfn.checkpoints.fingerprints.distances import MEANING

    for entry, near in zip(found, relatives, strict=True):
        table = Table("relative", "family", "width", "blocks", "distance", "alike")
        for r in near:
            p = r.print
            table.add_row(
                r.name, p.family, str(p.width), str(p.depth), _distance(r.likeness),
                r.likeness.words(),
            )  # fmt: skip
        table.title = f"nearest to {entry.name}"
        table_console().print(table)
    typer.echo(MEANING)


def _distance(away: Likeness) -> str:
    """A distance as text, which is zero only where the distance is."""
    if not away.comparable:
        return ""
    return f"{away.distance:.0e}" if 0 < away.distance < 1e-3 else f"{away.distance:.4f}"


def _as_json(
    found: Sequence[Named], relatives: Sequence[Sequence[Relative]] | None
) -> dict[str, Any]:
    from transformer_nfn.checkpoints.fingerprints import FORMAT, Named, likeness
    from transformer_nfn.checkpoints.fingerprints.distances import MEANING

    shown = found if len(found) <= SHOWN else found[:1]
    answer: dict[str, Any] = {
        "format": FORMAT,
        "fingerprints": [_facts(entry) for entry in found],
        "distances": [[likeness(a.print, b.print).distance for b in found] for a in shown],
    }
    if relatives is not None:
        answer["relatives"] = {
            entry.name: [
                {**_facts(Named(r.name, r.print), whole=False), **r.likeness.as_json()}
                for r in near
            ]
            for entry, near in zip(found, relatives, strict=True)
        }
        answer["meaning"] = MEANING
    return answer


def _facts(entry: Named, *, whole: bool = True) -> dict[str, Any]:
    p = entry.print
    facts = {
        "name": entry.name, "family": p.family, "width": p.width, "blocks": p.depth,
        "weights": p.weights, "frame": p.frame, "rows": p.rows, "checksum": p.checksum,
    }  # fmt: skip
    if whole:
        facts["base64"] = base64.b64encode(p.to_bytes()).decode()
    return facts


def _networks(
    files: Sequence[str], space: str | None, part: str | None, size: int, json_output: bool
) -> None:
    """Fingerprints of networks of a weight space, by distance to the first."""
    import torch

    from transformer_nfn import symmetry

    loaded = [named_network(file, space, part, in_network=True) for file in files]
    if any(found != loaded[0][0] for found, _ in loaded):
        raise SpaceError("the files lie in different weight spaces; fingerprints do not compare")
    prints = torch.cat([symmetry.fingerprint(found, w, size=size) for found, w in loaded])
    apart = torch.cdist(prints, prints) / prints.norm(dim=1).mean().clamp_min(1e-300)
    if json_output:
        rows = {f: p.tolist() for f, p in zip(files, prints, strict=True)}
        echo_json({"fingerprints": rows, "relative_distances": apart.tolist()})
        return
    table = Table("file", "fingerprint", "distance to the first")
    for file, row, away in zip(files, prints, apart[0].tolist(), strict=True):
        start = " ".join(f"{x:+.3f}" for x in row[:3].tolist()) + " …"
        table.add_row(file, start, f"{away:.1e}")
    table_console().print(table)


def register(app: typer.Typer) -> None:
    """Adds the command to the root."""
    app.command("fingerprint")(fingerprint_command)
