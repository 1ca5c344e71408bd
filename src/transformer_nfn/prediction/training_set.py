"""What a run keeps of its training set: distances to it, and digests of its networks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.functional import sinusoids
from transformer_nfn.io.tensor_files import write_tensors
from transformer_nfn.models.batch import rows_of
from transformer_nfn.models.invariants import FEATURES
from transformer_nfn.models.statistics import signed_log
from transformer_nfn.models.tabular import tensor_statistics
from transformer_nfn.models.task_reader import MAX_TOKENS
from transformer_nfn.models.whole_network import whole_invariants
from transformer_nfn.models.whole_network.model import INVARIANTS
from transformer_nfn.prediction.data import Dataset, Parts, SizeGroups
from transformer_nfn.prediction.runs import (
    CONFIGURATION,
    DIGESTS_FILE,
    DISTANCE_FILE,
    RunError,
    read_state,
)

MAX_NETWORKS = 1024
"""Training networks that are kept: more would make files of many megabytes."""
QUANTILE = 0.99
SLACK = 1.25
ANY_SIZE, COUNT = "any_size", "networks"
"""Metadata of the file."""
_TENSORS = ("rows", "mean", "std", "limit")
Standing = Literal["unseen", "trained", "selected"]
"""Of a network: new to the predictor, trained on, or used to choose its best epoch."""


@dataclass(frozen=True)
class TrainingSetDistance:
    """Distance of a network to the nearest training network, in units of a limit.

    Attributes:
        rows: standardised features of the training networks, ``[n, F]``.
        mean: of the features, ``[F]``.
        std: of the features, ``[F]``.
        limit: 1.25 times the 99 % quantile of the distance between nearest training networks.
        any_size: whether the features are those that networks of all sizes have.
    """

    rows: Tensor
    mean: Tensor
    std: Tensor
    limit: Tensor
    any_size: bool = False

    @staticmethod
    def of(train: Sequence[Dataset], *, any_size: bool = False) -> TrainingSetDistance:
        """Fit to the training networks.

        Args:
            train: a data set for each size.
            any_size: whether networks of other sizes will be queried too.
        """
        raw = torch.cat([_features(data, any_size) for data in TrainingSetDistance.kept(train)])
        mean, std = raw.mean(0), raw.std(0).clamp_min(1e-6)
        rows = (raw - mean) / std
        limit = SLACK * torch.quantile(_nearest(rows), QUANTILE)
        return TrainingSetDistance(rows, mean, std, limit, any_size)

    @property
    def nearest(self) -> Tensor:
        """Distance of each training network to the nearest other one, ``[n]``."""
        return _nearest(self.rows)

    @staticmethod
    def kept(train: Sequence[Dataset]) -> list[Dataset]:
        """The training networks of each size that `rows` are of, in their order."""
        total = sum(map(len, train))
        counts = [len(data) * min(total, MAX_NETWORKS) // total for data in train]
        return [
            data.take(torch.linspace(0, len(data) - 1, n).long())
            for n, data in zip(counts, train, strict=True)
        ]

    def __call__(self, data: Dataset) -> Tensor:
        """Distance to the nearest training network over the limit; above 1 is an outlier."""
        raw = _features(data, self.any_size)
        if raw.shape[1] != len(self.mean):
            raise RunError(
                f"{DISTANCE_FILE} of the run is of networks with {len(self.mean)} features, found "
                f"{raw.shape[1]}"
            )
        rows = (raw - self.mean) / self.std
        return torch.cdist(rows, self.rows).min(1).values / self.limit

    def save(self, folder: Path) -> None:
        """Write to a run folder, the rows in half precision."""
        tensors = {name: getattr(self, name) for name in _TENSORS} | {"rows": self.rows.half()}
        metadata = {COUNT: str(len(self.rows))} | ({ANY_SIZE: "yes"} if self.any_size else {})
        write_tensors(folder / DISTANCE_FILE, tensors, metadata)

    @staticmethod
    def load(folder: Path) -> TrainingSetDistance:
        """Read and validate what `save` wrote."""
        path = folder / DISTANCE_FILE
        tensors, metadata = read_state(path, _distance_shapes, "float32")
        distance = TrainingSetDistance(**tensors, any_size=ANY_SIZE in metadata)
        count, expected = str(len(distance.rows)), metadata.get(COUNT, "")
        if count != expected:
            raise RunError(f"'{path}': 'rows' expected {expected[:20]} networks, found {count}")
        if not float(distance.limit) > 0 or not bool((distance.std > 0).all()):
            raise RunError(f"'{path}': 'std' and 'limit' expected numbers above 0")
        return distance


def _distance_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Shapes of a `TrainingSetDistance`, of at least one network and one feature."""
    rows = tensors.get("rows", torch.empty(0, 0))
    width = max(1, rows.shape[-1]) if rows.ndim == 2 else 1
    return {"rows": (max(1, len(rows)), width), "mean": (width,), "std": (width,), "limit": ()}


def _nearest(rows: Tensor) -> Tensor:
    distances = torch.cdist(rows, rows)
    distances.fill_diagonal_(float("inf"))
    return distances.min(1).values


def _features(data: Dataset, any_size: bool) -> Tensor:
    """Invariants of the networks on a logarithmic scale, so that no unit dominates."""
    from transformer_nfn.models import invariant_features

    network = data.network.to("cpu")
    if FEATURES in network.computed:
        return torch.as_tensor(network.computed[FEATURES]).float()
    if any_size and INVARIANTS in network.computed:
        return torch.as_tensor(network.computed[INVARIANTS]).float()
    if any_size:
        width = network.layout.shapes["blocks.0.W_Q"][1]
        positions = None if data.tokens is None else sinusoids(min(data.tokens, MAX_TOKENS), width)
        return signed_log(whole_invariants(network, positions)).float()
    if data.block_space is None:
        return signed_log(torch.from_numpy(tensor_statistics(network))).float()
    raw = invariant_features(network, data.block_space).float()
    return torch.sign(raw) * torch.log1p(raw.abs() * 1e3)


@dataclass(frozen=True)
class TrainingDigests:
    """Digests of the networks a predictor was trained on and selected by, ``int64 [n]`` each.

    A network is recognised by the signs of its weights, which rounding to half precision keeps,
    and by its run: another checkpoint of a training run is not a new network.
    """

    trained: Tensor
    trained_runs: Tensor
    selected: Tensor
    selected_runs: Tensor

    @staticmethod
    def of(networks: Parts | SizeGroups, task: str) -> TrainingDigests:
        """Digests of the training networks, additional ones included, and validation networks."""
        groups = SizeGroups.of(networks)
        more = [parts.more for parts in groups.parts.values() if parts.more is not None]
        train, val = [*groups.train, *more], groups.val
        return TrainingDigests(
            torch.cat([_network_digests(part) for part in train]),
            torch.cat([_run_digests(part, task) for part in train]),
            torch.cat([_network_digests(part) for part in val]),
            torch.cat([_run_digests(part, task) for part in val]),
        )

    def save(self, folder: Path) -> None:
        """Write to a run folder."""
        write_tensors(folder / DIGESTS_FILE, vars(self))

    @staticmethod
    def load(folder: Path) -> TrainingDigests:
        """Read and validate what `save` wrote."""
        names = TrainingDigests.__dataclass_fields__

        def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
            return {name: (tensors[name].numel() if name in tensors else 0,) for name in names}

        return TrainingDigests(**read_state(folder / DIGESTS_FILE, shapes, "int64")[0])

    def standings(self, data: Dataset, task: str) -> list[Standing]:
        """Classify each network as trained on, selected by, or unseen."""
        networks, runs = _network_digests(data).tolist(), _run_digests(data, task).tolist()
        trained = {*self.trained.tolist(), *self.trained_runs.tolist()}
        selected = {*self.selected.tolist(), *self.selected_runs.tolist()}
        return [
            "trained" if trained & {*pair} else "selected" if selected & {*pair} else "unseen"
            for pair in zip(networks, runs or networks, strict=True)
        ]


def _network_digests(data: Dataset) -> Tensor:
    """A digest of the signs of all weights of each network."""
    computed = data.network.computed
    if FEATURES in computed:
        return _digests(row.tobytes() for row in computed[FEATURES].half().cpu().numpy())
    views = data.network.views
    signs = [rows_of(torch.signbit(views[name])).cpu().numpy() for name in sorted(views)]
    packed = np.packbits(np.concatenate(signs, 1), axis=1)
    return _digests(row.tobytes() for row in packed)


def _run_digests(data: Dataset, task: str) -> Tensor:
    """A digest of task, seed, run and hyperparameters of each network; none without a seed."""
    if "seed" not in data.columns:
        return torch.empty(0, dtype=torch.int64)
    names = ("seed", "run", *CONFIGURATION)
    rows = zip(*(data.columns[name].tolist() for name in names), strict=True)
    return _digests(" ".join([task, *map(str, row)]).encode() for row in rows)


def _digests(texts: Iterable[bytes]) -> Tensor:
    numbers = [
        int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
        for text in texts
    ]
    return torch.tensor(numbers, dtype=torch.int64)
