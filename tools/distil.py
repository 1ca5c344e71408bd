"""Distils the seeds of a run of `whole_network` into one predictor that asks fewer probes.

python tools/distil.py RUN ZOO OUT [--also ZOO] [--probes 320] [--hidden 64] [--device cuda]

RUN: a run folder with several seeds, or its name. ZOO: networks of its sizes that are new to it.
The student keeps probes of every seed and learns the mean prediction of the seeds: on the training
part of ZOO, on all networks of --also, and on disturbed copies of both. Measured accuracies only
choose its best epoch and its scale, and test it. It keeps the guard and the distances of RUN.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor, nn

from transformer_nfn.cli.console import explain_errors
from transformer_nfn.cli.train import pick_device
from transformer_nfn.io.assets import resolve
from transformer_nfn.models import WholeNetwork, map_network
from transformer_nfn.prediction.data import (
    Dataset,
    Selection,
    describe_zoo,
    joined,
    load_parts,
    load_rows,
)
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.guard import GUARD_FILE
from transformer_nfn.prediction.metrics import kendall_tau
from transformer_nfn.prediction.predictors import (
    NEURAL,
    Predictor,
    load_predictors,
    mean_prediction,
    whole_network_sizes,
)
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.prediction.strategies import Protocol
from transformer_nfn.prediction.training_set import DISTANCE_FILE, TrainingDigests
from transformer_nfn.zoo import Zoo

MODEL = "whole_network"
NOISE, SHUFFLED = 0.3, 0.05
"""Of disturbed copies the largest noise beside the size of a tensor, and the share of tensors whose
entries are shuffled."""
WEIGHT_DECAY = 0.1
"""Less than for accuracies: predictions of a teacher have no noise."""

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


class Student(WholeNetwork):
    """`WholeNetwork` that keeps the probes and the standardisation it was given."""

    search = False
    weight_decay = WEIGHT_DECAY

    def standardise(self, *networks: Mapping[str, Any]) -> None:
        """Nothing: the teacher's."""


def chosen_probes(teachers: Sequence[WholeNetwork], count: int) -> dict[str, Tensor]:
    """Parameters of ``count`` probes, evenly from every group of every teacher."""
    parts: dict[str, list[Tensor]] = {}
    groups = sum(teacher.probes.groups for teacher in teachers if teacher.probes is not None)
    for teacher in teachers:
        assert teacher.probes is not None
        state = teacher.probes.state_dict()
        codes = state["codes"].unflatten(0, (teacher.probes.groups, -1))
        state["codes"] = codes[:, : count // groups].flatten(0, 1)
        for name, value in state.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def disturbed(data: Dataset, source: torch.Generator) -> Dataset:
    """A copy of each network with noise of a strength drawn for each, and some tensors shuffled."""
    draw: dict[str, Any] = {"generator": source, "device": source.device}
    strength = NOISE * torch.rand(len(data), **draw).square()

    def disturb(w: Tensor) -> Tensor:
        rows = w.flatten(1)
        size = strength * rows.square().mean(1).sqrt()
        noise = size[:, None] * torch.randn(rows.shape, **draw)
        shuffled = rows.gather(1, torch.rand(rows.shape, **draw).argsort(1))
        kept = torch.rand(len(rows), 1, **draw) >= SHUFFLED
        return (torch.where(kept, rows, shuffled) + noise).view_as(w)

    return replace(data, network=map_network(data.network, disturb))


@app.command()
def main(
    run: Annotated[str, typer.Argument(help="The teacher: a run folder, or its name.")],
    zoo: Annotated[Path, typer.Argument(help="A zoo of networks new to it.")],
    out: Annotated[Path, typer.Argument(help="The run folder to write.")],
    also: Annotated[Path | None, typer.Option(help="A zoo that only trains.")] = None,
    probes: Annotated[int, typer.Option(help="Probes of the student.")] = 320,
    hidden: Annotated[int, typer.Option(help="Neurons of its head on outputs.")] = 64,
    epochs: Annotated[int, typer.Option(help="Of its training.")] = 150,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Trains the student, and prints τ of teacher and student on the test part."""
    where, folder, opened = pick_device(device), resolve(run, "predictor"), Zoo.open(zoo)
    seeds = [p.to(where) for p in load_predictors(folder, RunRecord.read(folder))]
    teachers: list[WholeNetwork] = [seed.inner for seed in seeds]
    selection = Selection()
    parts = load_parts(opened, selection)
    every = parts.train
    if also is not None:
        extra = Zoo.open(also)
        every = joined(every, load_rows(extra, extra.select()))
    parts, every = parts.to(where), every.to(where)
    copies = disturbed(every, torch.Generator(where).manual_seed(0))
    more = joined(every.take(torch.arange(len(parts.train), len(every))), copies)
    taught = [
        replace(data, accuracy=mean_prediction(seeds, data).float().to(where))
        for data in (parts.train, more)
    ]
    state = chosen_probes(teachers, probes)
    first = teachers[0]

    def build(data: Dataset, **options: Any) -> nn.Module:
        module = Student(data.block_space, **(whole_network_sizes(data) | options))
        assert module.probes is not None
        module.probes.load_state_dict({name: value.cpu() for name, value in state.items()})
        module.mean.copy_(first.mean.cpu())
        module.scale.copy_(first.scale.cpu())
        return module

    groups = sum(teacher.probes.groups for teacher in teachers if teacher.probes is not None)
    options = {"probes": len(state["codes"]), "groups": groups, "hidden": hidden,
               "rank": state["codes"].shape[1]}  # fmt: skip
    with mock.patch.dict(NEURAL, {MODEL: ("WholeNetwork", build)}):
        record = train_run(
            describe_zoo(opened),
            replace(parts, train=taught[0], more=taught[1]),
            Experiment(MODEL, [0], Protocol.of(MODEL, epochs), options, selection.to_json()),
            out,
        )
    both = [TrainingDigests.load(path) for path in (out, folder)]
    names = vars(both[0])
    TrainingDigests(**{n: torch.cat([getattr(d, n) for d in both]) for n in names}).save(out)
    for name in (GUARD_FILE, DISTANCE_FILE):
        shutil.copyfile(folder / name, out / name)
    typer.echo(json.dumps(compared(seeds, out, record, parts.test)))


def compared(
    seeds: Sequence[Predictor], out: Path, record: RunRecord, test: Dataset
) -> dict[str, float]:
    """τ of teacher and student on test networks, and how far they are apart."""
    teacher = mean_prediction(seeds, test).numpy()
    student = mean_prediction(load_predictors(out, record), test.to("cpu")).numpy()
    return {
        "teacher": kendall_tau(test.truth, teacher),
        "student": kendall_tau(test.truth, student),
        "between": kendall_tau(teacher, student),
        "difference": float(abs(teacher - student).mean()),
    }


if __name__ == "__main__":
    explain_errors(app)
