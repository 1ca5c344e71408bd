"""Commands about predictors: train, evaluate, predict."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.console import echo_json, table_console
from transformer_nfn.cli.experiment_progress import (
    class_table,
    epochs_bar,
    kinds_table,
    networks_bar,
    result_table,
)
from transformer_nfn.cli.options import (
    DeviceOption,
    FamilyOption,
    JsonOption,
    PercentOption,
    SetOption,
    SplitOption,
    SplitSeedOption,
    VariantOption,
    named,
    open_options,
    percent_of,
    pick_device,
)
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.known_tasks import SEED_KINDS, seeds_text

RunArgument = Annotated[
    Path,
    typer.Argument(
        help="A run folder, from `tnfn train`, or its name.", callback=named("predictor")
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", help="Run a predictor's own code, if it is what the run recorded."),
]
OwnModelOption = Annotated[
    str | None,
    typer.Option("--model", help="A class of yours to use instead of the recorded code."),
]
BatchOption = Annotated[int, typer.Option(min=1, max=10**6, help="Networks in memory at once.")]


def train_command(
    zoo: Annotated[
        Path | None,
        typer.Argument(
            help="A zoo, from `tnfn zoo build` or `tnfn zoo import`, or its name.",
            callback=named("zoo"),
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run folder to write.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Which predictor, see `tnfn models`. A class of yours is FILE.py:CLASS "
            "or MODULE:CLASS; its code is run."
        ),
    ] = "whole_network",
    variant: VariantOption = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="An option of the predictor."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(metavar="COLUMN", help="What to predict; `--target list` names the columns."),
    ] = "test_accuracy",
    min_accuracy: Annotated[
        float, typer.Option(help="Only networks at least this accurate (0 to 1).")
    ] = 0.0,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="How many seeds to train.")] = 5,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Passes over the networks (by model)."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Networks per step (by model).")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate (by model).")] = None,
    percent: PercentOption = "75",
    split: SplitOption = "run",
    split_seed: SplitSeedOption = 0,
    damaged: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Damaged copies, from `tnfn zoo damage`."),
    ] = None,
    hold_out: Annotated[
        str | None,
        typer.Option(metavar="DAMAGE,…", help="Damage that the guard is not trained on."),
    ] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(metavar="SIZE,…", help="Sizes of a mixed zoo to test on only."),
    ] = None,
    device: DeviceOption = "auto",
    save_every: Annotated[
        float, typer.Option(min=0, help="Seconds between two saved states to resume from.")
    ] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """Train a predictor of accuracy, or another target, on a zoo.

    The default model reads whole networks: their outputs on learned probe inputs, and invariants
    of their weights. The paper's models are trained by its protocol: batch 16, Adam at 1e-3 after a
    warm-up, binary cross-entropy, 50 epochs; after the warm-up a cosine, as in its authors' code.
    The validation part chooses the best epoch. Run the same command again to resume an interrupted
    training.

    On a mixed zoo a predictor that reads any size trains on all sizes at once, except those in
    --leave-out, such as w48-h4-d3. It reports τ per size and for the sizes left out.

    With --target the predictor learns another column of the zoo's table: a number between 0 and 1,
    any other number (as its logarithm where it spans decades: errors are in decades then), or a
    class, such as the optimiser.
    A class has a predictor each, and is measured by accuracy, AUROC and calibration.

    With --damaged the run also keeps a guard against damaged networks: an accuracy estimate from
    outputs, intervals that widen with the outlier score, and warnings. For checkpoints of your own
    a guard is fitted to copies that are damaged in memory.

    [bold]Examples[/bold]

      tnfn train zoo --out run

      tnfn train zoo --damaged zoo-damaged --hold-out untrained,block --out run

      tnfn train zoo --model invariant_mlp --min-accuracy 0.4 --seeds 3 --out run

      tnfn train zoo --target optimizer --out run

      tnfn train mixed --leave-out w48-h4-d3 --out run

      tnfn train zoo --model own.py:SetEncoder --option width=128 --out run

      tnfn train mnist-sample --out run   # by name, see `tnfn assets`
    """
    from transformer_nfn.prediction.api import train
    from transformer_nfn.prediction.target import target_columns
    from transformer_nfn.zoo import Zoo

    if zoo is not None and target == "list":
        columns = target_columns(Zoo.open(zoo))
        echo_json(columns) if as_json else typer.echo("\n".join(columns))
        return
    if zoo is None or out is None:
        missing = "a zoo to train on" if zoo is None else "the run folder to write with --out"
        raise TransformerNFNError(f"name {missing}, as in tnfn train ZOO --out RUN")
    with epochs_bar(model, quiet=as_json) as report:
        run = train(
            zoo,
            model,
            out=out,
            seeds=seeds,
            variant=variant,
            options=_options(options or []),
            target=target,
            percent=percent_of(percent),
            split=split,
            split_seed=split_seed,
            min_accuracy=min_accuracy,
            leave_out=() if leave_out is None else leave_out.split(","),
            damaged=damaged,
            hold_out=hold_out,
            epochs=epochs,
            batch=batch,
            lr=lr,
            device=pick_device(device),
            save_every=save_every,
            report=report,
        )
    _show(run.record, out, as_json)


def _options(pairs: list[str]) -> dict[str, Any]:
    """Options of a predictor from ``NAME=VALUE``, values as JSON or else as text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise TransformerNFNError(f"--option expected NAME=VALUE, found '{pair}'")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _show(record: Any, out: Path, as_json: bool) -> None:
    if as_json:
        echo_json(asdict(record))
        return
    counts = ", ".join(f"{record.selection[k]} {k}" for k in ("train", "val", "test"))
    kind = record.zoo.get("seeds")
    seeds = f", {seeds_text(kind)}" if kind in SEED_KINDS else ""
    title = f"{out} ({counts} networks{seeds})"
    column = "" if record.target is None else f"{record.target['column']} of "
    make = class_table if "auroc" in record.summary else result_table
    Console().print(make([record], column + title))
    if "kinds" in record.summary:
        table_console().print(kinds_table(record.summary))


def evaluate_command(
    run: RunArgument,
    zoo: Annotated[
        Path | None,
        typer.Argument(
            help="Another zoo to evaluate on; without it the recorded results are shown.",
            callback=named("zoo"),
        ),
    ] = None,
    min_accuracy: Annotated[float, typer.Option(help="Only networks this accurate.")] = 0.0,
    percent: PercentOption = "75",
    device: DeviceOption = "auto",
    batch: BatchOption = 512,
    trust: TrustOption = False,
    model: OwnModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a trained predictor on its test set or another zoo.

    Networks of its training and validation sets are counted, and the scores on the others are shown
    beside those on all.

    [bold]Examples[/bold]

      tnfn evaluate run

      tnfn evaluate run other-zoo --json

      tnfn evaluate run other-zoo --device cuda --batch 4096

      tnfn evaluate mnist-whole mnist-sample   # both by name, see `tnfn assets`
    """
    from transformer_nfn.prediction.runs import RunRecord

    if zoo is None:
        record = RunRecord.read(run)
        record.check_finished(run)
        _show(record, run, as_json)
        return
    from transformer_nfn.prediction.evaluate import evaluate

    with networks_bar("evaluate", quiet=as_json) as report:
        scores = evaluate(
            run, zoo, percent=percent_of(percent), min_accuracy=min_accuracy,
            device=pick_device(device), batch=batch, report=report, trust=trust, model=model,
        )  # fmt: skip
    if as_json:
        echo_json(scores)
        return
    kind = scores["zoo_seeds"]
    title = f"{zoo} ({seeds_text(kind)})" if kind in SEED_KINDS else str(zoo)
    if scores["target"] != "test_accuracy":
        title = f"{scores['target']} of {title}"
    of_classes = "auroc" in scores
    names = ["accuracy", "AUROC", "calibration error"] if of_classes else [
        "Kendall τ", "90 % interval of τ", "R²", "mean error"
    ]  # fmt: skip
    names += ["worth labelled examples"] if "examples" in scores else []
    table = Table("", "networks", *names, "interval holds", title=title)
    rows = _all_and_unseen("all", scores)
    for size, figures in scores.get("kinds", {}).items():
        rows += _all_and_unseen(size, figures)
    for name, figures in rows:
        table.add_row(
            name,
            str(figures["networks"]),
            *_cells(figures, scores["target"]),
            f"{100 * figures['coverage']:.1f} %",
        )
    table_console().print(table)
    for sentence in (scores["note"], scores["warning"]):
        if sentence is not None:
            typer.echo(f"warning: {sentence}", err=True)


def _cells(figures: dict[str, Any], target: str) -> list[str]:
    """Scores of numbers or of classes."""
    from transformer_nfn.paper.numbers import examples_text, mean_text
    from transformer_nfn.zoo.targets import names_accuracy

    if "auroc" in figures:
        return [mean_text(figures[key]) for key in ("accuracy", "auroc", "calibration_error")]
    error = f"{figures['mae']:{'.3f' if names_accuracy(target) else '.3g'}}"
    tau = f"{figures['tau_low']:.3f} to {figures['tau_high']:.3f}"
    cells = [f"{figures['tau']:.3f}", tau, mean_text(figures["r2"]), error]
    if "examples" in figures:
        worth, *ends = (examples_text(count) for count in figures["examples"])
        cells.append(f"{worth} ({' to '.join(ends)})")
    return cells


def _all_and_unseen(name: str, figures: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Scores on all networks, and on those never seen if these are not all."""
    unseen = figures["unseen"] if figures["note"] is not None else None
    return [(name, figures), *([(f"{name}, never seen", unseen)] if unseen else [])]


def predict_command(
    run: RunArgument,
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="NETWORKS",
            help="Files (.safetensors, .pt), folders, patterns ('nets/*.pt'), a zoo, or rows of "
            "one (ZOO#12, ZOO#3-9, ZOO#0,4).",
        ),
    ],
    device: DeviceOption = "auto",
    batch: BatchOption = 512,
    family: FamilyOption = None,
    settings: SetOption = None,
    trust: TrustOption = False,
    model: OwnModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict accuracy, or another target, from weights.

    Every prediction has a 90 % interval, which widens with the distance to the training set.
    Networks that look damaged get a warning. For networks of a zoo the recorded value is shown.
    Tensors that the networks of the zoo do not have are ignored and listed; another architecture is
    rejected. For state dicts of your own modules --set states what these do not, and the mapping of
    their tensors is shown.

    [bold]Examples[/bold]

      tnfn predict run zoo#0 zoo#3-9

      tnfn predict run 'nets/*.pt' --json

      tnfn predict mnist-whole mnist-sample   # both by name, see `tnfn assets`
    """
    from transformer_nfn.cli.network_tables import predictions_table, unique_mappings
    from transformer_nfn.prediction.predict import predict
    from transformer_nfn.prediction.runs import RunRecord

    with networks_bar("predict", quiet=as_json) as report:
        predictions = predict(
            run, checkpoints, device=pick_device(device), batch=batch, report=report,
            options=open_options(None, family, settings), trust=trust, model=model,
        )  # fmt: skip
    if as_json:
        records = [asdict(p) for p in predictions]
        for record in records:
            if record["label"] is not None:  # classes have no interval
                del record["low"], record["high"]
        echo_json(records)
        return
    console = table_console()
    console.print(predictions_table(predictions, console))
    for mapping in unique_mappings(predictions):
        typer.echo(mapping)
    for p in predictions:
        for word, sentence in (
            ("warning", p.warning), ("note", p.note), ("note", p.explanation),
        ):  # fmt: skip
            if sentence is not None:
                typer.echo(f"{word}: {p.name}: {sentence}", err=True)
    can_guard = RunRecord.read(run).kind == "built"
    unguarded = sum(not p.guarded and p.target == "test_accuracy" for p in predictions)
    if unguarded and can_guard:
        typer.echo(
            f"note: {unguarded} of {len(predictions)} predictions have no guard: a damaged network "
            "may pass for a good one without a warning (train --damaged keeps a guard)",
            err=True,
        )
