"""How good is this network? A trained run applied to checkpoints it has never seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models import network_of
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.novelty import Seen
from transformer_nfn.prediction.predictors import Predictor
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.zoo import NetworkSizes
from transformer_nfn.zoo.checkpoints import open_checkpoint, read_small_transformer


@dataclass(frozen=True)
class Prediction:
    """What a run says of one checkpoint.

    Attributes:
        name: of the checkpoint.
        accuracy: predicted, the mean over the run's seeds.
        low: lower end of the conformal interval at the run's level.
        high: its upper end.
        spread: standard deviation over the seeds.
        novelty: distance to what the predictor has seen; above 1 is outside.
        warning: a sentence where the number is not to be trusted, else None.
    """

    name: str
    accuracy: float
    low: float
    high: float
    spread: float
    novelty: float
    warning: str | None


def predict(run: Path, checkpoints: list[str]) -> list[Prediction]:
    """Predicts the accuracy of checkpoints.

    Args:
        run: a run folder that keeps its predictors.
        checkpoints: each a file, a folder or a row of a zoo; see `open_checkpoint`.
    """
    record = RunRecord.read(run)
    if record.status != "done" or not record.seeds:
        raise RunError(f"'{run}' holds no predictor: {record.status}")
    arch = NetworkSizes.from_json(record.architecture)
    named = [read_checkpoint(text, arch) for text in checkpoints]
    data = as_dataset(arch, named)
    predictors = [Predictor.load(record.model, run / f"seed-{row['seed']}") for row in record.seeds]
    found = torch.stack([p.predict(data) for p in predictors]).double()
    mean = found.mean(0)
    spread = found.std(0) if len(found) > 1 else torch.zeros_like(mean)
    novelty = Seen.load(run).novelty(data)
    reach = record.radius
    return [
        Prediction(
            name,
            float(mean[i]),
            max(0.0, float(mean[i]) - reach),
            min(1.0, float(mean[i]) + reach),
            float(spread[i]),
            float(novelty[i]),
            _warning(float(novelty[i])),
        )
        for i, name in enumerate(checkpoints)
    ]


def _warning(novelty: float) -> str | None:
    if novelty <= 1:
        return None
    return (
        f"unlike any network the predictor has seen ({novelty:.1f} times the usual distance): "
        "the number and its interval may be far off"
    )


def as_dataset(arch: NetworkSizes, named: list[dict[str, Tensor]]) -> Dataset:
    """Checkpoints as a data set; their accuracy is unknown."""
    stacked = {name: torch.stack([n[name] for n in named]).float() for name in arch.space.tensors}
    accuracy, columns = torch.zeros(len(named)), {"row": np.arange(len(named))}
    return Dataset(arch.block_space, network_of(stacked), accuracy, columns)


def read_checkpoint(text: str, arch: NetworkSizes) -> dict[str, Tensor]:
    """One network under the names of ``arch.space``, checked against the architecture."""
    with open_checkpoint(text) as checkpoint:
        named = read_small_transformer(checkpoint, arch)
    for name, weights in named.items():
        if not bool(torch.isfinite(weights).all()):
            raise RunError(f"'{text}': '{name}' holds values that are not finite")
    return named
