"""Commands about predictors: train one on a zoo, measure it, ask it about checkpoints."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from transformer_nfn.cli.console import echo_json, table_console
from transformer_nfn.cli.experiment_progress import epochs_bar, kinds_table, result_table
from transformer_nfn.cli.options import named
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.known_tasks import seeds_text

ZooArgument = Annotated[
    Path,
    typer.Argument(help="A zoo, from `tnfn zoo build`, or its name.", callback=named("zoo")),
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        help="A run folder, from `tnfn train`, or its name.", callback=named("predictor")
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def pick_device(name: str) -> str:
    """``auto`` is CUDA where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise TransformerNFNError(f"--device must be auto, cpu or cuda, found '{name}'")
    if name == "cuda" and not torch.cuda.is_available():
        raise TransformerNFNError("--device cuda: there is no CUDA device here")
    return name


def train_command(
    zoo: Annotated[
        Path | None,
        typer.Argument(help="A zoo, from `tnfn zoo build`, or its name.", callback=named("zoo")),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run folder to write.")] = None,
    model: Annotated[str, typer.Option(help="Which predictor; `--model list` names them.")] = (
        "whole_network"
    ),
    min_accuracy: Annotated[
        float, typer.Option(help="Only networks at least this accurate (0 to 1).")
    ] = 0.0,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="How many seeds to train.")] = 5,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="Passes over the networks (the model's own)."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Networks a step (the model's own).")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Highest rate (the model's own).")] = None,
    channels: Annotated[
        str | None, typer.Option(help="Of Transformer-NFN's layers, such as 10 or 10,10.")
    ] = None,
    percent: Annotated[int, typer.Option(help="Which checkpoint of each run: 50, 75, 100.")] = 75,
    damaged: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Damaged relatives, from `tnfn zoo damage`, to learn of."),
    ] = None,
    hold_out: Annotated[
        str | None,
        typer.Option(metavar="KIND,…", help="Of --damaged, kinds that are not looked at."),
    ] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(metavar="KIND,…", help="Of a mixed zoo, kinds to test on, not to learn from."),
    ] = None,
    device: DeviceOption = "auto",
    save_every: Annotated[
        float, typer.Option(min=0, help="Seconds between two saved states to resume from.")
    ] = 20.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a predictor of accuracy on the networks of a zoo.

    By default the model that reads whole networks: probes learned from the zoo, and what they are
    answered. The paper's models are trained by its protocol: batch 16, Adam at 1e-3 with warm-up
    and cosine, binary cross-entropy, 50 epochs. The best epoch is chosen by the validation part.
    Killed, the same command goes on where it was.

    From a mixed zoo a predictor that reads any size learns from all kinds at once, but for those
    that --leave-out names, such as w48-h4-d3; τ is told for every kind and for those left out.

    With --damaged the run also keeps a guard against broken networks: a second opinion learned from
    damaged relatives of the training networks, intervals that widen with strangeness, a warning.

    [bold]Examples[/bold]

      tnfn train zoo --out run

      tnfn train zoo --damaged zoo-damaged --hold-out untrained,block --out run

      tnfn train zoo --model invariant_mlp --min-accuracy 0.4 --seeds 3 --out run

      tnfn train mixed --leave-out w48-h4-d3 --out run

      tnfn train mnist-sample --out run   # by name, see `tnfn assets`
    """
    from transformer_nfn.prediction.damaged import load_damaged
    from transformer_nfn.prediction.kinds import Kinds, load_networks
    from transformer_nfn.prediction.predictors import (
        ALL_CHECKPOINTS,
        NEURAL,
        PREDICTORS,
        check_name,
    )
    from transformer_nfn.prediction.protocol import Protocol
    from transformer_nfn.prediction.runs import check_kinds, describe_zoo, train_run
    from transformer_nfn.zoo import MixedZoo, Zoo, open_zoo
    from transformer_nfn.zoo.damage import parse_damages

    if model == "list":
        echo_json(list(PREDICTORS)) if as_json else typer.echo("\n".join(PREDICTORS))
        return
    check_name(model)
    if zoo is None or out is None:
        missing = "a zoo to train on" if zoo is None else "the run folder to write with --out"
        raise TransformerNFNError(f"name {missing}, as in tnfn train ZOO --out RUN")
    options: dict[str, Any] = {}
    if channels is not None:
        options["channels"] = _channels(channels)
    opened = open_zoo(zoo)
    check_kinds(model, mixed=isinstance(opened, MixedZoo), damaged=damaged is not None)
    parts = load_networks(
        opened,
        leave_out=() if leave_out is None else leave_out.split(","),
        percent=percent,
        min_accuracy=min_accuracy,
        all_checkpoints=model in ALL_CHECKPOINTS,
    )
    if hold_out is not None and damaged is None:
        raise TransformerNFNError("--hold-out chooses among damaged networks: name --damaged DIR")
    relatives = None
    if damaged is not None and isinstance(opened, Zoo) and not isinstance(parts, Kinds):
        kinds = None if hold_out is None else parse_damages(hold_out)
        relatives = load_damaged(Zoo.open(damaged), opened, parts, kinds)
    if model in NEURAL:
        parts = parts.to(pick_device(device))
    with epochs_bar(model, quiet=as_json) as report:
        record = train_run(
            describe_zoo(opened),
            parts,
            model,
            out,
            seeds=list(range(seeds)),
            protocol=Protocol.of(model, epochs, batch, lr),
            options=options,
            selection={"percent": percent, "min_accuracy": min_accuracy, "augment": None},
            report=report,
            save_every=save_every,
            damaged=relatives,
        )
    if tensorboard:
        from transformer_nfn.prediction.events import write_events

        write_events(out)
    _show(record, out, as_json)


def _channels(text: str) -> list[int]:
    words = text.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,4}\s*", word) and int(word) for word in words):
        raise TransformerNFNError(
            f"--channels must look like 10 or 10,10, each from 1 to 9999, found '{text}'"
        )
    return [int(word) for word in words]


def _show(record: Any, out: Path, as_json: bool) -> None:
    if as_json:
        echo_json(asdict(record))
        return
    counts = ", ".join(f"{record.selection[k]} {k}" for k in ("train", "val", "test"))
    kind = record.zoo.get("seeds")
    seeds = "" if kind is None else f", {seeds_text(kind)}"
    Console().print(result_table([record], f"{out} ({counts} networks{seeds})"))
    if "kinds" in record.summary:
        table_console().print(kinds_table(record.summary))


def evaluate_command(
    run: RunArgument,
    zoo: Annotated[
        Path | None,
        typer.Argument(
            help="Another zoo, or a mixed one, to measure it on; else what it says itself.",
            callback=named("zoo"),
        ),
    ] = None,
    min_accuracy: Annotated[float, typer.Option(help="Only networks this accurate.")] = 0.0,
    percent: Annotated[int, typer.Option(help="Which checkpoint of each run.")] = 75,
    as_json: JsonOption = False,
) -> None:
    """Measure a trained predictor on its test set or another zoo.

    Networks that it was trained on, or that chose its best epoch, are counted; the figures of the
    others stand beside those of all.

    [bold]Examples[/bold]

      tnfn evaluate run

      tnfn evaluate run other-zoo --json

      tnfn evaluate mnist-whole mnist-sample   # both by name, see `tnfn assets`
    """
    from transformer_nfn.prediction.records import RunRecord
    from transformer_nfn.prediction.together import with_together

    record = RunRecord.read(run)
    if zoo is None:
        _show(with_together(record, run), run, as_json)
        return
    from transformer_nfn.prediction.evaluation import evaluate

    found = evaluate(run, zoo, percent=percent, min_accuracy=min_accuracy)
    if as_json:
        echo_json(found)
        return
    table = Table(
        "",
        "networks",
        "Kendall τ",
        "90 % interval of τ",
        "R²",
        "mean error",
        "interval holds",
        title=f"{zoo} ({seeds_text(found['zoo_seeds'])})",
    )
    shown = _all_and_fair("all", found)
    for kind, figures in found.get("kinds", {}).items():
        shown += _all_and_fair(kind, figures)
    for words, figures in shown:
        table.add_row(
            words,
            str(figures["networks"]),
            f"{figures['tau']:.3f}",
            f"{figures['tau_low']:.3f} to {figures['tau_high']:.3f}",
            f"{figures['r2']:.3f}",
            f"{figures['mae']:.3f}",
            f"{100 * figures['coverage']:.1f} %",
        )
    table_console().print(table)
    for sentence in (found["note"], found["warning"]):
        if sentence is not None:
            typer.echo(f"warning: {sentence}", err=True)


def _all_and_fair(words: str, found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The figures of all networks, and of those never seen where these are not all."""
    fair = found["unseen"] if found["note"] is not None else None
    return [(words, found), *([(f"{words}, never seen", fair)] if fair else [])]


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
    as_json: JsonOption = False,
) -> None:
    """Predict the accuracy of networks from their weights.

    Every prediction has a 90 % interval. Networks unlike those of the training set get a warning;
    their interval has no stated coverage. For networks of a zoo the measured accuracy is shown too.
    Tensors that the networks of the zoo do not have are ignored and listed; another architecture is
    rejected.

    [bold]Examples[/bold]

      tnfn predict run zoo#0 zoo#3-9

      tnfn predict run 'nets/*.pt' --json

      tnfn predict mnist-whole mnist-sample   # both by name, see `tnfn assets`
    """
    from transformer_nfn.cli.network_tables import predictions_table
    from transformer_nfn.prediction.predict import predict

    found = predict(run, checkpoints)
    if as_json:
        echo_json([asdict(p) for p in found])
        return
    console = table_console()
    console.print(predictions_table(found, console))
    for p in found:
        for sentence in (p.warning, p.note):
            if sentence is not None:
                typer.echo(f"warning: {p.name}: {sentence}", err=True)
        if p.explanation is not None:
            typer.echo(f"note: {p.name}: {p.explanation}", err=True)
    alone = sum(not p.guarded for p in found)
    if alone:
        typer.echo(
            f"note: no guard stands behind {alone} of {len(found)} predictions: a broken network "
            "may pass for a good one without a warning (train --damaged keeps a guard)",
            err=True,
        )


def register(app: typer.Typer) -> None:
    """Adds these commands to the root."""
    app.command("train")(train_command)
    app.command("evaluate")(evaluate_command)
    app.command("predict")(predict_command)
