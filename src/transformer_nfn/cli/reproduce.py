"""The command that makes the paper's tables and figures, and a learning curve, from any zoo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from transformer_nfn.cli.console import echo_json
from transformer_nfn.cli.experiment_progress import trainings_bar
from transformer_nfn.cli.options import DeviceOption, JsonOption, pick_device, whole_numbers
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.paper.numbers import ALL_TABLES, LEARNING_CURVE, MIXED, TRANSFER, no_table

WHAT = (*ALL_TABLES, TRANSFER, "figures")
BY_MODEL = ("table1", "table2", "table7", LEARNING_CURVE.name)
"""Tables with a row for each model."""

def zoo_or_run(given: Path | None) -> Path | None:
    """For an argument: the folder that a path, or the name of a zoo or predictor, stands for."""
    from transformer_nfn.io.assets import NAME, known_assets, resolve

    if given is None or given.exists() or not NAME.fullmatch(str(given)):
        return given
    asset = known_assets().get(str(given))
    return resolve(given, "zoo" if asset is None else asset.kind)


def reproduce_command(
    what: Annotated[str, typer.Argument(help=", ".join(WHAT))],
    zoo: Annotated[
        Path,
        typer.Argument(
            help="A zoo, from `tnfn zoo build`, or its name; for transfer also a run folder.",
            callback=zoo_or_run,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for cells, tables and figures.")],
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="How many seeds a cell.")] = 5,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**6, help="Of neural predictors (50, as in the paper; ours 30)."
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Only these, separated by commas (tables 1, 2 and 7, learning-curve, transfer)."
        ),
    ] = None,
    percent: Annotated[int, typer.Option(help="Which checkpoint of each run.")] = 75,
    sizes: Annotated[
        str | None,
        typer.Option(help="learning-curve: these numbers of networks, separated by commas."),
    ] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(metavar="SIZE,…", help="mixed: sizes left out in turn (three of them)."),
    ] = None,
    to: Annotated[
        list[Path] | None,
        typer.Option("--to", metavar="ZOO", help="transfer: another zoo, whose networks to rank."),
    ] = None,
    device: DeviceOption = "auto",
    engine: Annotated[str, typer.Option(help="local, or ray: a cell a task.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster; none starts one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Rebuild a table of the paper from a zoo.

    The numbers of the paper stand beside those of the zoo. Tables are numbered as in the paper; its
    table 4 is the grid of its networks.

      table1, table2  nine models, five accuracy thresholds (MNIST, AG News)
      table3          components of Transformer-NFN
      table5          channels and layers of Transformer-NFN
      table6          numbers of parameters
      table7          augmentation by the group action
      learning-curve  all models trained on 64, 128, … networks and on all
      mixed           τ on every size of a mixed zoo, and on sizes left out
      transfer        predictors of this zoo rank the networks of other zoos
      figures         histogram, scatter and τ by number of networks, from --out

    Finished cells are kept: run the same command again to resume an interrupted one.

    [bold]Examples[/bold]

      tnfn reproduce table1 zoo --out results
      tnfn reproduce table1 mnist-sample --out results   # see `tnfn assets`
      tnfn reproduce table7 zoo --out results --models transformer_nfn,mlp
      tnfn reproduce learning-curve zoo --out results --sizes 100,717
      tnfn reproduce mixed zoos/mixed --out results --leave-out w48-h4-d3
      tnfn reproduce transfer mnist-zoo --to fashion-zoo --out results
      tnfn reproduce figures zoo --out results
    """
    if what not in WHAT:
        raise no_table(what, WHAT)
    for option, value, tables in (
        ("--to", to, (TRANSFER,)),
        ("--sizes", sizes, (LEARNING_CURVE.name,)),
        ("--leave-out", leave_out, (MIXED.name,)),
        ("--models", models, (*BY_MODEL, TRANSFER)),
    ):
        if value and what not in tables:
            raise TransformerNFNError(f"{option} is for {', '.join(tables)}, {what} has none")
    if address and engine != "ray":
        raise TransformerNFNError("--address is for --engine ray")
    if what == "figures":
        from transformer_nfn.paper.figures import write_figures

        for path in write_figures(zoo, out):
            typer.echo(f"wrote {path}")
        return
    chosen = models.split(",") if models else None
    training: dict[str, Any] = {
        "seeds": list(range(seeds)),
        "epochs": epochs,
        "percent": percent,
        "device": pick_device(device),
    }
    if what == TRANSFER:
        results = _transfer(zoo, to or [], out, chosen, training, as_json)
    else:
        kinds = leave_out.split(",") if leave_out else None
        expected = "--sizes must be whole numbers separated by commas"
        numbers = None if sizes is None else whole_numbers(sizes, expected)
        choice = {"models": chosen, "sizes": numbers, "leave_out": kinds}
        training |= {"engine": engine, "address": address}
        results = _table(what, zoo, out, choice, training, as_json)
    drawn = []
    if what == LEARNING_CURVE.name:
        from transformer_nfn.paper.figures import learning_curve

        drawn = learning_curve(results, out / what)
    if as_json:
        echo_json([asdict(result) for result in results])
        return
    Console().print(Markdown((out / f"{what}.md").read_text()))
    typer.echo(f"wrote {out}/{what}.md and {out}/{what}.parquet")
    for path in drawn:
        typer.echo(f"wrote {path}")


def _table(
    name: str, zoo: Path, out: Path, choice: dict[str, Any], training: dict[str, Any], quiet: bool
) -> list[Any]:
    """Records of all cells of a table, for a choice of models and sizes."""
    from transformer_nfn.models.own_module import declared
    from transformer_nfn.models.predictor import find
    from transformer_nfn.paper.figures import check_matplotlib
    from transformer_nfn.paper.tables import reproduce, zoo_cells

    for model in choice["models"] or ():
        find(declared(model))
    total = len(zoo_cells(name, zoo, percent=training["percent"], **choice))
    if name == LEARNING_CURVE.name:
        check_matplotlib()
    with trainings_bar(name, total, quiet=quiet) as report:

        def tell(cell: Any, line: dict[str, Any]) -> None:
            report(f"{cell.row} · {cell.column}", line)

        return reproduce(name, zoo, out, progress=tell, **choice, **training)


def _transfer(
    home: Path,
    targets: Sequence[Path],
    out: Path,
    learners: Sequence[str] | None,
    training: dict[str, Any],
    quiet: bool,
) -> list[Any]:
    """Predictors of one task's networks rank those of another's."""
    from transformer_nfn.io.assets import resolve
    from transformer_nfn.paper.transfer import LEARNERS, transfer

    zoos = [resolve(path, "zoo") for path in targets]
    with trainings_bar(TRANSFER, len(learners or LEARNERS), quiet=quiet) as report:
        return transfer(home, zoos, out, learners=learners, progress=report, **training)
