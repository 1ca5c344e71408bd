"""The command that makes the paper's tables and figures, and a learning curve, from any zoo."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from transformer_nfn.cli.console import echo_json
from transformer_nfn.cli.experiment_progress import count_one, counting_bar
from transformer_nfn.cli.options import DeviceOption, JsonOption, pick_device
from transformer_nfn.cli.transfer import reproduce_transfer, zoo_or_run
from transformer_nfn.errors import TransformerNFNError

WHAT = (
    *(f"table{number}" for number in range(1, 7)),
    "learning-curve",
    "mixed",
    "transfer",
    "figures",
)


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
        typer.Option(help="Only these, separated by commas (tables 1, 2 and 6, learning-curve)."),
    ] = None,
    percent: Annotated[int, typer.Option(help="Which checkpoint of each run.")] = 75,
    sizes: Annotated[
        str | None,
        typer.Option(help="learning-curve: these numbers of networks, separated by commas."),
    ] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(metavar="KIND,…", help="mixed: kinds left out in turn (three of them)."),
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

    The numbers of the paper stand beside those of the zoo.

      table1, table2  nine models, five accuracy thresholds (MNIST, AG News)
      table3          components of Transformer-NFN
      table4          width and depth of Transformer-NFN
      table5          numbers of parameters
      table6          augmentation by the group action
      learning-curve  all models trained on 64, 128, … networks and on all
      mixed           τ on every size of a mixed zoo, and on sizes left out
      transfer        predictors of this zoo rank the networks of other zoos
      figures         histogram, scatter and τ by number of networks, from --out

    Finished cells are kept: run the same command again to resume an interrupted one.

    [bold]Examples[/bold]

      tnfn reproduce table1 zoo --out results
      tnfn reproduce table1 mnist-sample --out results   # see `tnfn assets`
      tnfn reproduce table6 zoo --out results --models transformer_nfn,mlp
      tnfn reproduce learning-curve zoo --out results --sizes 100,717
      tnfn reproduce mixed zoos/mixed --out results --leave-out w48-h4-d3
      tnfn reproduce transfer mnist-zoo --to fashion-zoo --out results
      tnfn reproduce figures zoo --out results
    """
    if what not in WHAT:
        raise TransformerNFNError(f"there is no '{what}' to reproduce; there are {', '.join(WHAT)}")
    if to and what != "transfer":
        raise TransformerNFNError(f"--to is for transfer, {what} has none")
    if what == "figures":
        _figures(zoo, out)
        return
    if what == "transfer":
        reproduce_transfer(
            zoo, to or [], out, seeds=seeds, epochs=epochs, models=models, percent=percent,
            device=device, as_json=as_json,
        )  # fmt: skip
        return
    from transformer_nfn.paper.figures import check_matplotlib, learning_curve
    from transformer_nfn.paper.tables import reproduce, zoo_cells
    from transformer_nfn.prediction.predictors import check_name

    chosen = models.split(",") if models else None
    for name in chosen or ():
        check_name(name)
    counts, kinds = _whole_numbers(sizes, what), _kinds(leave_out, what)
    cells = zoo_cells(what, zoo, chosen, percent, counts, kinds)
    if what == "learning-curve":
        check_matplotlib()
    console = Console(stderr=True, quiet=as_json)
    with counting_bar(console) as bar:
        task = bar.add_task(what, total=len(cells), note="")

        def progress(cell: Any, line: dict[str, Any]) -> None:
            said, record = None, line.get("record")
            if record is not None:
                said = f"τ {record.summary['tau']:.3f}" if record.summary else record.status
            count_one(bar, task, f"{cell.row} · {cell.column}", line, said)

        records = reproduce(
            what,
            zoo,
            out,
            seeds=list(range(seeds)),
            epochs=epochs,
            models=chosen,
            percent=percent,
            sizes=counts,
            leave_out=kinds,
            device=pick_device(device),
            progress=progress,
            engine=engine,
            address=address,
        )
    drawn = learning_curve(records, out / what) if what == "learning-curve" else []
    if as_json:
        echo_json([asdict(r) for r in records])
        return
    text = (out / f"{what}.md").read_text()
    Console().print(Markdown(text))
    typer.echo(f"wrote {out}/{what}.md and {out}/{what}.parquet")
    for path in drawn:
        typer.echo(f"wrote {path}")


def _whole_numbers(sizes: str | None, what: str) -> list[int] | None:
    if sizes is None:
        return None
    if what != "learning-curve":
        raise TransformerNFNError(f"--sizes is for learning-curve, {what} has none")
    try:
        return [int(size) for size in sizes.split(",")]
    except ValueError:
        raise TransformerNFNError(
            f"--sizes must be whole numbers separated by commas, found '{sizes}'"
        ) from None


def _kinds(leave_out: str | None, what: str) -> list[str] | None:
    if leave_out is not None and what != "mixed":
        raise TransformerNFNError(f"--leave-out is for mixed, {what} has no kinds")
    return None if leave_out is None else leave_out.split(",")


def _figures(zoo: Path, out: Path) -> None:
    from transformer_nfn.paper.figures import write_figures

    for path in write_figures(zoo, out):
        typer.echo(f"wrote {path}")
