"""The commands ``tnfn zoo …``: build, look at, check, import and export a zoo."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from transformer_nfn.cli.console import HelpGroup, HelpTyper, echo_json, table_console
from transformer_nfn.cli.options import named, seed_from
from transformer_nfn.cli.zoo_damage import damage
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from transformer_nfn.zoo.store import Zoo

KNOWN_SHOWN = 8
"""Values of a column that an error names."""
zoo_app = HelpTyper(
    cls=HelpGroup,
    help="Build, list, verify, import and export zoos of networks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
ZooPath = Annotated[
    Path,
    typer.Argument(
        metavar="ZOO", help="The zoo: its folder, or its name.", callback=named("zoo")
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for another program.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The task's files; fetched if not given."),
]


@zoo_app.command()
def build(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the zoo goes.")],
    task: Annotated[str, typer.Option(help="digits, mnist, fashion_mnist or ag_news.")] = "digits",
    runs: Annotated[
        int | None, typer.Option(help="So many of the 16,000 runs, balanced over optimisers.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(max=100_000, help="Epochs a run (the task's own).")
    ] = None,
    until: Annotated[
        int, typer.Option(help="Stop at 50 or 75 percent of the epochs; 100 trains them all.")
    ] = 100,
    seed: Annotated[
        int, typer.Option(callback=seed_from(0), help="Chooses the runs and their randomness.")
    ] = 0,
    seeds: Annotated[
        str, typer.Option(help="each: a seed for every run; one: the same for all (authors).")
    ] = "each",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(max=10_000, help="Processes at once (one a core; one a GPU).")
    ] = None,
    data: Data = None,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster; a local one if not given.")
    ] = None,
    vectors: Annotated[
        Path | None,
        typer.Option(help="A word2vec file, or a text zoo; vectors are trained if not given."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Train on so many samples at most.")] = None,
    batch: Annotated[
        int | None, typer.Option(max=10**6, help="Samples a step (the task's own).")
    ] = None,
    select: Annotated[
        str, typer.Option(help="Choose the best epoch on held-out data, or (authors) on test.")
    ] = "held",
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16 products.")] = "float32",
    dtype: Annotated[str, typer.Option(help="Store weights as float32 or float16.")] = "float32",
    shard_runs: Annotated[int | None, typer.Option(help="Runs trained at once.")] = None,
    path: Annotated[
        str, typer.Option(help="How steps are computed: auto, native, torch or compiled.")
    ] = "auto",
    width: Annotated[
        str, typer.Option(metavar="W[,W…]", help="Of the networks (32, the paper's), or several.")
    ] = "32",
    heads: Annotated[
        str, typer.Option(metavar="H[,H…]", help="Heads of each block (2), or several.")
    ] = "2",
    depth: Annotated[str, typer.Option(metavar="L[,L…]", help="Blocks (2), or several.")] = "2",
    as_json: AsJson = False,
) -> None:
    """Train many small transformers and store their checkpoints.

    Run the same command again to resume an interrupted build; two builds of one folder share the
    work. With more --runs than before the zoo grows: its networks and their rows stay as they are.
    With several widths, heads or depths the runs are spread over all combinations, each in a
    separate folder: a mixed zoo.

    [bold]Examples[/bold]

      tnfn zoo build --task digits --out zoos/digits --runs 256
      tnfn zoo build --task mnist --out zoos/mnist --device cuda
      tnfn zoo build --out zoos/mixed --runs 512 --width 16,32 --depth 1,2
    """
    from transformer_nfn.cli.zoo_progress import BuildBar
    from transformer_nfn.io.assets import resolve
    from transformer_nfn.zoo.sizes import all_kinds
    from transformer_nfn.zoo.summary import summarise, summarise_mixed
    from transformer_nfn.zoo.training.build import build as build_zoo
    from transformer_nfn.zoo.training.build import build_mixed
    from transformer_nfn.zoo.training.plan import Settings

    kinds = all_kinds(
        _sizes(width, "--width"), _sizes(heads, "--heads"), _sizes(depth, "--depth")
    )
    settings = Settings(
        task=task,
        runs=runs,
        epochs=epochs,
        batch=batch,
        seed=seed,
        samples=samples,
        select=select,
        precision=precision,
        shard_runs=shard_runs,
        dtype=dtype,
        seeds=seeds,
        until=until,
        width=kinds[0].width,
        heads=kinds[0].heads,
        depth=kinds[0].depth,
    )
    with BuildBar(Console(stderr=True)) as bar:
        how: dict[str, Any] = {
            "data": data,
            "vectors": None if vectors is None else resolve(vectors, "zoo"),
            "device": device,
            "engine": engine,
            "workers": workers,
            "address": address,
            "path": path,
            "progress": bar,
        }
        if len(kinds) == 1:
            found = summarise(build_zoo(out, settings, **how))
        else:
            found = summarise_mixed(build_mixed(out, settings, kinds, **how))
    if as_json:
        echo_json(found)
        return
    of_kinds = f" of {len(kinds)} kinds of network" if len(kinds) > 1 else ""
    typer.echo(
        f"{out}: {found['runs']} runs{of_kinds}, {found['checkpoints']} checkpoints, "
        f"{found['crashed']} crashed, test accuracy {_span(found['accuracy'])}"
    )


@zoo_app.command()
def info(path: ZooPath, as_json: AsJson = False) -> None:
    """Summarise a zoo: counts, accuracies and a histogram.

    A mixed zoo has a line for each size.

    [bold]Examples[/bold]

      tnfn zoo info zoos/digits
      tnfn zoo info mnist-sample   # by name, see `tnfn assets`
    """
    from transformer_nfn.cli.zoo_tables import print_kinds, print_summary
    from transformer_nfn.zoo.store import MixedZoo, open_zoo
    from transformer_nfn.zoo.summary import summarise, summarise_mixed

    zoo = open_zoo(path)
    found = summarise_mixed(zoo) if isinstance(zoo, MixedZoo) else summarise(zoo)
    if as_json:
        echo_json(found)
    elif isinstance(zoo, MixedZoo):
        print_kinds(Console(), found)
    else:
        print_summary(Console(), found)


@zoo_app.command()
def rows(
    path: Annotated[str, typer.Argument(metavar="ZOO", help="Its folder, or its name.")],
    run: Annotated[list[str] | None, typer.Option(help="Only this run; may be repeated.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Only runs of this optimiser.")] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="Test accuracy at least this (0 to 1).")
    ] = None,
    max_accuracy: Annotated[
        float | None, typer.Option(help="Test accuracy at most this.")
    ] = None,
    percent: Annotated[
        int | None, typer.Option(help="Checkpoints at 50, 75 or 100 percent of the training.")
    ] = None,
    epoch: Annotated[int | None, typer.Option(help="Checkpoints of this epoch.")] = None,
    best: Annotated[
        bool | None,
        typer.Option("--best/--no-best", help="Only the best of each run, or none of these."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the networks of a zoo with their test accuracy.

    `tnfn predict` and other commands take a row by the name shown here.

    [bold]Examples[/bold]

      tnfn zoo rows mnist-sample --optimizer adam --min-accuracy 0.9
      tnfn zoo rows zoos/digits --percent 75 --json
    """
    from transformer_nfn.cli.network_tables import rows_table
    from transformer_nfn.io.assets import resolve
    from transformer_nfn.networks import zoo_rows
    from transformer_nfn.zoo.store import MixedZoo, open_zoo

    opened = open_zoo(resolve(path, "zoo"))
    zoos: dict[str, Zoo] = (
        {f"{path}/{kind}": zoo for kind, zoo in opened.zoos.items()}
        if isinstance(opened, MixedZoo)
        else {path: opened}
    )
    for option, bound in (("--min-accuracy", min_accuracy), ("--max-accuracy", max_accuracy)):
        if bound is not None and not 0 <= bound <= 1:
            raise TransformerNFNError(f"{option} must lie between 0 and 1, found {bound}")
    for column, wanted in (
        ("run", run or []), ("optimizer", [optimizer]), ("percent", [percent]), ("epoch", [epoch])
    ):  # fmt: skip
        _check_known(path, list(zoos.values()), column, [w for w in wanted if w is not None])
    listed = []
    for name, zoo in zoos.items():
        rows = zoo.select(
            epoch=epoch,
            percent=percent,
            best=best,
            min_accuracy=min_accuracy,
            max_accuracy=max_accuracy,
            optimizer=optimizer,
            runs=run,
        )
        for network in zoo_rows(zoo, rows.tolist(), name):
            listed.append({"name": network.name, "row": network.row, **(network.recorded or {})})
    if as_json:
        echo_json(listed)
        return
    title = f"{path}: {len(listed):,} of {len(opened):,} rows"
    console = table_console()
    console.print(rows_table(listed, title, console))


@zoo_app.command()
def plot(
    path: Annotated[Path, typer.Argument(metavar="ZOO", help="Its folder, or its name.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="png, pdf or svg (ZOO.png).")
    ] = None,
    bins: Annotated[int, typer.Option(min=1, help="Bars.")] = 20,
) -> None:
    """Draw the histogram of accuracies, as in the paper.

    [bold]Example[/bold]

      tnfn zoo plot zoos/digits --out digits.png
    """
    from transformer_nfn.io.assets import resolve
    from transformer_nfn.zoo.store import open_zoo
    from transformer_nfn.zoo.summary import plot_accuracies

    zoo = open_zoo(resolve(path, "zoo"))
    # Beside the folder, not in it: a zoo holds nothing but its own files. For a name, here.
    target = out or path.resolve().with_suffix(".png")
    typer.echo(plot_accuracies(zoo, target, bins))


@zoo_app.command()
def verify(
    path: ZooPath,
    data: Data = None,
    sample: Annotated[int, typer.Option(min=0, help="Networks to run again (of each kind).")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Chooses them.")] = 0,
    tolerance: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Test samples by which a network may differ (2; 10 if the zoo was imported).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify checksums, and test a sample of networks again.

    What was imported was tested on other hardware, so it may differ by a few more test samples.

    [bold]Examples[/bold]

      tnfn zoo verify zoos/digits --sample 32
      tnfn zoo verify zoos/mnist-authors --tolerance 20
    """
    from transformer_nfn.zoo.verify import verify as verify_zoo

    verdict = verify_zoo(path, data=data, sample=sample, seed=seed, tolerance=tolerance)
    if as_json:
        echo_json(vars(verdict) | {"ok": verdict.ok})
    else:
        for problem in verdict.problems:
            typer.echo(f"error: {problem}", err=True)
        difference = (
            f" (largest difference {verdict.worst_samples:g} of {verdict.test_samples:,} test "
            f"samples, tolerance {verdict.tolerance})"
        )
        typer.echo(
            f"{path}: {verdict.networks} networks checked, {verdict.rerun} run again"
            f"{difference if verdict.rerun else ''}; "
            + ("all well" if verdict.ok else f"{len(verdict.problems)} problems")
        )
        if verdict.note:
            typer.echo(verdict.note)
    if not verdict.ok:
        raise typer.Exit(1)


@zoo_app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="The folder or zip.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the zoo goes (PATH-zoo).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import the files that the paper's authors published.

    Keys that belong to no tensor are reported.

    [bold]Example[/bold]

      tnfn zoo import MNIST-Transformers.zip --out zoos/mnist-authors
    """
    from transformer_nfn.zoo.authors import import_authors

    whole = Path(os.path.realpath(source))
    if out is None and not whole.name:
        raise TransformerNFNError(f"name the folder of the zoo of '{source}' with --out")
    target = out or whole.with_name(whole.stem + "-zoo")
    zoo, report = import_authors(source, target)
    if as_json:
        found = {"path": str(target), "checkpoints": len(zoo), "stray": dict(report.stray)}
        echo_json(found | {"notes": report.notes})
        return
    typer.echo(f"{target}: {report.networks} checkpoints")
    for key, files in sorted(report.stray.items()):
        typer.echo(f"stray key '{key}' in {files} files, left out")
    for note in report.notes:
        typer.echo(note)


@zoo_app.command()
def export(
    path: ZooPath,
    out: Annotated[Path, typer.Option(metavar="DIR", help="An empty folder.")],
) -> None:
    """Write every checkpoint as a state dict in the authors' layout.

    A mixed zoo gets a folder for each size.

    [bold]Example[/bold]

      tnfn zoo export zoos/digits --out per-run
    """
    from transformer_nfn.zoo.export import export_authors
    from transformer_nfn.zoo.store import open_zoo

    typer.echo(f"{out}: {export_authors(open_zoo(path), out)} state dicts")


zoo_app.command()(damage)


def _check_known(path: str, zoos: Sequence[Zoo], column: str, wanted: Sequence[Any]) -> None:
    """Refuses values that a column of a zoo does not have, and names those that it has."""
    known = sorted({value for zoo in zoos for value in zoo.table[column].tolist()} - {0})
    for value in wanted:
        if column == "percent" and any(len(zoo.select(percent=value)) for zoo in zoos):
            continue  # one checkpoint may stand for several percents
        if value not in known:
            shown = ", ".join(map(str, known[:KNOWN_SHOWN]))
            more = f" and {len(known) - KNOWN_SHOWN:,} more" if len(known) > KNOWN_SHOWN else ""
            raise TransformerNFNError(
                f"'{path}' has no rows of {column} '{value}': it has {shown or 'none'}{more}"
            )


def _sizes(text: str, option: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise TransformerNFNError(
            f"{option} must look like 32 or 16,32,48, found '{text}'"
        ) from None


def _span(accuracy: dict[str, float]) -> str:
    if not accuracy["count"]:
        return "unknown"
    return f"{accuracy['min']:.1%} to {accuracy['max']:.1%} (median {accuracy['median']:.1%})"
