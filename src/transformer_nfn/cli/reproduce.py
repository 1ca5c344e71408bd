"""The command that makes the paper's tables and figures, and a learning curve, from any zoo."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from transformer_nfn.cli.console import echo_json
from transformer_nfn.cli.experiment_progress import trainings_bar
from transformer_nfn.cli.options import (
    DeviceOption,
    JsonOption,
    PercentOption,
    SplitOption,
    SplitSeedOption,
    VariantOption,
    percent_of,
    pick_device,
    whole_numbers,
)
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.paper.numbers import (
    ALL_TABLES,
    LEARNING_CURVE,
    MIXED,
    TARGETS,
    TRANSFER,
    no_table,
)

WHAT = (*ALL_TABLES, "figures")
ACCURACY = "test_accuracy"
BY_MODEL = ("table1", "table2", "table7", LEARNING_CURVE.name, TARGETS.name)
"""Tables with a row for each model."""


def zoo_or_run(given: Path | None) -> Path | None:
    """For an argument: the folder that a path, or the name of a zoo or predictor, stands for."""
    from transformer_nfn.io.assets import NAME, known_assets
    from transformer_nfn.io.location import Location

    if given is None or given.exists() or not NAME.fullmatch(str(given)):
        return given
    asset = known_assets().get(str(given))
    return Location.of(given).folder("zoo" if asset is None else asset.kind)


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
        typer.Option(min=1, max=10**6, help="Of neural predictors (50, as in the paper; ours 30)."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="Only these, separated by commas (of tables with a row for each model)."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Only these columns, separated by commas, such as all,0.8.")
    ] = None,
    variant: VariantOption = None,
    percent: PercentOption = "75",
    split: SplitOption = "run",
    split_seed: SplitSeedOption = 0,
    splits: Annotated[
        int, typer.Option(min=1, max=1000, help="So many splits from --split-seed on.")
    ] = 1,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="learning-curve, targets: numbers of networks, or all, separated by commas."
        ),
    ] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(metavar="SIZE,…", help="mixed: sizes left out in turn (three of them)."),
    ] = None,
    to: Annotated[
        list[Path] | None,
        typer.Option("--to", metavar="ZOO", help="transfer: another zoo, whose networks to rank."),
    ] = None,
    target: Annotated[
        str, typer.Option(metavar="COLUMN", help="learning-curve: what to predict.")
    ] = ACCURACY,
    device: DeviceOption = "auto",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Cells to train side by side.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no cell after so many minutes.")
    ] = None,
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
      targets         what can be read from weights besides accuracy
      mixed           τ on every size of a mixed zoo, and on sizes left out
      transfer        predictors of this zoo rank the networks of other zoos
      figures         histogram, scatter and τ by number of networks, from --out

    Finished cells are kept: run the same command again to resume an interrupted one.

    [bold]Examples[/bold]

      tnfn reproduce table1 zoo --out results
      tnfn reproduce table1 mnist-sample --out results   # see `tnfn assets`
      tnfn reproduce table7 zoo --out results --models transformer_nfn,mlp
      tnfn reproduce table1 zoo --out results --splits 5 --jobs 8 --minutes 25
      tnfn reproduce table1 zoo --out results --variant authors
      tnfn reproduce table1 zoo --out results --percent all --columns all,0.8
      tnfn reproduce learning-curve zoo --out results --sizes 100,717
      tnfn reproduce mixed zoos/mixed --out results --leave-out w48-h4-d3
      tnfn reproduce transfer mnist-zoo --to fashion-zoo --out results
      tnfn reproduce figures zoo --out results
    """
    if what not in WHAT:
        raise no_table(what, WHAT)
    for option, value, tables in (
        ("--to", to, (TRANSFER.name,)),
        ("--sizes", sizes, (LEARNING_CURVE.name, TARGETS.name)),
        ("--leave-out", leave_out, (MIXED.name,)),
        ("--columns", columns, ("table1", "table2", "table7")),
        ("--models", models, (*BY_MODEL, TRANSFER.name)),
        ("--variant", variant, (*BY_MODEL, TRANSFER.name)),
        ("--target", target != ACCURACY, (LEARNING_CURVE.name,)),
    ):
        if value and what not in tables:
            raise TransformerNFNError(f"{option} is for {', '.join(tables)}, {what} has none")
    if address and engine != "ray":
        raise TransformerNFNError("--address is for --engine ray")
    if engine == "ray" and (jobs > 1 or minutes is not None):
        raise TransformerNFNError("--jobs and --minutes are for --engine local")
    on = pick_device(device)
    from transformer_nfn.models.own_module import declared
    from transformer_nfn.models.predictor import find, known_variants, variant_of
    from transformer_nfn.paper.tables import reproduce, zoo_cells
    from transformer_nfn.report.figures import learning_curve, write_figures

    if what == "figures":
        for path in write_figures(zoo, out):
            typer.echo(f"wrote {path}")
        return
    whole = "--sizes must be whole numbers separated by commas"
    chosen, kinds, counts, shown = (
        text.split(",") if text else None for text in (models, leave_out, sizes, columns)
    )
    if variant is not None:
        parted = (name.split(":") for name in known_variants())
        having = [model for model, name in parted if name == variant]
        chosen = [variant_of(name, variant) for name in chosen or having or ["mlp"]]
    numbers: Any = counts and [None if n == "all" else whole_numbers(n, whole)[0] for n in counts]
    choice: dict[str, Any] = {
        "models": chosen, "sizes": numbers, "leave_out": kinds, "columns": shown,
        "percent": percent_of(percent), "split": split, "target": target,
    }  # fmt: skip
    training: dict[str, Any] = {
        "seeds": range(seeds), "epochs": epochs, "to": to or [],
        "splits": range(split_seed, split_seed + splits),
        "how": {"device": on, "jobs": jobs, "minutes": minutes, "engine": engine,
                "address": address},
    }  # fmt: skip
    for name in chosen or ():
        if name not in known_variants():
            find(declared(name))
    total = splits * len(zoo_cells(what, zoo, **choice))
    with trainings_bar(what, total, quiet=as_json) as report:

        def tell(cell: Any, line: dict[str, Any]) -> None:
            report(f"{cell.row} · {cell.column}", line)

        results = reproduce(what, zoo, out, told=tell, **choice, **training)
    drawn = learning_curve(results, out / what) if what == LEARNING_CURVE.name else []
    if as_json:
        echo_json([asdict(result) for result in results])
        return
    Console().print(Markdown((out / f"{what}.md").read_text()))
    made = (out / f"{what}{end}" for end in (".md", ".parquet", "-paired.parquet"))
    for path in [*filter(Path.is_file, made), *drawn]:
        typer.echo(f"wrote {path}")
    if (left := total - len(results)) > 0:
        typer.echo(f"{left} cells are left for another call of the same command")
