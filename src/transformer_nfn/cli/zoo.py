"""The commands ``tnfn zoo …``: build, list, verify, import, export and damage zoos."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from transformer_nfn.cli.console import (
    HelpGroup,
    HelpTyper,
    echo_json,
    passing_count,
    table_console,
)
from transformer_nfn.cli.options import (
    DeviceOption,
    FamilyOption,
    JsonOption,
    SetOption,
    check_values,
    named,
    open_options,
    pick_device,
    seed_from,
    whole_numbers,
)
from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    pass

SIZES = ("width", "heads", "depth")
ARRAY_FILES = (".npy", ".npz", ".safetensors")
"""Files of arrays that `tnfn zoo import` reads."""
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
ZooName = Annotated[str, typer.Argument(metavar="ZOO", help="Its folder, or its name.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The task's files; fetched if not given."),
]


@zoo_app.command()
def build(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the zoo goes.")],
    task: Annotated[str, typer.Option(help="digits, mnist, fashion_mnist or ag_news.")] = "digits",
    runs: Annotated[
        int | None,
        typer.Option(help="How many of the 16,000 runs, balanced over optimisers (all)."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(max=100_000, help="Epochs per run (default: the task's).")
    ] = None,
    until: Annotated[
        int, typer.Option(help="Stop at 50 or 75 percent of the epochs; 100 trains them all.")
    ] = 100,
    keep: Annotated[
        int | None,
        typer.Option(help="Test and store only the checkpoint at this percent, and end there."),
    ] = None,
    seed: Annotated[
        int, typer.Option(callback=seed_from(0), help="Chooses the runs and their randomness.")
    ] = 0,
    seeds: Annotated[
        str, typer.Option(help="each: a seed for every run; one: the same for all (authors).")
    ] = "each",
    device: DeviceOption = "auto",
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[
        int | None, typer.Option(max=10_000, help="Processes (one per core; one per GPU).")
    ] = None,
    data: Data = None,
    address: Annotated[
        str | None, typer.Option(help="Of a Ray cluster; a local one if not given.")
    ] = None,
    gpu_share: Annotated[
        float, typer.Option(help="With ray on cuda: the part of a GPU that a worker takes.")
    ] = 1.0,
    vectors: Annotated[
        Path | None,
        typer.Option(help="A word2vec file, or a text zoo; vectors are trained if not given."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Maximum number of training samples.")] = None,
    batch: Annotated[
        int | None, typer.Option(max=10**6, help="Samples per step (default: the task's).")
    ] = None,
    select: Annotated[
        str, typer.Option(help="Choose the best epoch on held-out data, or (authors) on test.")
    ] = "held",
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16 products.")] = "float32",
    dtype: Annotated[str, typer.Option(help="Store weights as float32 or float16.")] = "float32",
    shard_runs: Annotated[int | None, typer.Option(help="Runs trained at once.")] = None,
    path: Annotated[
        str,
        typer.Option(help="Code of a step: auto, native, torch, compiled, fused or on-chip."),
    ] = "auto",
    width: Annotated[
        str, typer.Option(metavar="W[,W…]", help="Of the networks (32, the authors'), or several.")
    ] = "32",
    heads: Annotated[
        str, typer.Option(metavar="H[,H…]", help="Heads of each block (2), or several.")
    ] = "2",
    depth: Annotated[str, typer.Option(metavar="L[,L…]", help="Blocks (2), or several.")] = "2",
    as_json: JsonOption = False,
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
    arguments = dict(locals())
    from dataclasses import asdict, fields

    from transformer_nfn.cli.zoo_display import BuildBar
    from transformer_nfn.io.location import Location
    from transformer_nfn.zoo import BuildOptions, build_mixed, size_groups
    from transformer_nfn.zoo import build as build_zoo
    from transformer_nfn.zoo.summary import summarise

    form = "must look like 32 or 16,32,48"
    groups = size_groups(*(whole_numbers(arguments[s], f"--{s} {form}") for s in SIZES))
    arguments |= asdict(groups[0])
    if vectors is not None:
        arguments["vectors"] = Location.of(vectors).folder("zoo")
    options = BuildOptions(**{field.name: arguments[field.name] for field in fields(BuildOptions)})
    with BuildBar(Console(stderr=True)) as bar:
        if len(groups) == 1:
            summary = summarise(build_zoo(out, options, bar))
        else:
            summary = summarise(build_mixed(out, options, groups, bar))
    if as_json:
        echo_json(summary)
        return
    of_groups = f" of {len(groups)} kinds of network" if len(groups) > 1 else ""
    typer.echo(
        f"{out}: {summary['runs']} runs{of_groups}, {summary['checkpoints']} checkpoints, "
        f"{summary['crashed']} crashed, test accuracy {_accuracies(summary['accuracy'])}"
    )


@zoo_app.command()
def info(path: ZooPath, as_json: JsonOption = False) -> None:
    """Summarise a zoo: counts, accuracies and a histogram.

    A mixed zoo has a line for each size, a zoo of your own networks one for each target.

    [bold]Examples[/bold]

      tnfn zoo info zoos/digits
      tnfn zoo info mnist-sample   # by name, see `tnfn assets`
    """
    from transformer_nfn.cli.zoo_display import print_mixed, print_named, print_summary
    from transformer_nfn.zoo.store import Zoo
    from transformer_nfn.zoo.summary import summarise

    zoo = Zoo.open(path)
    summary = summarise(zoo)
    if as_json:
        echo_json(summary)
        return
    show = print_named if zoo.named else print_mixed if zoo.mixed else print_summary
    show(Console(), summary)


@zoo_app.command()
def rows(
    path: ZooName,
    run: Annotated[list[str] | None, typer.Option(help="Only this run; may be repeated.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Only runs of this optimiser.")] = None,
    min_accuracy: Annotated[
        float | None, typer.Option(help="Minimum test accuracy (0 to 1).")
    ] = None,
    max_accuracy: Annotated[float | None, typer.Option(help="Maximum test accuracy.")] = None,
    percent: Annotated[
        int | None, typer.Option(help="Checkpoints at 50, 75 or 100 percent of the training.")
    ] = None,
    epoch: Annotated[int | None, typer.Option(help="Checkpoints of this epoch.")] = None,
    best: Annotated[
        bool | None,
        typer.Option("--best/--no-best", help="Only the best of each run, or none of these."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the networks of a zoo with their test accuracy.

    `tnfn predict` and other commands take a row by the name shown here. Networks of your own are
    listed with their targets, and selected by the targets of these names.

    [bold]Examples[/bold]

      tnfn zoo rows mnist-sample --optimizer adam --min-accuracy 0.9
      tnfn zoo rows zoos/digits --percent 75 --json
    """
    from transformer_nfn.cli.network_tables import rows_table
    from transformer_nfn.networks import zoo_rows
    from transformer_nfn.zoo.store import Zoo

    opened = Zoo.open(path)
    for option, bound in (("--min-accuracy", min_accuracy), ("--max-accuracy", max_accuracy)):
        if bound is not None and not 0 <= bound <= 1:
            raise TransformerNFNError(f"{option} must lie between 0 and 1, found {bound}")
    filters = {"run": run or (), "optimizer": [optimizer], "percent": [percent], "epoch": [epoch]}
    wanted = {column: [v for v in values if v is not None] for column, values in filters.items()}
    if opened.named:
        from transformer_nfn.cli.zoo_display import list_rows, matching_rows

        wanted["best"] = [] if best is None else [str(best).lower()]
        chosen = matching_rows(opened, wanted, min_accuracy, max_accuracy)
        list_rows(opened, path, chosen, as_json)
        return
    zoos = {f"{path}/{size}" if size else path: part for size, part in opened.parts.items()}
    for column, accepted in wanted.items():
        held = {value for zoo in zoos.values() for value in zoo.table[column].tolist()} - {0}
        if percent is not None and column == "percent":  # a checkpoint may count as several
            held |= {percent for zoo in zoos.values() if len(zoo.select(percent=percent))}
        check_values(path, column, held, accepted)
    records = []
    for name, zoo in zoos.items():
        selected = zoo.select(
            epoch=epoch,
            percent=percent,
            best=best,
            min_accuracy=min_accuracy,
            max_accuracy=max_accuracy,
            optimizer=optimizer,
            runs=run,
        )
        for network in zoo_rows(zoo, selected.tolist(), name):
            records.append({"name": network.name, "row": network.row, **(network.recorded or {})})
    if as_json:
        echo_json(records)
        return
    console = table_console()
    title = f"{path}: {len(records):,} of {len(opened):,} rows"
    console.print(rows_table(records, title, console))


@zoo_app.command()
def plot(
    path: ZooName,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="png, pdf or svg (ZOO.png).")
    ] = None,
    bins: Annotated[int, typer.Option(min=1, help="Bars.")] = 20,
) -> None:
    """Draw the histogram of accuracies, as in the paper.

    [bold]Example[/bold]

      tnfn zoo plot zoos/digits --out digits.png
    """
    from transformer_nfn.zoo.store import Zoo
    from transformer_nfn.zoo.summary import plot_accuracies

    zoo = Zoo.open(path)
    # Beside the folder, because a zoo holds only its own files; for a name, in this folder.
    target = out or Path(path).resolve().with_suffix(".png")
    typer.echo(plot_accuracies(zoo, target, bins))


@zoo_app.command()
def verify(
    path: ZooPath,
    data: Data = None,
    sample: Annotated[int, typer.Option(min=0, help="Networks to test again (per size).")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample.")] = 0,
    tolerance: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Test samples by which a network may differ (2; 10 if the zoo was imported).",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify checksums, and test a sample of networks again.

    An imported zoo was tested on other hardware, so it may differ by a few more test samples.

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


ListOption = Annotated[
    Path | None,
    typer.Option(
        "--list",
        metavar="FILE",
        help="Instead of PATH: a text file that names a checkpoint on each line, such as org/name "
        "of a hub.",
    ),
]


LayoutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="JSON",
        help="Names and shapes of the tensors in a row of an array, in order.",
    ),
]


@zoo_app.command("import")
def import_command(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="A folder of networks, a file of arrays, or the authors' folder or zip.",
        ),
    ] = None,
    listed: ListOption = None,
    targets: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="For your own networks: a table (.csv, .parquet, .jsonl) with a column 'file' and "
            "a column for each target; of arrays a line for each, in order.",
        ),
    ] = None,
    layout: LayoutOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the zoo goes (PATH-zoo).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be imported or not, and why.")
    ] = False,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out what cannot be imported, and report it.")
    ] = False,
    family: FamilyOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import your own networks, or the paper's published files.

    With --targets, PATH holds checkpoints of any family (see `tnfn architectures`), of any sizes:
    files (.safetensors, .pt, .gguf, …) or folders as model hubs lay them out. The table has a row
    for each of them, and any columns of numbers or text. Run the same command again to resume an
    interrupted import, or after adding networks and rows.

    A file of arrays (.npy, .npz, .safetensors) holds networks of any kind, all of one layout: one
    array with a row for each network and a --layout such as {"conv": [8, 3], "bias": [8]}, or an
    array for each tensor, with the networks along its first axis.

    [bold]Examples[/bold]

      tnfn zoo import runs/ --targets accuracies.csv --out zoos/mine --dry-run
      tnfn zoo import encoders/ --targets table.parquet --set nhead=4
      tnfn zoo import cnns.npy --layout layout.json --targets losses.csv
      tnfn zoo import --list ids.txt --out zoos/models
      tnfn zoo import MNIST-Transformers.zip --out zoos/mnist-authors
    """
    named = [path for path in (source, listed) if path is not None]
    if len(named) != 1:
        raise TransformerNFNError("name the folder of the networks, or a list of them with --list")
    real = Path(os.path.realpath(source := named[0]))
    if out is None and not real.name:
        raise TransformerNFNError(f"name the folder of the zoo of '{source}' with --out")
    target = out or real.with_name(real.stem + "-zoo")
    from transformer_nfn.cli.zoo_import import import_array_file, import_listed, import_table

    options = open_options(None, family, settings)
    if listed is not None:
        if targets is not None or dry_run or layout is not None:
            raise TransformerNFNError("--list takes neither --targets, --layout nor --dry-run")
        import_listed(listed, target, options, skip=skip, as_json=as_json)
        return
    if source.suffix in ARRAY_FILES and (layout is not None or source.is_file()):
        if options or dry_run:
            raise TransformerNFNError("--family, --set and --dry-run are for checkpoints")
        import_array_file(source, target, layout, targets, skip=skip, as_json=as_json)
        return
    if layout is not None:
        raise TransformerNFNError(f"--layout is for a file of arrays ({', '.join(ARRAY_FILES)})")
    if targets is not None:
        import_table(source, targets, target, options, dry_run=dry_run, skip=skip, as_json=as_json)
        return
    if dry_run or skip or options:
        raise TransformerNFNError(
            "--dry-run, --skip, --family and --set are for your own networks: name their table "
            "with --targets"
        )
    from transformer_nfn.zoo.authors import import_authors

    zoo, report = import_authors(source, target)
    if as_json:
        summary = {"path": str(target), "checkpoints": len(zoo), "stray": dict(report.stray)}
        echo_json(summary | {"notes": report.notes})
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
    """Write every checkpoint as a file, with a table.

    State dicts in the authors' layout; a mixed zoo gets a folder for each size. Of a zoo of your
    own checkpoints, a folder for each as model hubs lay it out, and targets.csv; of arrays
    weights.safetensors and targets.csv.

    [bold]Example[/bold]

      tnfn zoo export zoos/digits --out per-run
    """
    from transformer_nfn.zoo.export import export_zoo
    from transformer_nfn.zoo.store import Zoo

    zoo = Zoo.open(path)
    what = "networks and targets.csv" if zoo.named else "state dicts"
    typer.echo(f"{out}: {export_zoo(zoo, out)} {what}")


@zoo_app.command()
def damage(
    path: ZooPath,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the damaged networks go.")],
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:STRENGTH],…",
            help="shuffled, tensor, block, exchanged, untrained, noise, pruned, quantised (all).",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Networks of each kind (one of each run).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the damage.")] = 0,
    percent: Annotated[int, typer.Option(help="Checkpoint of each run: 50, 75, 100.")] = 75,
    data: Data = None,
    device: Annotated[str, typer.Option(help="Device of the tests: cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Damage the networks of a zoo, test them and store them.

    For `tnfn train --damaged`, which makes predictors that detect broken networks. Entries of
    every tensor shuffled (by half, or all), one tensor or one block initialised again, blocks
    exchanged between networks, untrained networks, noise, pruning, quantisation to few bits.
    Run the same command again to resume an interrupted one.

    [bold]Examples[/bold]

      tnfn zoo damage zoos/digits --out zoos/digits-damaged
      tnfn zoo damage mnist-sample --out damaged --kinds shuffled:1,noise
    """
    from transformer_nfn.zoo.summary import summarise
    from transformer_nfn.zoo.training.damage import DamageOptions, damage_zoo

    options = DamageOptions(
        kinds, count, seed, percent, data=data, device=pick_device(device)
    )
    with passing_count("networks") as report:
        zoo = damage_zoo(path, out, options, report)
    summary = summarise(zoo)
    if as_json:
        echo_json(summary)
        return
    typer.echo(f"{out}: {summary['checkpoints']} damaged networks of {summary['runs']} runs")
    for name, accuracy in summary["by_damage"].items():
        typer.echo(f"  {name}: {accuracy['count']}, test accuracy {_accuracies(accuracy)}")


def _accuracies(accuracy: dict[str, float]) -> str:
    if not accuracy["count"]:
        return "unknown"
    return f"{accuracy['min']:.1%} to {accuracy['max']:.1%} (median {accuracy['median']:.1%})"
