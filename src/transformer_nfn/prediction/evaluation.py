"""How does a trained run do on another zoo?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_nfn.files.assets import resolve
from transformer_nfn.prediction.acceptance import check_sizes
from transformer_nfn.prediction.dataset import load_rows, select_rows
from transformer_nfn.prediction.guard import Guard
from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.predict import load_predictors
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.prediction.trained_on import standings
from transformer_nfn.zoo import NetworkSizes, Zoo

FEWEST = 2


def evaluate(
    run: Path | str, zoo_path: Path | str, *, percent: int | None = 75, min_accuracy: float = 0.0
) -> dict[str, Any]:
    """τ, R², error and the share of networks within the interval, for the mean over seeds.

    ``trained_on`` counts the networks that the run was trained on, ``selected_by`` those that
    chose its best epoch, and ``note`` says so in a sentence. ``unseen`` has the same figures for
    the other networks alone; None if these are too few. ``zoo_seeds`` tells what seeds the
    networks have, see `Zoo.seeds`.

    Args:
        run: a run folder that keeps its predictors, or its name.
        zoo_path: networks of an architecture that the predictors read; a folder or a name.
        percent: which checkpoint of each run.
        min_accuracy: only networks at least this accurate.
    """
    run = resolve(run, "predictor")
    record = RunRecord.read(run)
    if record.status != "done" or not record.seeds:
        raise RunError(f"'{run}' holds no predictor: {record.status}")
    zoo = Zoo.open(zoo_path)
    predictors = load_predictors(run, record)
    trained = NetworkSizes.from_json(record.architecture)
    check_sizes(str(zoo_path), zoo.arch, trained, predictors)
    rows = select_rows(zoo, percent=percent, min_accuracy=min_accuracy)
    if len(rows) < FEWEST:
        raise RunError(f"not enough networks: {len(rows)} of '{zoo_path}' are selected")
    data = load_rows(zoo, rows)
    mean = torch.stack([p.predict(data) for p in predictors]).double().mean(0)
    reach = np.full(len(data), record.radius)
    guard = Guard.load(run)
    if guard is not None and guard.reads(zoo.arch, trained):
        judged = guard.judge(data, zoo.arch, mean)
        mean, reach = judged.accuracy, judged.radius.numpy()
    predicted = mean.numpy()
    accuracy = data.accuracy.double().numpy()
    standing = standings(run, data, zoo.about["task"]["name"])
    unseen = np.array([kind == "unseen" for kind in standing])
    counts = Counter(standing)
    enough = int(unseen.sum()) >= FEWEST
    return {
        "zoo_seeds": zoo.seeds,
        **_figures(accuracy, predicted, reach),
        "trained_on": counts["trained"],
        "selected_by": counts["selected"],
        "unseen": _figures(accuracy[unseen], predicted[unseen], reach[unseen]) if enough else None,
        "note": _note(counts),
    }


def _figures(accuracy: np.ndarray, predicted: np.ndarray, reach: np.ndarray) -> dict[str, Any]:
    held = np.abs(accuracy - predicted) <= reach
    return {
        "networks": len(accuracy),
        **scores(accuracy, predicted),
        "coverage": float(held.mean()),
    }


def _note(counts: Counter[Any]) -> str | None:
    """What is not fair about the figures of all networks."""
    told = [
        f"{counts[kind]} {words}"
        for kind, words in (
            ("trained", "are those the predictor was trained on"),
            ("selected", "chose its best epoch"),
        )
        if counts[kind]
    ]
    if not told:
        return None
    left = counts["unseen"]
    fair = f"the {left} it never saw give the fair figures" if left >= FEWEST else (
        "too few are left for fair figures"
    )
    return f"of the {counts.total()} networks {' and '.join(told)}; {fair}"
