"""Display of zoos of a user's own networks: imports, rows and summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from transformer_nfn.cli.console import echo_json, passing_count, table_console
from transformer_nfn.cli.options import check_values
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model, OpenOptions
    from transformer_nfn.zoo import ModelZoo
    from transformer_nfn.zoo.own_networks import Planned


def import_own(
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
    from transformer_nfn.zoo.own_networks import check_plan, import_networks, plan_import

    if dry_run:
        planned = plan_import(folder, targets, out, options)
        _show_plan(planned, out, as_json)
        check_plan(planned, folder, skip=skip, others="")
        return
    columns = ("importing", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with passing_count("import", *columns) as report:
        zoo, planned = import_networks(folder, targets, out, options, skip=skip, progress=report)
    _show_imported(zoo, planned, out, as_json)


def _show_imported(zoo: ModelZoo, planned: list[Planned], out: Path, as_json: bool) -> None:
    if as_json:
        echo_json(_plan_json(planned) | {"path": str(out), "networks": len(zoo)})
        return
    for each in planned:
        if each.reason:
            typer.echo(f"left out: {each.reason}")
    typer.echo(f"{out}: {_counted(planned)}; {len(zoo):,} networks")


def import_listed(
    listed: Path, out: Path, options: OpenOptions, *, skip: bool, as_json: bool
) -> None:
    """Import the checkpoints that a text file names, one per line, into a zoo without targets."""
    from transformer_nfn.io.files import explained_read, read_regular
    from transformer_nfn.io.location import HUB
    from transformer_nfn.zoo import ModelZoo
    from transformer_nfn.zoo.own_networks import Planned
    from transformer_nfn.zoo.store.model_zoo import open_network, plain_name

    with explained_read(listed, TransformerNFNError):
        lines = read_regular(listed).decode("utf-8", errors="replace").splitlines()
    texts = [text for line in lines if (text := line.strip()) and not text.startswith("#")]
    if not texts:
        raise TransformerNFNError(f"'{listed}' names no checkpoint: expected one on each line")
    zoo, planned = ModelZoo.create(out), list[Planned]()
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


def matching_rows(
    zoo: ModelZoo,
    wanted: Mapping[str, Sequence[Any]],
    min_accuracy: float | None,
    max_accuracy: float | None,
) -> list[int]:
    """Rows whose targets have one of the wanted values each, and an accuracy between the bounds.

    A run is the value of that target; without one, each network is a run of its name.
    """
    from transformer_nfn.zoo.summary import needed_accuracies

    rows = [*range(len(zoo))]
    for name, values in wanted.items():
        column = "network" if name == "run" and name not in zoo.targets else name
        if not values:
            continue
        if column not in zoo.table:
            raise TransformerNFNError(
                f"'{zoo.path}' has no target '{name}': it has {', '.join(zoo.targets) or 'none'}"
            )
        texts = [_cell(value) for value in zoo.table[column].tolist()]
        accepted = [str(value) for value in values]
        check_values(str(zoo.path), name, {*texts}, accepted)
        rows = [row for row in rows if texts[row] in accepted]
    if min_accuracy is None and max_accuracy is None:
        return rows
    accuracy = zoo.targets[needed_accuracies(zoo)]
    low, high = min_accuracy or 0.0, 1.0 if max_accuracy is None else max_accuracy
    return [row for row in rows if low <= accuracy[row] <= high]


def list_rows(zoo: ModelZoo, name: str, rows: Sequence[int], as_json: bool) -> None:
    """Print some rows of a zoo with their targets."""
    hidden = ("checksum", "bytes")
    records: list[dict[str, Any]] = [
        {"name": f"{name}#{i}", "row": i}
        | {key: value for key, value in zoo.config(i).items() if key not in hidden}
        for i in rows
    ]
    if as_json:
        echo_json(records)
        return
    columns = [column for column in zoo.table if column not in hidden]
    title = f"{name}: {len(rows):,} of {len(zoo):,} rows"
    table = Table("row", *map(escape, columns), title=escape(title))
    for record in records:
        cells = (_cell(record[column]) for column in columns)
        table.add_row(escape(record["name"]), *map(escape, cells))
    table_console().print(table)


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_models(console: Console, summary: dict[str, Any]) -> None:
    """Print the result of `zoo.summary.summarise_models`."""
    families = ", ".join(f"{count:,} {name}" for name, count in summary["families"].items())
    title = f"{summary['path']}: {summary['networks']:,} networks"
    table = Table("target", "min", "median", "max", title=escape(title))
    for name, target in summary["targets"].items():
        if "values" in target:
            values = ", ".join(f"{value} ({n})" for value, n in target["values"].items())
            more = target["distinct"] - len(target["values"])
            text = f"{values} and {more:,} more" if more else values
            table.add_row(escape(name), escape(text))
        else:
            cells = (f"{target[k]:g}" for k in ("min", "median", "max") if k in target)
            table.add_row(escape(name), *cells)
    console.print(table)
    console.print(
        f"{families or 'no networks'}; {summary['bytes'] / 2**20:.1f} MiB", highlight=False
    )
