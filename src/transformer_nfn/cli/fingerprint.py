"""The command `fingerprint`: take, store, compare and search fingerprints."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID
from rich.table import Table

from transformer_nfn.cli.console import echo_json, passing_bar, table_console
from transformer_nfn.cli.options import (
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
    from transformer_nfn.checkpoints.fingerprints import (
        Entry,
        Fingerprint,
        FingerprintComparison,
        Match,
    )

SHOWN = 100
"""Largest number of models for which all distances are reported, not only those to the first."""


def fingerprint_command(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints: files, folders, rows of a zoo (ZOO#12), models of a hub (org/name); "
            "a .parquet file stands for the fingerprints in it."
        ),
    ],
    architecture: ArchitectureOption = None,
    family: FamilyOption = None,
    settings: SetOption = None,
    base: BaseOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a new file of fingerprints.")
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option("--add", help="Add to this database, or begin it."),
    ] = None,
    database: Annotated[
        Path | None,
        typer.Option("--search", help="Look for relatives in this database."),
    ] = None,
    most: Annotated[int, typer.Option("--top", min=1, help="Relatives shown of each.")] = 10,
    json_output: JsonOption = False,
) -> None:
    """Fingerprint networks, or search a database of fingerprints.

    A checkpoint of a known family (see `tnfn architectures`) and all its disguises share one
    fingerprint. It has 4.9 KiB, moves when any tensor that can affect the outputs does, is near in
    models made from one another and far in strangers, and can be searched for among 100,000 others.
    A search suggests; `tnfn compare` decides.

    [bold]Examples[/bold]

      tnfn fingerprint gpt2/ suspect/

      tnfn fingerprint gpt2/ bert/ opt/ --add known.parquet

      tnfn fingerprint suspect/ --search known.parquet --top 5

      tnfn fingerprint mnist-sample#0 mnist-sample#1   # see `tnfn assets`
    """
    if out is not None and add is not None:
        raise TransformerNFNError("--out begins a new file and --add adds to one: give one of them")
    if out is not None and out.exists():
        raise TransformerNFNError(f"'{out}' is there already: --add adds to it")
    options = open_options(architecture, family, settings, base)
    entries = _take(files, options)
    matches, searched = None, []
    if database is not None:
        matches, note = _search(database, entries, most)
        searched = [note]
    notes = _store(entries, out, add) + searched  # stored last, so that no model matches itself
    if json_output:
        echo_json(_as_json(entries, matches))
        return
    if matches is None:
        _show(entries)
    else:
        _show_matches(entries, matches)
    for note in notes:
        typer.echo(note)


def _take(files: Sequence[str], options: OpenOptions) -> list[Entry]:
    """Fingerprints of checkpoints."""
    from transformer_nfn.checkpoints.fingerprints import Database, Entry, take_fingerprint
    from transformer_nfn.networks import check_base, resolve_network

    entries: list[Entry] = []
    networks = {file: resolve_network(file) for file in files if not file.endswith(".parquet")}
    check_base(networks.values(), options)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "blocks")
    for file in files:
        if file not in networks:
            with Database(file) as stored:
                entries += stored
            continue
        name = file.rstrip("/") or file
        # What is fetched from a hub has a bar of its own, before this one.
        with networks[file].open_model(options) as model, passing_bar(*columns) as bar:
            task = bar.add_task(name, total=len(model.description.blocks))
            entries.append(Entry(name, take_fingerprint(model, partial(_advance, bar, task))))
    return entries


def _advance(bar: Progress, task: TaskID, _block: str) -> None:
    bar.advance(task)


def _search(path: Path, entries: Sequence[Entry], most: int) -> tuple[list[list[Match]], str]:
    """The nearest models of each entry in a database, and a note on the search."""
    from transformer_nfn.checkpoints.fingerprints import Database, search

    start = time.perf_counter()
    with Database(path) as database:
        matches = search(database, [entry.fingerprint for entry in entries], most)
        seconds = time.perf_counter() - start
        return matches, f"searched {len(database):,} fingerprints in {seconds:.2f} s"


def _store(entries: Sequence[Entry], out: Path | None, add: Path | None) -> list[str]:
    """Write the fingerprints where the user wants them, with a note for each file."""
    from transformer_nfn.checkpoints.fingerprints import add_to_database, write_database

    notes = []
    if out is not None:
        notes.append(f"wrote {out}: {write_database(out, entries):,} fingerprints")
    if add is not None:
        added, total = add_to_database(add, entries)
        notes.append(f"added {added:,} fingerprints to {add}, which now has {total:,}")
    return notes


def _show(entries: Sequence[Entry]) -> None:
    from transformer_nfn.checkpoints.fingerprints import MEANING, compare_fingerprints

    several = ["distance to the first", "alike"] if len(entries) > 1 else []
    table = Table("model", "family", "width", "blocks", "weights", "print", *several)
    for i, entry in enumerate(entries):
        p = entry.fingerprint
        cells = [entry.name, p.family, str(p.width), str(p.depth), f"{p.weights:,}", p.checksum]
        if several:
            comparison = compare_fingerprints(entries[0].fingerprint, p)
            cells += [_distance(comparison), comparison.summary() if i else ""]
        table.add_row(*cells)
    table_console().print(table)
    if several:
        typer.echo(MEANING)


def _show_matches(entries: Sequence[Entry], matches: Sequence[Sequence[Match]]) -> None:
    from transformer_nfn.checkpoints.fingerprints import MEANING

    for entry, nearest in zip(entries, matches, strict=True):
        table = Table("relative", "family", "width", "blocks", "distance", "alike")
        for match in nearest:
            p, comparison = match.fingerprint, match.comparison
            cells = [match.name, p.family, str(p.width), str(p.depth)]
            table.add_row(*cells, _distance(comparison), comparison.summary())
        table.title = f"nearest to {entry.name}"
        table_console().print(table)
    typer.echo(MEANING)


def _distance(comparison: FingerprintComparison) -> str:
    """A distance as text, which is zero only where the distance is."""
    if not comparison.comparable:
        return ""
    distance = comparison.distance
    return f"{distance:.0e}" if 0 < distance < 1e-3 else f"{distance:.4f}"


def _as_json(
    entries: Sequence[Entry], matches: Sequence[Sequence[Match]] | None
) -> dict[str, Any]:
    from transformer_nfn.checkpoints.fingerprints import FORMAT, MEANING, compare_fingerprints

    prints = [entry.fingerprint for entry in entries]
    first = prints if len(prints) <= SHOWN else prints[:1]
    answer: dict[str, Any] = {
        "format": FORMAT,
        "fingerprints": [
            {
                **_facts(entry.name, entry.fingerprint),
                "base64": base64.b64encode(entry.fingerprint.to_bytes()).decode(),
            }
            for entry in entries
        ],
        "distances": [[compare_fingerprints(a, b).distance for b in prints] for a in first],
    }
    if matches is not None:
        answer["relatives"] = {
            entry.name: [{**_facts(m.name, m.fingerprint), **m.comparison.as_json()} for m in near]
            for entry, near in zip(entries, matches, strict=True)
        }
        answer["meaning"] = MEANING
    return answer


def _facts(name: str, p: Fingerprint) -> dict[str, Any]:
    return {
        "name": name, "family": p.family, "width": p.width, "blocks": p.depth,
        "weights": p.weights, "frame": p.frame, "rows": p.rows, "checksum": p.checksum,
    }  # fmt: skip
