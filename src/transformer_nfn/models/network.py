"""What does a model read? A batch of networks in parts, as a plain dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Weights
from transformer_nfn.spaces.axis import under_prefix

Part = Tensor | Mapping[str, Tensor]
"""A tensor ``[batch, …]``, or several by name; read flat, names in alphabetical order."""


class Network(TypedDict, total=False):
    """A batch of networks: what is before the blocks, the blocks, and what is after them.

    Keys that a model does not use may be missing.

    Attributes:
        embedding: ``[batch, …]`` or a dict of such tensors; missing for text of the zoo.
        blocks: for each block its weights, each tensor ``[batch, 1, *axes]``.
        classifier: ``[batch, …]`` or a dict of such tensors.
    """

    embedding: Part
    blocks: Sequence[Weights]
    classifier: Part


def network_of(named: Mapping[str, Tensor]) -> Network:
    """The tensors of a whole network, by where they stand in it.

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
    """Every tensor of a network under its full name: ``blocks.0.W_Q``, ``classifier.b_1``."""
    found: dict[str, Tensor] = {}
    for part, value in network.items():
        if isinstance(value, Tensor):
            found[part] = value
        elif isinstance(value, Mapping):
            found |= {f"{part}.{name}": w for name, w in value.items()}
        else:
            for i, block in enumerate(value):
                found |= {f"{part}.{i}.{name}": w for name, w in block.items()}
    return found


def map_network(network: Mapping[str, Any], change: Any) -> Network:
    """The network with every tensor changed."""
    out: dict[str, Any] = {}
    for part, value in network.items():
        if part == "blocks":
            out[part] = [{name: change(w) for name, w in block.items()} for block in value]
        elif isinstance(value, Mapping):
            out[part] = {name: change(w) for name, w in value.items()}
        else:
            out[part] = change(value)
    return out  # type: ignore[return-value]


def flat(network: Mapping[str, object], part: str, width: int) -> Tensor:
    """One part of the network as ``[batch, width]``."""
    given = network.get(part)
    if isinstance(given, Tensor):
        pieces = [given]
    elif isinstance(given, Mapping) and all(isinstance(x, Tensor) for x in given.values()):
        pieces = [given[name] for name in sorted(given)]
    else:
        raise SpaceError(
            f"the model reads '{part}' as a tensor or a dict of tensors, found "
            f"{type(given).__name__ if part in network else 'nothing'}"
        )
    if not pieces or any(x.ndim < 1 for x in pieces):
        raise SpaceError(f"'{part}' must hold tensors with a batch axis in front")
    rows = [x.reshape(x.shape[0], x.shape[1:].numel()) for x in pieces]
    out = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
    if out.shape[1] != width:
        raise SpaceError(
            f"'{part}' must have {width} numbers for each network, found {out.shape[1]}"
        )
    return out


def blocks_of(network: Mapping[str, object], number: int) -> Sequence[Weights]:
    """The blocks of the network, as many as the model has layers for."""
    given = network.get("blocks")
    if not isinstance(given, Sequence):
        raise SpaceError(
            "the model reads 'blocks' as a list of weight dicts, found "
            f"{type(given).__name__ if 'blocks' in network else 'nothing'}"
        )
    if len(given) != number:
        raise SpaceError(f"the model reads {number} blocks, found {len(given)}")
    return given
