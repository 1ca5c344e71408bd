"""Commands that list what has a name: families of checkpoints, predictors, and assets."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.console import echo_json, table_console
from transformer_nfn.cli.options import ArchitectureOption, JsonOption
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Family


def architectures_command(
    architecture: ArchitectureOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the families of checkpoints that can be read.

    With --architecture, check a data file that describes another family.

    [bold]Examples[/bold]

      tnfn architectures

      tnfn architectures --architecture mine.toml
    """
    from transformer_nfn.checkpoints.families import families, read_family

    shown = list(families().values()) if architecture is None else [read_family(architecture)]
    if as_json:
        echo_json({family.name: _as_json(family) for family in shown})
        return
    table = Table("family", "name", "config.json says", "what is read")
    for family in shown:
        table.add_row(family.title, family.name, _recognised(family), family.reads)
    Console().print(table)


def _recognised(family: Family) -> str:
    if family.model_types:
        return f"model_type {', '.join(family.model_types)}"
    if family.architectures:
        return f"architecture {', '.join(family.architectures)}"
    return "nothing: known by its tensors"


def _as_json(family: Family) -> dict[str, Any]:
    return {
        "title": family.title,
        "model_types": list(family.model_types),
        "architectures": list(family.architectures),
        "reads": family.reads,
        "prefixes": list(family.prefixes),
        "tensors": {
            line.key: ", ".join(f"{s.tensor}: {s.layout.text}" for s in line.slots) or "kept"
            for line in family.lines
        },
    }


def models_command(
    pattern: Annotated[str, typer.Argument(help="Names to list, such as 'whole*'.")] = "*",
    as_json: JsonOption = False,
) -> None:
    """List the predictors that `tnfn train --model` takes by name.

    Those of installed packages, in the entry points `transformer_nfn.predictors`, are listed with
    the class that their name stands for. Their code is not run.

    [bold]Examples[/bold]

      tnfn models

      tnfn models 'whole*' --json
    """
    from transformer_nfn.models.own_module import entry_points
    from transformer_nfn.models.predictor import BUILT, find, names

    rows: list[dict[str, Any]] = [
        {"name": name, "title": cls.title, "reads": cls.reads,
         "any_size": cls.any_size, "checkpoints": name in names("checkpoints")}
        for name, cls in ((name, find(name)) for name in names())
    ]  # fmt: skip
    rows += [{"name": name, "title": value} for name, value in entry_points().items()]
    rows = [row for row in rows if fnmatch(str(row["name"]), pattern)]
    if not rows:
        raise TransformerNFNError(f"no predictor is called '{pattern}': see tnfn models")
    if as_json:
        echo_json(rows)
        return
    table = Table("name", "title", "reads", "sizes", "networks")
    for row in rows:
        sizes = "any" if row.get("any_size") else "one"
        kinds = "built, checkpoints" if row.get("checkpoints") else BUILT
        known = (row["reads"], sizes, kinds) if "reads" in row else ("", "", "")
        table.add_row(row["name"], row["title"], *known)
    table_console().print(table)


def assets_command(
    as_json: JsonOption = False,
) -> None:
    """List the zoos and trained predictors available by name.

    Use a name in place of a zoo or a run folder; a folder of the same name comes first. The files
    are in assets/ of a checkout, or fetched from TRANSFORMER_NFN_ASSETS_URL on first use.

    [bold]Examples[/bold]

      tnfn assets

      tnfn zoo info mnist-sample
    """
    from transformer_nfn.io.assets import known_assets, whereabouts

    assets = known_assets().values()
    if as_json:
        echo_json([{"name": a.name, **a.to_json(), "where": whereabouts(a)} for a in assets])
        return
    table = Table("name", "kind", "MiB", "where", "what")
    for a in assets:
        table.add_row(a.name, a.kind, f"{a.size / 2**20:.1f}", whereabouts(a), a.description)
    table_console().print(table)
