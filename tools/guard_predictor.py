"""Puts a guard beside a trained predictor, from networks that it never learned from.

tnfn zoo damage ZOO --out DAMAGED
python tools/guard_predictor.py RUN ZOO DAMAGED --out GUARDED

For predictors whose own training networks are not at hand: the zoo is of the same architecture and
task, its networks are others. `tools/pack_assets.py predictor GUARDED NAME` ships the result.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from transformer_nfn.cli.endings import explain_errors
from transformer_nfn.files.assets import resolve
from transformer_nfn.prediction.damaged import load_damaged
from transformer_nfn.prediction.dataset import Dataset, load_parts
from transformer_nfn.prediction.guard_fit import fit_guard
from transformer_nfn.prediction.predict import load_predictors
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.zoo import NetworkSizes, Zoo
from transformer_nfn.zoo.damage_record import parse_damages

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def guard_predictor(
    run: Annotated[Path, typer.Argument(help="A run folder that keeps its predictors, or a name.")],
    zoo: Annotated[Path, typer.Argument(help="Networks that the predictor never learned from.")],
    damaged: Annotated[Path, typer.Argument(help="Their relatives, from `tnfn zoo damage`.")],
    out: Annotated[Path, typer.Option(help="The run folder to write, with the guard in it.")],
    max_train: Annotated[int, typer.Option(help="Healthy networks to learn from at most.")] = 300,
    hold_out: Annotated[str | None, typer.Option(help="Kinds of damage not looked at.")] = None,
) -> None:
    """Fits a guard on a part of the zoo, and calibrates it on another."""
    source = resolve(run, "predictor")
    record, networks = RunRecord.read(source), Zoo.open(zoo)
    arch = NetworkSizes.from_json(record.architecture)
    if networks.arch != arch:
        raise RunError(f"'{zoo}' is of another architecture than the networks of '{run}'")
    predictors = load_predictors(source, record)

    def mean(data: Dataset) -> torch.Tensor:
        return torch.stack([p.predict(data) for p in predictors]).double().mean(0)

    parts = load_parts(networks, max_train=max_train)
    kinds = None if hold_out is None else parse_damages(hold_out)
    relatives = load_damaged(Zoo.open(damaged), networks, parts, kinds)
    guard = fit_guard(parts, relatives, arch, mean(parts.val), mean(relatives.val))
    shutil.copytree(source, out)
    guard.save(out)
    told = {"zoo": networks.path.name, **parts.counts, "damaged": relatives.counts}
    summary = {**record.summary, "guard_from": told}
    replace(record, summary=summary).write(out)
    typer.echo(f"{out}: {told}")


if __name__ == "__main__":
    explain_errors(app)
