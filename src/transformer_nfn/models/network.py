"""Batches of networks as models read them, and the sizes of the paper's networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.known_tasks import HEADS, HIDDEN, KNOWN_TASKS, PAPER_TASKS, WIDTH
from transformer_nfn.spaces import Weights, WeightSpace, attention_block
from transformer_nfn.spaces.axis import under_prefix

BATCH = 256
Part = Tensor | Mapping[str, Tensor]
"""A tensor ``[batch, …]``, or several by name; read flat, names in alphabetical order."""


class Network(TypedDict, total=False):
    """A batch of networks: embedding, blocks and classifier.

    Keys that a model does not use may be missing.

    >>> network: Network = {"classifier": {"b_1": torch.zeros(3, 4)}}
    >>> list(network)
    ['classifier']

    Attributes:
        embedding: ``[batch, …]`` or a dict of such tensors; missing for networks on word vectors.
        blocks: for each block its weights, each tensor ``[batch, 1, *axes]``.
        classifier: ``[batch, …]`` or a dict of such tensors.
    """

    embedding: Part
    blocks: Sequence[Weights]
    classifier: Part


def network_of(named: Mapping[str, Tensor]) -> Network:
    """Group the tensors of networks into a `Network`.

    >>> network = network_of({"blocks.0.b_A": torch.zeros(2, 5), "classifier.b_1": torch.zeros(2)})
    >>> network["blocks"][0]["b_A"].shape
    torch.Size([2, 1, 5])

    Args:
        named: ``embedding.…`` (none for text), ``blocks.0.…`` and on, ``classifier.…``; each
            ``[batch, *axes]``. Those of blocks get an axis of one channel behind the batch.
    """
    depth = len({name.split(".")[1] for name in named if name.startswith("blocks.")})
    network: Network = {
        "blocks": [
            {name: w.unsqueeze(1) for name, w in under_prefix(named, f"blocks.{i}.").items()}
            for i in range(depth)
        ],
        "classifier": under_prefix(named, "classifier."),
    }
    embedding = under_prefix(named, "embedding.")
    return network if not embedding else {**network, "embedding": embedding}


def tensors_of(network: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a network under its full name.

    >>> list(tensors_of({"blocks": [{"b_A": torch.zeros(1, 1, 2)}]}))
    ['blocks.0.b_A']
    """
    tensors: dict[str, Tensor] = {}
    for part, value in network.items():
        if isinstance(value, Tensor):
            tensors[part] = value
        elif isinstance(value, tuple):  # descriptions of checkpoints
            continue
        elif isinstance(value, Mapping):
            tensors |= {f"{part}.{name}": w for name, w in value.items()}
        else:
            for i, block in enumerate(value):
                tensors |= {f"{part}.{i}.{name}": w for name, w in block.items()}
    return tensors


def map_network(network: Mapping[str, Any], change: Any) -> Network:
    """Apply a function to every tensor of a network.

    >>> map_network({"classifier": {"b_1": torch.ones(1)}}, lambda w: 2 * w)
    {'classifier': {'b_1': tensor([2.])}}
    """
    out: dict[str, Any] = {}
    for part, value in network.items():
        if part == "blocks":
            out[part] = [{name: change(w) for name, w in block.items()} for block in value]
        elif isinstance(value, Mapping):
            out[part] = {name: change(w) for name, w in value.items()}
        else:
            out[part] = value if isinstance(value, tuple) else change(value)
    return out  # type: ignore[return-value]


def in_chunks(network: Mapping[str, Any], size: int) -> Iterator[Network]:
    """A batch of networks in batches of at most ``size``; one of none if there is none.

    >>> [len(part["classifier"]) for part in in_chunks({"classifier": torch.zeros(5, 2)}, 2)]
    [2, 2, 1]
    """
    count = len(next(iter(tensors_of(network).values())))
    for at in range(0, max(count, 1), size):
        yield map_network(network, lambda w, at=at: w[at : at + size])


def in_batches(
    logits: Callable[[Mapping[str, Any]], Tensor], network: Mapping[str, Any]
) -> Tensor:
    """Evaluate ``logits`` on all networks in batches; networks are the last axis of its output."""
    return torch.cat([logits(part) for part in in_chunks(network, BATCH)], -1)


def in_order(part: Any) -> list[Tensor]:
    """Tensors of a part of a network, names in alphabetical order."""
    return [part[name] for name in sorted(part)] if isinstance(part, Mapping) else [part]


def flat(network: Mapping[str, object], part: str, width: int) -> Tensor:
    """One part of the network as ``[batch, width]``."""
    value = network.get(part)
    tensors = in_order(value)
    if not all(isinstance(x, Tensor) for x in tensors):
        raise SpaceError(
            f"the model reads '{part}' as a tensor or a dict of tensors, found "
            f"{type(value).__name__ if part in network else 'nothing'}"
        )
    if not tensors or any(x.ndim < 1 for x in tensors):
        raise SpaceError(f"'{part}' must hold tensors with a batch axis in front")
    rows = [x.reshape(x.shape[0], x.shape[1:].numel()) for x in tensors]
    out = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    if out.shape[1] != width:
        raise SpaceError(
            f"'{part}' must have {width} numbers for each network, found {out.shape[1]}"
        )
    return out


def blocks_of(network: Mapping[str, object], number: int) -> Sequence[Weights]:
    """The blocks of the network, as many as the model has layers for."""
    blocks = network.get("blocks")
    if not isinstance(blocks, Sequence):
        raise SpaceError(
            "the model reads 'blocks' as a list of weight dicts, found "
            f"{type(blocks).__name__ if 'blocks' in network else 'nothing'}"
        )
    if len(blocks) != number:
        raise SpaceError(f"the model reads {number} blocks, found {len(blocks)}")
    return blocks


def same_batch(parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts, if all have one batch size."""
    if len({x.shape[0] for x in parts}) != 1:
        sizes = ", ".join(str(x.shape[0]) for x in parts) or "none"
        raise SpaceError(f"the parts of a network must have one batch size, found {sizes}")
    return list(parts)


@dataclass(frozen=True)
class PaperSizes:
    """Number of weights in the parts of a network of one of the paper's zoos.

    Attributes:
        embedding: of the embedding; None for text, which has none.
        classifier: of ``W_1``, ``W_2``, ``b_1``, ``b_2``.
    """

    embedding: int | None
    classifier: tuple[int, ...]


def paper_sizes(task: str) -> PaperSizes:
    """Sizes of embedding and classifier of one of the paper's zoos."""
    if task not in PAPER_TASKS:
        raise SpaceError(f"task must be one of {', '.join(PAPER_TASKS)}, found {task!r}")
    known = KNOWN_TASKS[task]
    embedding = sum(math.prod(shape) for shape in known.embedding_shapes.values())
    classifier = tuple(math.prod(shape) for shape in known.classifier_shapes.values())
    return PaperSizes(embedding or None, classifier)


def paper_block() -> WeightSpace:
    """The block of the paper's zoos: D = 32, two heads of 16, 64 neurons."""
    return attention_block(WIDTH, HEADS, WIDTH // HEADS, WIDTH // HEADS, HIDDEN)
