"""Fits a guard beside a run folder that is kept, without training its predictors again.

python tools/guard_run.py RUN ZOO DAMAGED… [--hold-out KINDS] [--split-seed 0]

RUN: a run folder, changed in place (guard.safetensors, and `guarded` in its run.json).
ZOO: networks of its sizes that are new to it, or the zoo and split it was trained on.
DAMAGED: one or several, from `tnfn zoo damage ZOO`.
For runs from before guards, and for guards from before a change of their rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Annotated

import typer

from transformer_nfn.cli.console import explained
from transformer_nfn.models.whole_network.search import STEPS
from transformer_nfn.prediction.data import DamagedNetworks, Selection, load_damaged, load_parts
from transformer_nfn.prediction.guard.fit import fit_guard_beside
from transformer_nfn.prediction.predictors import load_predictors
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.prediction.training_set import TrainingDigests
from transformer_nfn.prediction.uncertainty import TrainedSizes
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import parse_damages

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="A run folder, as `tnfn train` writes it.")],
    zoo: Annotated[Path, typer.Argument(help="A zoo folder.")],
    damaged: Annotated[list[Path], typer.Argument(help="Damaged relatives of its networks.")],
    hold_out: Annotated[str, typer.Option(help="Kinds of damage to ignore.")] = "",
    split_seed: Annotated[int, typer.Option(help="As the run was trained with.")] = 0,
) -> None:
    """Fits the guard and prints how it does on healthy test networks."""
    relatives = [Zoo.open(folder) for folder in damaged]
    ignored = parse_damages(hold_out) if hold_out else None
    record = guard_run(run, Zoo.open(zoo), relatives, hold_out=ignored, split_seed=split_seed)
    typer.echo(json.dumps(record.summary["guarded"]))


def guard_run(
    run: Path,
    zoo: Zoo,
    damaged: Sequence[Zoo],
    *,
    hold_out: Mapping[str, tuple[float, ...]] | None = None,
    split_seed: int = 0,
    steps: int = STEPS,
) -> RunRecord:
    """Fit a guard for the predictors of a finished run, replacing the one it has.

    Args:
        run: the folder.
        zoo: the run's zoo, or another of the same sizes.
        damaged: damaged copies of its networks, in one zoo or several.
        hold_out: kinds of damage to ignore.
        split_seed: as in the training of the run: calibration networks must be new to it.
        steps: of the search for inputs.
    """
    record = RunRecord.read(run)
    record.check_finished(run)
    if zoo.sizes != TrainedSizes.of(record).first:
        raise RunError(f"'{zoo.path}' holds networks of other sizes than '{run}' was trained on")
    parts = load_parts(zoo, Selection(split_seed=split_seed))
    digests = TrainingDigests.load(run)
    for name, part in (("validation", parts.val), ("test", parts.test)):
        trained = digests.standings(part, zoo.metadata["task"]["name"]).count("trained")
        if trained:
            raise RunError(
                f"'{run}' was trained on {trained} of the {len(part)} {name} networks of "
                f"'{zoo.path}' with split seed {split_seed}: a guard needs networks new to it"
            )
    copies = reduce(
        DamagedNetworks.joined, [load_damaged(each, zoo, parts, hold_out) for each in damaged]
    )
    guard, figures = fit_guard_beside(load_predictors(run, record), parts, copies, zoo.sizes, steps)
    figures["guarded"]["zoo"] = zoo.path.name
    record = replace(record, summary={**record.summary, **figures})
    guard.save(run)
    return record.write(run)


if __name__ == "__main__":
    with explained():
        app()
