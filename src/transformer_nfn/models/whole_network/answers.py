"""What do many networks answer to the same inputs? All of them at once.

They run through `functional.zoo_logits`, for any width, number of heads and depth. On a CPU in
float32 it is compiled C (`native_network`), which the tests hold against that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_nfn import native_network
from transformer_nfn.functional.zoo_network import EPS, zoo_logits
from transformer_nfn.models.network import map_network

LEAST = 1e-8
"""Tokens of a smaller mean square are nothing."""
CHUNK = 16
"""Networks at a time where nothing is differentiated: their activations stay in the cache."""


class Answers(NamedTuple):
    """What networks say to inputs.

    Attributes:
        logits: ``[networks, inputs, classes]``.
        alike: ``[networks, inputs, blocks]``: how alike the tokens are behind each block, 1 where
            all are one vector. Of directions alone: scales that LayerNorm discards do not show.
    """

    logits: Tensor
    alike: Tensor


def answers(network: Mapping[str, Any], inputs: Tensor, positions: Tensor) -> Answers:
    """The answers of every network to every input.

    Args:
        network: a `Network`.
        inputs: ``[inputs, tokens, patch]``, or word vectors where the network has no embedding.
        positions: ``[≥ tokens, D]``.
    """
    if native_network.fits(network):
        return Answers(*native_network.probe_answers(network, inputs, positions))
    first = network["classifier"]["W_1"]
    if torch.is_grad_enabled() or len(first) <= CHUNK:
        return _answers(network, inputs, positions)
    found = [
        _answers(
            map_network(network, lambda w, start=start: w[start : start + CHUNK]), inputs, positions
        )
        for start in range(0, len(first), CHUNK)
    ]
    return Answers(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _answers(network: Mapping[str, Any], inputs: Tensor, positions: Tensor) -> Answers:
    weights = {f"classifier.{name}": w for name, w in network["classifier"].items()}
    weights |= {f"embedding.{name}": w for name, w in network.get("embedding", {}).items()}
    for i, block in enumerate(network["blocks"]):
        weights |= {f"blocks.{i}.{name}": w[:, 0] for name, w in block.items()}
    alike: list[Tensor] = []
    logits = zoo_logits(
        weights, inputs[None], positions, observe=lambda x: alike.append(_alike(x.detach()))
    )
    return Answers(logits, torch.stack(alike, -1))


def _alike(x: Tensor) -> Tensor:
    """Tokens ``[n, inputs, T, D]`` are brought to mean square 1, which LayerNorm's ε forbids."""
    x = F.layer_norm(x, x.shape[-1:], eps=EPS)
    size = x.square().mean(-1, keepdim=True).clamp(min=LEAST)
    return (x * size.rsqrt()).mean(2).square().mean(-1)
