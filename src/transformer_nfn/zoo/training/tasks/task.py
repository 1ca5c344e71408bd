"""What a task gives the trainer: splits, and batches for many networks at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from transformer_nfn.zoo.errors import DataError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.randomness import keys, permutation

Split = Literal["train", "held", "test"]


@dataclass(frozen=True)
class Batch:
    """Inputs ``[networks, batch, tokens, features]``, labels ``int64 [networks, batch]``.

    ``lengths`` (text) says how far each network's batch is padded, ``int64 [networks]``.
    """

    inputs: Tensor
    labels: Tensor
    lengths: Tensor | None = None


class Task(ABC):
    """A classification task with its data in memory.

    Attributes:
        name: as on the command line.
        arch: the network that fits it.
        sizes: samples in each split; ``held`` is what training never sees.
        epochs: what a build trains if nobody says otherwise.
        batch_size: samples a step if nobody says otherwise.
        random_subset: whether a train fraction is a random subset or the first rows.
        provenance: where the data came from (JSON values: file names and md5 sums).
    """

    name: str
    arch: NetworkSizes
    sizes: dict[Split, int]
    epochs: int
    batch_size: int
    random_subset: bool
    provenance: dict[str, Any]

    @abstractmethod
    def batch(self, split: Split, index: Tensor, crop: Tensor | None = None) -> Batch:
        """The samples ``index`` ``int64 [networks, batch]`` of a split.

        Args:
            crop: keys ``int32 [networks, 2]`` for augmentation; None leaves samples as they are.
        """

    @abstractmethod
    def module_inputs(self, inputs: Tensor) -> Tensor:
        """One network's `Batch.inputs` ``[batch, tokens, features]`` as the plain module's."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Task:
        """The same task with its data on ``device``."""


def hold_out(labels: int, fraction: float, samples: int | None) -> tuple[Tensor, Tensor]:
    """Splits ``labels`` samples into those to train on and those held out, each in order.

    The choice is the same for every run, so that held-out accuracies can be compared.

    Args:
        fraction: how much is held out; 0 for nothing.
        samples: keep only so many samples to train on.
    """
    count = round(labels * fraction)
    order = permutation(keys(torch.tensor([0]), 23, 0), labels)[0]
    held, train = order[:count].sort().values, order[count:].sort().values
    if samples is not None:
        if samples < 1:
            raise DataError(f"samples must be at least 1, found {samples}")
        train = train[:samples]
    return train, held
