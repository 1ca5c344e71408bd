"""What do the parts of a real transformer's block compute? Norm, attention, MLP, by description.

Everything runs in the dtype of the weights: nothing is cast to float32 on the way, so a float64
model gives float64 answers. Row vectors throughout, ``y = x W + b``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.attention import layer_norm, rms_norm

if TYPE_CHECKING:
    from transformer_nfn.functional.description import Attention, Mlp


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activations by the names of `architectures.families.description`."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of a name; an unknown one is refused."""
    if name not in ACTIVATIONS:
        raise SpaceError(
            f"activation: expected one of {', '.join(sorted(ACTIVATIONS))}, found '{name}'"
        )
    return ACTIVATIONS[name]


def affine_norm(x: Tensor, kind: str, eps: float, gain: Tensor, bias: Tensor | None) -> Tensor:
    """``norm(x) ∘ γ + β`` with LayerNorm (``kind`` "layer") or RMS norm ("rms")."""
    out = (layer_norm(x, eps) if kind == "layer" else rms_norm(x, eps)) * gain
    return out if bias is None else out + bias


def rotate_halves(x: Tensor, frequencies: Tensor) -> Tensor:
    """Turns the pairs (j, j + r/2) of the first r entries by position · frequency j.

    Args:
        x: ``[..., L, n]``.
        frequencies: ``[r / 2]``, in radians per position; entries past r stay as they are.
    """
    half = len(frequencies)
    position = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    angle = position.unsqueeze(-1) * frequencies
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


def hidden_from(about: Attention, queries: int, keys: int) -> Tensor:
    """``[queries, keys]``, True where a query must not look: the future, and out of the window."""
    back = torch.arange(queries).unsqueeze(-1) - torch.arange(keys)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if about.causal:
        hidden |= back < 0
    if about.window is not None:
        hidden |= back >= about.window
        if not about.causal:
            hidden |= -back >= about.window
    return hidden


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    about: Attention,
    *,
    memory: Tensor | None = None,
    position_bias: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """``Σ_h softmax(scale · q_h k_gᵀ + bias) v_g O_h + b_O``.

    Args:
        x: ``[batch, L, D]``, what queries are made of (already normed).
        weights: ``W_Q [h, D, d_k]``, ``W_K [g, D, d_k]``, ``W_V [g, D, d_v]``, ``W_O [h, d_v, D]``;
            ``b_Q``, ``b_K``, ``b_V``, ``b_O``, ``q_norm.g``, ``k_norm.g`` where present.
        about: the attention.
        memory: ``[batch, M, D]``, what keys and values are made of; ``x`` if not given.
        position_bias: ``[h, L, M]``, added to the scores.
        eps: of the norms on queries and keys.
    """
    memory = x if memory is None else memory
    share = about.heads // about.groups
    queries, keys, values = (
        _per_head(source, weights, part)
        for source, part in ((x, "Q"), (memory, "K"), (memory, "V"))
    )
    if about.qk_norm:
        queries = rms_norm(queries, eps) * weights["q_norm.g"]
        keys = rms_norm(keys, eps) * weights["k_norm.g"]
    if about.rotary:
        frequencies = about.frequencies().to(queries)
        queries, keys = (rotate_halves(z, frequencies) for z in (queries, keys))
    keys, values = (z.repeat_interleave(share, dim=1) for z in (keys, values))
    scores = queries @ keys.mT * about.scale
    if about.softcap is not None:
        scores = torch.tanh(scores / about.softcap) * about.softcap
    if position_bias is not None:
        scores = scores + position_bias
    if about.causal or about.window is not None:
        scores = scores.masked_fill(hidden_from(about, *scores.shape[-2:]), -math.inf)
    mixed = torch.softmax(scores, dim=-1) @ values  # [batch, h, L, d_v]
    out = torch.einsum("bhlv,hvd->bld", mixed, weights["W_O"])
    return out + weights["b_O"] if "b_O" in weights else out


def _per_head(x: Tensor, weights: Mapping[str, Tensor], part: str) -> Tensor:
    """``x W + b`` for every head: ``[batch, heads, L, d]``."""
    out = torch.einsum("bld,hdk->bhlk", x, weights[f"W_{part}"])
    bias = weights.get(f"b_{part}")
    return out if bias is None else out + bias.unsqueeze(-2)


def mlp(x: Tensor, weights: Mapping[str, Tensor], about: Mlp) -> Tensor:
    """``φ(x W_A + b_A) W_B + b_B``; gated ``(φ(x W_G) ∘ (x W_A + b_A)) W_B + b_B``."""
    phi = activation(about.activation)
    up = x @ weights["W_A"]
    if "b_A" in weights:
        up = up + weights["b_A"]
    hidden = phi(x @ weights["W_G"]) * up if about.gated else phi(up)
    out = hidden @ weights["W_B"]
    return out + weights["b_B"] if "b_B" in weights else out


def relative_buckets(
    queries: int, keys: int, *, buckets: int, farthest: int, both_ways: bool
) -> Tensor:
    """T5's bucket of every (query, key) distance, ``[queries, keys]``.

    Near distances have a bucket each; farther ones share buckets that grow as the logarithm of
    the distance, up to ``farthest``.
    """
    ahead = torch.arange(keys) - torch.arange(queries).unsqueeze(-1)
    start = torch.zeros_like(ahead)
    if both_ways:
        buckets //= 2
        start = (ahead > 0).long() * buckets
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp_min(0)
    exact = buckets // 2
    logarithmic = (distance.double() / exact).clamp_min(1).log() / math.log(farthest / exact)
    far = (exact + (logarithmic * (buckets - exact)).long()).clamp_max(buckets - 1)
    return start + torch.where(distance < exact, distance, far)
