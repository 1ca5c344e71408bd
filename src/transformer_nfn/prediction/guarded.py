"""A guard beside predictors: while they are trained, or later beside a run that is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from transformer_nfn.prediction.damaged import Damaged, load_damaged
from transformer_nfn.prediction.dataset import Parts, load_parts
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.guard_fit import fit_guard
from transformer_nfn.prediction.known_sizes import KnownSizes
from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.predict import load_predictors
from transformer_nfn.prediction.predictors import Predictor, mean_prediction
from transformer_nfn.prediction.probe_search import STEPS
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.prediction.trained_on import standings
from transformer_nfn.zoo import NetworkSizes, Zoo


def fit_beside(
    predictors: Sequence[Predictor],
    parts: Parts,
    damaged: Damaged,
    arch: NetworkSizes,
    steps: int = STEPS,
) -> tuple[Guard, dict[str, Any]]:
    """The guard, and for the summary how it does on the healthy networks of the test part."""
    val, test = parts.val.to("cpu"), parts.test.to("cpu")
    on_val, on_test, *on_damaged = (
        mean_prediction(predictors, data) for data in (val, test, damaged.train, damaged.val)
    )
    guard = fit_guard(
        parts, damaged, arch, on_val, (on_damaged[0], on_damaged[1]), steps=steps
    )
    judged = guard.judge(test, arch, on_test)
    truth, said = test.truth, judged.accuracy.numpy()
    found = scores(truth, said)
    figures = {
        **{key: found[key] for key in ("tau", "r2", "mae")},
        "coverage": float(judged.holds(torch.from_numpy(truth)).double().mean()),
        "warned": float((judged.strangeness > 1).double().mean()),
        "damaged": damaged.counts,
    }
    return guard, {"guarded": figures}


def guard_run(
    run: Path,
    zoo: Zoo,
    damaged: Sequence[Zoo],
    *,
    hold_out: Mapping[str, tuple[float, ...]] | None = None,
    split_seed: int = 0,
    steps: int = STEPS,
) -> RunRecord:
    """Fits a guard beside the predictors of a finished run, in place of one it may have.

    Args:
        run: the folder; its predictors stay as they are.
        zoo: the run's own, or another of the same sizes.
        damaged: relatives of its networks, of one zoo or several.
        hold_out: kinds of damage not to be looked at.
        split_seed: as the run was trained with: what calibrates must be new to the predictors.
        steps: of the search for inputs.
    """
    record = RunRecord.read(run)
    record.check_finished(run)
    like = KnownSizes.of(record).like
    if zoo.sizes != like:
        raise RunError(f"'{zoo.path}' holds networks of other sizes than '{run}' was trained on")
    parts = load_parts(zoo, split_seed=split_seed)
    task = zoo.metadata["task"]["name"]
    for name, part in (("validation", parts.val), ("test", parts.test)):
        seen = standings(run, part, task).count("trained")
        if seen:
            raise RunError(
                f"'{run}' was trained on {seen} of the {len(part)} {name} networks of "
                f"'{zoo.path}' with split seed {split_seed}: a guard needs networks new to it"
            )
    each = [load_damaged(some, zoo, parts, hold_out) for some in damaged]
    relatives = reduce(Damaged.with_more, each)
    guard, figures = fit_beside(
        load_predictors(run, record), parts, relatives, zoo.sizes, steps
    )
    figures["guarded"]["zoo"] = zoo.path.name
    told = replace(record, summary={**record.summary, **figures})
    guard.save(run)
    told.write(run)
    return told
