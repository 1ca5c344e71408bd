"""Names on the command line: what may stand for a folder, and the command that lists them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from transformer_nfn.cli.console import echo_json, table_console


def named(kind: str) -> Callable[[Path | None], Path | None]:
    """For an argument: the folder that its path or name stands for."""

    def find(given: Path | None) -> Path | None:
        from transformer_nfn.io.assets import resolve

        return None if given is None else resolve(given, kind)

    return find


def assets_command(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """List the zoos and trained predictors available by name.

    Use a name in place of a zoo or a run folder; a folder of the same name comes first. The files
    are in assets/ of a checkout, or fetched from TRANSFORMER_NFN_ASSETS_URL on first use.

    [bold]Examples[/bold]

      tnfn assets

      tnfn zoo info mnist-sample
    """
    from transformer_nfn.io.assets import known_assets, whereabouts

    found = known_assets().values()
    if as_json:
        rows = [{"name": a.name, **a.to_json(), "where": whereabouts(a)} for a in found]
        echo_json(rows)
        return
    table = Table("name", "kind", "MiB", "where", "what")
    for a in found:
        table.add_row(a.name, a.kind, f"{a.size / 2**20:.1f}", whereabouts(a), a.description)
    table_console().print(table)


def register(app: typer.Typer) -> None:
    """Adds this command to the root."""
    app.command("assets")(assets_command)
