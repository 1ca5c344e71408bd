"""Which networks a predictor learns from: rows of a zoo in memory, parted by run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models import Network, map_network, network_of
from transformer_nfn.prediction.records import CONFIGURATION, RunError
from transformer_nfn.spaces import WeightSpace

if TYPE_CHECKING:
    from transformer_nfn.zoo import Zoo

FRACTIONS = (0.7, 0.15, 0.15)
PERCENT = 75
MIN_NETWORKS = 20
EVALUATE = 256


@dataclass(frozen=True)
class Dataset:
    """Networks in memory, with what is known of each.

    Attributes:
        block_space: the weight space of one block.
        network: the weights in parts, as models read them; ``[n, …]`` each.
        accuracy: test accuracy of each network, ``[n]``, float32 between 0 and 1.
        columns: run id, row of the zoo, configuration; arrays of length n.
        tokens: positions their inputs have at most; None where nobody said.
    """

    block_space: WeightSpace
    network: Network
    accuracy: Tensor
    columns: Mapping[str, np.ndarray]
    tokens: int | None = None

    def __len__(self) -> int:
        return len(self.accuracy)

    @property
    def truth(self) -> np.ndarray:
        """The accuracies as statistics read them, ``[n]`` in float64."""
        return np.asarray(self.accuracy.cpu().double().numpy())

    def take(self, index: Tensor | np.ndarray) -> Dataset:
        """Some of the networks, in the order given."""
        where = torch.as_tensor(index, device=self.accuracy.device)
        at = where.cpu().numpy()
        return replace(
            self,
            network=map_network(self.network, lambda w: w[where]),
            accuracy=self.accuracy[where],
            columns={name: column[at] for name, column in self.columns.items()},
        )

    def to(self, device: torch.device | str) -> Dataset:
        """The same networks on another device."""
        return replace(
            self,
            network=map_network(self.network, lambda w: w.to(device)),
            accuracy=self.accuracy.to(device),
        )

    @property
    def sizes(self) -> dict[str, int | None]:
        """Numbers in the embedding (None for text) and the classifier of one network."""
        return {part: _size(self.network.get(part)) for part in ("embedding", "classifier")}


def in_batches(
    logits: Callable[[Mapping[str, Any]], Tensor], network: Mapping[str, Any], data: Dataset
) -> Tensor:
    """What ``logits`` says of networks, some at a time.

    Args:
        logits: gives the networks in its last axis.
        network: what it reads of them, in parts; ``[n, …]`` each.
        data: the networks.
    """
    rows = torch.arange(len(data), device=data.accuracy.device).split(EVALUATE)
    return torch.cat([logits(map_network(network, lambda w, at=at: w[at])) for at in rows], -1)


def _size(part: Any) -> int | None:
    if part is None:
        return None
    tensors = part.values() if isinstance(part, Mapping) else [part]
    total = sum(w[0].numel() for w in tensors) if len(tensors) else 0
    return total or None


def joined(first: Dataset, second: Dataset) -> Dataset:
    """The networks of both, one after the other."""
    pairs = zip(_leaves(first.network), _leaves(second.network), strict=True)
    stacked = iter([torch.cat(pair) for pair in pairs])
    return replace(
        first,
        network=map_network(first.network, lambda _: next(stacked)),
        accuracy=torch.cat([first.accuracy, second.accuracy]),
        columns={k: np.concatenate([v, second.columns[k]]) for k, v in first.columns.items()},
    )


def _leaves(network: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []

    def note(w: Tensor) -> Tensor:
        found.append(w)
        return w

    map_network(network, note)
    return found


def select_rows(
    zoo: Zoo, *, percent: int | None = PERCENT, min_accuracy: float = 0.0
) -> np.ndarray:
    """The rows an experiment speaks of: one checkpoint a run, at least this accurate.

    Args:
        zoo: an open zoo.
        percent: checkpoints at this part of the training (the paper: epoch 75 of 100); None
            for all of them.
        min_accuracy: test accuracy at least this.
    """
    rows = zoo.select(percent=percent, min_accuracy=min_accuracy)
    if len(rows) == 0 and percent is not None and not len(zoo.select(percent=percent)):
        found = sorted({int(p) for p in zoo.table["percent"] if p > 0})
        raise RunError(f"the zoo has no checkpoints at {percent} %, only at {found}")
    return rows


def load_rows(zoo: Zoo, rows: np.ndarray) -> Dataset:
    """Reads the weights of some rows into memory; refuses what is not finite."""
    named = {name: w.float() for name, w in zoo.weights(rows).items()}
    for name, w in named.items():
        bad = ~torch.isfinite(w).flatten(1).all(1)
        if bool(bad.any()):
            row = int(rows[int(bad.nonzero()[0])])
            raise RunError(f"'{name}' of row {row} of the zoo holds values that are not finite")
    columns = {name: zoo.table[name][rows] for name in ("run", "seed", *CONFIGURATION)}
    columns["row"] = np.asarray(rows, dtype=np.int64)
    accuracy = torch.as_tensor(zoo.table["test_accuracy"][rows], dtype=torch.float32)
    return Dataset(zoo.block_space, network_of(named), accuracy, columns, zoo.sizes.tokens)


@dataclass(frozen=True)
class Parts:
    """A data set parted by run: no run has networks in two parts.

    Attributes:
        train, val, test: what an experiment speaks of.
        more: further networks to learn from, for predictors that use them: other checkpoints of
            the runs, and runs that the experiment does not speak of. None of a run in ``val`` or
            ``test``.
    """

    train: Dataset
    val: Dataset
    test: Dataset
    more: Dataset | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many networks each part has."""
        return {"train": len(self.train), "val": len(self.val), "test": len(self.test)}

    def to(self, device: torch.device | str) -> Parts:
        """The same parts on another device."""
        more = None if self.more is None else self.more.to(device)
        return Parts(self.train.to(device), self.val.to(device), self.test.to(device), more)


def count_training(zoo: Zoo, *, percent: int | None = PERCENT) -> int:
    """How many networks `load_parts` trains on, without reading any."""
    return len(zoo.split(select_rows(zoo, percent=percent), FRACTIONS)[0])


def nested_subset(rows: np.ndarray, size: int, seed: int | list[int]) -> np.ndarray:
    """``size`` of the rows at random, all of them where there are no more, in their own order.

    For one seed a smaller subset is part of every larger one.
    """
    if size < 1:
        raise RunError(f"a subset needs at least 1 network, found {size}")
    shuffled = np.random.default_rng(seed).permutation(len(rows))
    return np.asarray(rows[np.sort(shuffled[:size])])


def load_parts(
    zoo: Zoo,
    *,
    percent: int | None = PERCENT,
    min_accuracy: float = 0.0,
    split_seed: int = 0,
    max_train: int | None = None,
    subset_seed: int = 0,
    all_checkpoints: bool = False,
) -> Parts:
    """Selects, parts by run 70/15/15, and reads.

    Args:
        zoo: an open zoo.
        percent: see `select_rows`.
        min_accuracy: see `select_rows`.
        split_seed: a different seed gives a different split.
        max_train: at most this many networks to train on (for curves over their number): a
            `nested_subset` of the training part. The other parts stay whole.
        subset_seed: a different seed gives a different subset of the same training part.
        all_checkpoints: whether to read, as `Parts.more`, everything else the zoo has of runs
            that no other part holds (with ``max_train``: of the runs chosen).
    """
    rows = select_rows(zoo, percent=percent, min_accuracy=min_accuracy)
    if len(rows) < MIN_NETWORKS:
        raise RunError(
            f"not enough networks: {len(rows)} have accuracy at least {min_accuracy:g}, "
            f"{MIN_NETWORKS} are needed"
        )
    train, val, test = zoo.split(rows, FRACTIONS, seed=split_seed)
    if max_train is not None:
        train = nested_subset(train, max_train, [split_seed, subset_seed])
    more = None
    if all_checkpoints:
        held = np.concatenate([val, test])
        rows = _further_rows(zoo, train, held, only_these_runs=max_train is not None)
        more = load_rows(zoo, rows) if len(rows) else None
    parts = Parts(load_rows(zoo, train), load_rows(zoo, val), load_rows(zoo, test), more)
    for name in parts.counts:
        part: Dataset = getattr(parts, name)
        if len(part) < 3:
            raise RunError(f"not enough networks: {len(part)} in the {name} part, 3 are needed")
        if float(part.accuracy.max() - part.accuracy.min()) == 0:
            raise RunError(
                f"not enough networks: all in the {name} part have one accuracy, "
                f"{float(part.accuracy[0]):.4f}, so there is no order to predict"
            )
    return parts


def _further_rows(
    zoo: Zoo, train: np.ndarray, held: np.ndarray, *, only_these_runs: bool
) -> np.ndarray:
    """Rows beside those of the training part whose runs are in no other part."""
    run = zoo.table["run"].astype(str)
    every = zoo.select(percent=None)
    free = np.isin(run[every], run[train]) if only_these_runs else ~np.isin(run[every], run[held])
    return np.asarray(every[free & ~np.isin(every, train)])
