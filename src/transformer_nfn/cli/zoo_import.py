"""Import of checkpoints into a zoo, as a command shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from transformer_nfn.cli.console import echo_json, passing_count, table_console
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model, OpenOptions
    from transformer_nfn.zoo import Zoo
    from transformer_nfn.zoo.importing import Planned


def import_table(
    folder: Path,
    targets: Path,
    out: Path,
    options: OpenOptions,
    *,
    dry_run: bool,
    skip: bool,
    as_json: bool,
) -> None:
    """Import networks, or list what an import would do."""
    from transformer_nfn.zoo.importing import check_plan, import_networks, plan_import

    if dry_run:
        planned = plan_import(folder, targets, out, options)
        _show_plan(planned, out, as_json)
        check_plan(planned, folder, skip=skip, others="")
        return
    columns = ("importing", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with passing_count("import", *columns) as report:
        zoo, planned = import_networks(folder, targets, out, options, skip=skip, progress=report)
    _show_imported(zoo, planned, out, as_json)


def _show_imported(zoo: Zoo, planned: list[Planned], out: Path, as_json: bool) -> None:
    if as_json:
        echo_json(_plan_json(planned) | {"path": str(out), "networks": len(zoo)})
        return
    for each in planned:
        if each.reason:
            typer.echo(f"left out: {each.reason}")
    typer.echo(f"{out}: {_counted(planned)}; {len(zoo):,} networks")


def import_array_file(
    file: Path, out: Path, layout: Path | None, targets: Path | None, *, skip: bool, as_json: bool
) -> None:
    """Import a file of arrays into a new zoo."""
    from transformer_nfn.zoo.importing import import_arrays

    zoo = import_arrays(file, out, layout, targets, skip=skip)
    if as_json:
        echo_json({"path": str(out), "networks": len(zoo)})
    else:
        typer.echo(f"{out}: {len(zoo):,} networks")


def import_listed(
    listed: Path, out: Path, options: OpenOptions, *, skip: bool, as_json: bool
) -> None:
    """Import the checkpoints that a text file names, one per line, into a zoo without targets."""
    from transformer_nfn.io.files import explained_read, read_regular
    from transformer_nfn.io.location import HUB
    from transformer_nfn.zoo import Zoo
    from transformer_nfn.zoo.importing import Planned
    from transformer_nfn.zoo.store.checkpoints import open_network, plain_name

    with explained_read(listed, TransformerNFNError):
        lines = read_regular(listed).decode("utf-8", errors="replace").splitlines()
    texts = [text for line in lines if (text := line.strip()) and not text.startswith("#")]
    if not texts:
        raise TransformerNFNError(f"'{listed}' names no checkpoint: expected one on each line")
    zoo, planned = Zoo.create(out), list[Planned]()
    held = set(zoo.table["network"].tolist())

    def networks() -> Iterator[tuple[Model, str, dict[str, Any]]]:
        for text in texts:
            name, family = plain_name(text.removeprefix(HUB)), ""
            if name not in held:
                try:
                    model = open_network(text, options)
                except TransformerNFNError as error:
                    if not skip:
                        raise
                    planned.append(Planned(text, reason=str(error)))
                    continue
                with model:
                    yield model, name, {}
                family = model.binding.family.name
            planned.append(Planned(text, family, present=name in held))
            held.add(name)

    zoo.extend(networks())
    _show_imported(zoo, planned, out, as_json)


def _plan_json(planned: list[Planned]) -> dict[str, Any]:
    files = [
        {"file": each.file, "action": each.action, "family": each.family, "reason": each.reason}
        for each in planned
    ]
    return {"files": files}


def _counted(planned: list[Planned]) -> str:
    words = {"import": "imported", "present": "there already", "skip": "left out"}
    counts = Counter(each.action for each in planned)
    return ", ".join(f"{counts[key]:,} {word}" for key, word in words.items() if counts[key])


def _show_plan(planned: list[Planned], out: Path, as_json: bool) -> None:
    if as_json:
        echo_json(_plan_json(planned) | {"path": str(out)})
        return
    table = Table(
        "file", "action", "family, or why not", title=escape(f"{out}: {len(planned)} files")
    )
    for each in planned:
        table.add_row(escape(each.file), each.action, escape(each.reason or each.family))
    table_console().print(table)
