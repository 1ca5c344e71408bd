"""What do many networks answer to the same inputs? All of them at once.

The arithmetic is that of the zoo's network (`architectures.zoo_network`), for any width, number
of heads and depth: embedding and fixed positions; LayerNorm, attention, LayerNorm, MLP in each
block; LayerNorm, mean over tokens, classifier. On a CPU in float32 it is compiled C
(`native_network`), which the tests hold against what is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_nfn import native_network
from transformer_nfn.architectures.zoo_network import EPS
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
    last = network["classifier"]
    n, D = last["W_1"].shape[:2]
    count, T, width = inputs.shape
    where = positions[:T]
    embedding = network.get("embedding")
    if embedding is None:
        x = (inputs + where).expand(n, -1, -1, -1)
    else:
        tokens = inputs.reshape(1, count * T, width).expand(n, -1, -1)
        x = torch.baddbmm(embedding["b"][:, None], tokens, embedding["W"])
        x = x.view(n, count, T, D) + where
    alike = []
    for block in network["blocks"]:
        x = _block({name: w[:, 0] for name, w in block.items()}, F.layer_norm(x, (D,), eps=EPS))
        alike.append(_alike(F.layer_norm(x, (D,), eps=EPS).detach()))
    pooled = F.layer_norm(x, (D,), eps=EPS).mean(2)
    hidden = torch.baddbmm(last["b_1"][:, None], pooled, last["W_1"]).relu()
    logits = torch.baddbmm(last["b_2"][:, None], hidden, last["W_2"])
    return Answers(logits, torch.stack(alike, -1))


def _alike(x: Tensor) -> Tensor:
    """Tokens ``[n, inputs, T, D]`` are brought to mean square 1, which LayerNorm's ε forbids."""
    size = x.square().mean(-1, keepdim=True).clamp(min=LEAST)
    return (x * size.rsqrt()).mean(2).square().mean(-1)


def _block(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Attention and MLP of every network on its own tokens ``[n, inputs, T, D]``."""
    n, count, T, D = x.shape
    heads, _, d = w["W_Q"].shape[1:]
    into = [w[name].transpose(1, 2).flatten(2) for name in ("W_Q", "W_K", "W_V")]
    flat = torch.bmm(x.reshape(n, count * T, D), torch.cat(into, -1))
    q, k, v = flat.view(n * count, T, 3, heads, d).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    x = torch.bmm(mixed.reshape(n, count * T, heads * d), w["W_O"].flatten(1, 2))
    x = F.layer_norm(x, (D,), eps=EPS)
    x = torch.baddbmm(w["b_A"][:, None], x, w["W_A"]).relu()
    return torch.baddbmm(w["b_B"][:, None], x, w["W_B"]).view(n, count, T, D)
