"""Batches of checkpoints of any family, of one size or several.

The weights of a network lie in one row, tensors in the order of its description, zeros behind the
last; beside the rows are the descriptions of all sizes, and which of them each row has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.functional.description import Transformer

WEIGHTS, SIZE, DESCRIPTIONS = "weights", "size", "descriptions"
"""Keys of a batch: ``[n, most weights]``, ``[n]`` and a tuple of `Transformer`."""


def packed(networks: Sequence[tuple[Transformer, Mapping[str, Tensor]]]) -> dict[str, Any]:
    """A batch of networks with their tensors by canonical name, in float32.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> with open_model(write_example_checkpoint("packed")) as model:
    ...     batch = packed([(model.description, model.read(model.names))] * 2)
    >>> [tensors["0.W_Q"].shape for _, _, tensors in by_size(batch)]
    [torch.Size([2, 2, 8, 4])]
    """
    descriptions = {_key(description): description for description, _ in networks}
    numbers = {key: number for number, key in enumerate(descriptions)}
    rows = [
        torch.cat([tensors[name].flatten().float() for name in description.tensors])
        for description, tensors in networks
    ]
    weights = torch.zeros(len(rows), max(map(len, rows)))
    for row, values in zip(weights, rows, strict=True):
        row[: len(values)] = values
    sizes = torch.tensor([numbers[_key(description)] for description, _ in networks])
    return {WEIGHTS: weights, SIZE: sizes, DESCRIPTIONS: tuple(descriptions.values())}


def _key(description: Transformer) -> tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """What networks of one size have in common, with the order of their tensors."""
    return repr(description), tuple(description.tensors.items())


def by_size(network: Mapping[str, Any]) -> Iterator[tuple[Transformer, Any, dict[str, Tensor]]]:
    """Networks of each size: their description, rows of the batch, and tensors ``[k, *axes]``."""
    descriptions, sizes = network[DESCRIPTIONS], network[SIZE]
    for number, description in enumerate(descriptions):
        # A batch of one size is not searched: a GPU need not be waited for.
        rows = slice(None) if len(descriptions) == 1 else (sizes == number).nonzero().squeeze(-1)
        weights = network[WEIGHTS][rows]
        if len(weights):
            yield description, rows, _named(description, weights)


def _named(description: Transformer, weights: Tensor) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for name, shape in description.tensors.items():
        end = start + math.prod(shape)
        tensors[name] = weights[:, start:end].unflatten(1, shape) if shape else weights[:, start]
        start = end
    return tensors
