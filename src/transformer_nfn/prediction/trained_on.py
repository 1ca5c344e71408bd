"""Which networks has a predictor learned from? Marks kept beside it tell them from new ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.tensor_files import read_tensors, write_tensors
from transformer_nfn.models import tensors_of
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.kinds import Kinds, as_kinds
from transformer_nfn.prediction.novelty import Seen
from transformer_nfn.prediction.records import CONFIGURATION, RunError, read_predictions

TRAINED_FILE = "trained_on.safetensors"
# Of the usual distance between networks; the features of one network differ by rounding alone.
SAME = 0.005
Standing = Literal["unseen", "trained", "selected"]
"""Of a network: new to the predictor, trained on, or used to choose its best epoch."""


@dataclass(frozen=True)
class TrainedOn:
    """Marks of the networks a predictor was trained on and selected by, ``int64 [n]`` each.

    A network is known again by the signs of its weights, which rounding to half precision keeps,
    and by its run: another checkpoint of a run that was trained on is no new network.

    Attributes:
        trained: of the training networks.
        trained_runs: of their runs.
        selected: of the validation networks.
        selected_runs: of their runs.
    """

    trained: Tensor
    trained_runs: Tensor
    selected: Tensor
    selected_runs: Tensor

    @staticmethod
    def of(parts: Parts | Kinds, task: str) -> TrainedOn:
        """The marks of what a training sees, further checkpoints too."""
        kinds = as_kinds(parts)
        learned = [*kinds.train, *(part for part in kinds.more if part is not None)]
        return TrainedOn(
            torch.cat([network_marks(part) for part in learned]),
            torch.cat([run_marks(part, task) for part in learned]),
            torch.cat([network_marks(part) for part in kinds.val]),
            torch.cat([run_marks(part, task) for part in kinds.val]),
        )

    def save(self, folder: Path) -> None:
        """Writes them beside the predictor."""
        write_tensors(folder / TRAINED_FILE, vars(self))

    @staticmethod
    def load(folder: Path) -> TrainedOn:
        """Reads what `save` wrote."""
        path = folder / TRAINED_FILE
        try:
            marks = TrainedOn(**read_tensors(path)[0])
        except (CheckpointError, TypeError) as error:
            raise RunError(f"'{path}' is not readable: {error}") from error
        for name, found in vars(marks).items():
            if found.dtype != torch.int64 or found.ndim != 1:
                raise RunError(f"'{path}': '{name}' expected int64 marks in one row")
        return marks

    def standings(self, data: Dataset, task: str) -> list[Standing]:
        """What each network is to the predictor: trained on, selected by, or unseen."""
        networks, runs = network_marks(data).tolist(), run_marks(data, task).tolist()
        trained = {*self.trained.tolist(), *self.trained_runs.tolist()}
        selected = {*self.selected.tolist(), *self.selected_runs.tolist()}
        marks = zip(networks, runs or networks, strict=True)
        return [
            "trained" if trained & {*pair} else "selected" if selected & {*pair} else "unseen"
            for pair in marks
        ]


def standings(folder: Path, data: Dataset, task: str) -> list[Standing]:
    """What each network is to the predictor of a run folder.

    Runs from before the marks were kept know the invariants of their training networks (of 4,096
    at most), and the runs of those that chose the epoch.
    """
    if (folder / TRAINED_FILE).exists():
        return TrainedOn.load(folder).standings(data, task)
    found = read_predictions(folder)
    selected = {_run_text(*values) for values in _rows(found, found["split"] == "val")}
    runs = [_run_text(*values) for values in _rows(data.columns, np.ones(len(data), dtype=bool))]
    apart = Seen.load(folder).novelty(data).tolist()
    return [
        "trained" if distance < SAME else "selected" if run in selected else "unseen"
        for distance, run in zip(apart, runs, strict=True)
    ]


def network_marks(data: Dataset) -> Tensor:
    """A number for each network that only the signs of all its weights decide."""
    tensors = tensors_of(data.network)
    signs = [torch.signbit(tensors[name]).flatten(1).cpu().numpy() for name in sorted(tensors)]
    packed = np.packbits(np.concatenate(signs, 1), axis=1)
    return _digests(row.tobytes() for row in packed)


def run_marks(data: Dataset, task: str) -> Tensor:
    """A number for each network that its task, run, seed and configuration decide.

    Networks of which no seed is known have none.
    """
    if "seed" not in data.columns:
        return torch.empty(0, dtype=torch.int64)
    rows = _rows(data.columns, np.ones(len(data), dtype=bool))
    seeds = data.columns["seed"].tolist()
    texts = (f"{task} {seed} {_run_text(*row)}" for row, seed in zip(rows, seeds, strict=True))
    return _digests(text.encode() for text in texts)


def _rows(columns: Any, chosen: np.ndarray) -> Iterable[tuple[Any, ...]]:
    return zip(*(columns[name][chosen].tolist() for name in ("run", *CONFIGURATION)), strict=True)


def _run_text(*values: Any) -> str:
    return " ".join(str(value) for value in values)


def _digests(texts: Iterable[bytes]) -> Tensor:
    numbers = [
        int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
        for text in texts
    ]
    return torch.tensor(numbers, dtype=torch.int64)
