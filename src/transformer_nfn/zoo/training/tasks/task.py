"""Interface of a task: splits, and batches for many networks at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from transformer_nfn.zoo.errors import DataError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.randomness import keys, permutation

Split = Literal["train", "held", "test"]


@dataclass(frozen=True)
class Batch:
    """A batch of samples per network.

    Attributes:
        inputs: ``[networks, batch, tokens, features]``.
        labels: ``int64 [networks, batch]``.
        lengths: for text, the length to which each network's batch is padded,
            ``int64 [networks]``.
    """

    inputs: Tensor
    labels: Tensor
    lengths: Tensor | None = None


class Task(ABC):
    """A classification task with its data in memory.

    Attributes:
        name: as on the command line.
        sizes: sizes of the networks trained on it.
        labels: ``int64 [samples]`` per split; ``held`` is held out from training.
        epochs: default number of epochs.
        batch_size: default samples per step.
        random_subset: whether a train fraction is a random subset or the first rows.
        provenance: source of the data (JSON values: file names and md5 sums).
    """

    name: str
    sizes: NetworkSizes
    labels: dict[Split, Tensor]
    epochs: int
    batch_size: int
    random_subset: ClassVar[bool]
    provenance: dict[str, Any]

    @property
    def num_samples(self) -> dict[Split, int]:
        """Samples in each split."""
        return {split: len(labels) for split, labels in self.labels.items()}

    @abstractmethod
    def batch(self, split: Split, index: Tensor, crop: Tensor | None = None) -> Batch:
        """The samples ``index`` ``int64 [networks, batch]`` of a split.

        Args:
            crop: keys ``int32 [networks, 2]`` for augmentation; None leaves samples as they are.
        """

    @abstractmethod
    def module_inputs(self, inputs: Tensor) -> Tensor:
        """Convert one network's `Batch.inputs` to the inputs of `SmallTransformer`."""

    def to(self, device: torch.device | str) -> Task:
        """The same task with its data on ``device``."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: moved(inner) for key, inner in value.items()}
            return value.to(device) if isinstance(value, Tensor) else value

        task: Any = self  # a dataclass, as every task is
        moves = {each.name: moved(getattr(self, each.name)) for each in fields(task)}
        return cast("Task", replace(task, **moves))


def hold_out(total: int, fraction: float, samples: int | None) -> tuple[Tensor, Tensor]:
    """Split the numbers of ``total`` samples into those to train on and those held out.

    The split is the same for every run, so that held-out accuracies can be compared.

    Args:
        fraction: the share held out; 0 for none.
        samples: maximum number of samples to train on.

    >>> train, held = hold_out(10, 0.2, samples=3)
    >>> len(train), len(held)
    (3, 2)
    """
    count = round(total * fraction)
    order = permutation(keys(torch.tensor([0]), 23, 0), total)[0]
    held, train = order[:count].sort().values, order[count:].sort().values
    if samples is not None:
        if samples < 1:
            raise DataError(f"samples must be at least 1, found {samples}")
        train = train[:samples]
    return train, held
