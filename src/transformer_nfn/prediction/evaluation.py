"""How does a trained run do on another zoo?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from transformer_nfn.prediction.dataset import load_rows, select_rows
from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.predictors import Predictor
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.zoo import NetworkSizes, Zoo


def evaluate(
    run: Path, zoo_path: Path, *, percent: int | None = 75, min_accuracy: float = 0.0
) -> dict[str, Any]:
    """τ, R², error and the share of networks within the interval, for the mean over seeds.

    Also says what seeds the networks have, see `Zoo.seeds`.

    Args:
        run: a run folder that keeps its predictors.
        zoo_path: networks of the same architecture.
        percent: which checkpoint of each run.
        min_accuracy: only networks at least this accurate.
    """
    record = RunRecord.read(run)
    zoo = Zoo.open(zoo_path)
    if zoo.arch != NetworkSizes.from_json(record.architecture):
        raise RunError(
            f"'{zoo_path}' holds networks of another architecture than '{run}' was trained on"
        )
    rows = select_rows(zoo, percent=percent, min_accuracy=min_accuracy)
    if len(rows) < 2:
        raise RunError(f"not enough networks: {len(rows)} of '{zoo_path}' are selected")
    data = load_rows(zoo, rows)
    found = torch.stack(
        [
            Predictor.load(record.model, run / f"seed-{s['seed']}").predict(data)
            for s in record.seeds
        ]
    )
    predicted = found.double().mean(0).numpy()
    accuracy = data.accuracy.double().numpy()
    held = np.abs(accuracy - predicted) <= record.radius
    return {
        "networks": len(rows),
        "zoo_seeds": zoo.seeds,
        **scores(accuracy, predicted),
        "coverage": float(held.mean()),
    }
