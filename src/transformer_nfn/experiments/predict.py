"""How good is this network? A trained run applied to checkpoints it has never seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.experiments.dataset import Dataset
from transformer_nfn.experiments.novelty import Seen
from transformer_nfn.experiments.predictors import Predictor
from transformer_nfn.experiments.records import RunError, RunRecord
from transformer_nfn.files.assets import resolve
from transformer_nfn.models import Network
from transformer_nfn.zoo import Architecture, NetworkBatch, Zoo
from transformer_nfn.zoo.module import from_state_dict


@dataclass(frozen=True)
class Prediction:
    """What a run says of one checkpoint.

    Attributes:
        name: of the checkpoint.
        accuracy: predicted, the mean over the run's seeds.
        low, high: conformal interval at the run's level.
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
        checkpoints: each a state dict (``.pt``), a ``.safetensors`` file, or a row of a zoo
            (``ZOO#12``, the zoo by path or by name).
    """
    record = RunRecord.read(run)
    if record.status != "done" or not record.seeds:
        raise RunError(f"'{run}' holds no predictor: {record.status}")
    arch = Architecture.from_json(record.zoo["architecture"])
    named = [read_checkpoint(text, arch) for text in checkpoints]
    data = as_dataset(arch, named)
    predictors = [Predictor.load(record.model, run / f"seed-{row['seed']}") for row in record.seeds]
    found = torch.stack([p.predict(data) for p in predictors]).double()
    mean = found.mean(0)
    spread = found.std(0) if len(found) > 1 else torch.zeros_like(mean)
    novelty = Seen.load(run).novelty(data)
    reach = float(record.summary["radius"])
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


def as_dataset(arch: Architecture, named: list[dict[str, Tensor]]) -> Dataset:
    """Checkpoints as a data set; their accuracy is unknown."""
    stacked = {name: torch.stack([n[name] for n in named]).float() for name in arch.space.tensors}
    batch = NetworkBatch.of(arch, stacked)
    network: Network = {"blocks": batch.blocks, "classifier": batch.classifier}
    if batch.embedding:
        network["embedding"] = batch.embedding
    return Dataset(
        arch.block_space, network, torch.zeros(len(named)), {"row": np.arange(len(named))}
    )


def read_checkpoint(text: str, arch: Architecture) -> dict[str, Tensor]:
    """One network under the names of ``arch.space``, checked against the architecture."""
    zoo, mark, row = text.rpartition("#")
    named = _zoo_row(zoo, row, arch) if mark else _file(Path(text), arch)
    for name, shape in arch.space.shapes.items():
        if tuple(named[name].shape) != shape:
            raise RunError(
                f"'{text}' is of another architecture: '{name}' has shape "
                f"{list(named[name].shape)}, the predictor reads {list(shape)}"
            )
        if not bool(torch.isfinite(named[name]).all()):
            raise RunError(f"'{text}': '{name}' holds values that are not finite")
    return named


def _zoo_row(path: str, row: str, arch: Architecture) -> dict[str, Tensor]:
    zoo = Zoo.open(resolve(path, "zoo"))
    if not row.isdigit():
        raise RunError(f"'{path}#{row}': a row is a whole number, as in {path}#12")
    if zoo.arch != arch:
        raise RunError(
            f"'{path}' holds networks of another architecture than the run was trained on"
        )
    return {name: w[0] for name, w in zoo.weights([int(row)]).items()}


def _file(path: Path, arch: Architecture) -> dict[str, Tensor]:
    if not path.is_file():
        raise RunError(f"there is no file '{path}' (a row of a zoo is written ZOO#12)")
    state = _state(path)
    if set(arch.space.tensors) <= set(state):
        return {name: state[name] for name in arch.space.tensors}
    try:
        return from_state_dict(arch, state)
    except TransformerNFNError as error:
        raise RunError(f"'{path}' is of another architecture: {error}") from error


def _state(path: Path) -> dict[str, Tensor]:
    """Tensors by name; nothing that would run code on loading is read."""
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise RunError(f"'{path}' is not a readable safetensors file: {error}") from error
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        reason = str(error).strip().split("\n")[0][:100]
        raise RunError(f"'{path}' is not a plain state dict ({reason})") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise RunError(f"'{path}' is not a plain state dict of tensors by name")
    return state
