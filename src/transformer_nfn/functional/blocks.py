"""Whole blocks and stacks as functions of input and weights: the references of the spaces."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from transformer_nfn.functional.attention import (
    grouped_query,
    inputs_for,
    layer_norm,
    multi_head,
    rms_norm,
    rotary,
)
from transformer_nfn.spaces.axis import under_prefix


def mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """``ReLU(x W_A + b_A) W_B + b_B`` for ``x [*lead, L, D]``."""
    hidden = torch.relu(x @ weights["W_A"] + weights["b_A"].unsqueeze(-2))
    return hidden @ weights["W_B"] + weights["b_B"].unsqueeze(-2)


def block(X: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The paper's Attn (eqs. 8, 9): ``LN(MLP(LN(MultiHead(X))))``, no residuals.

    Args:
        X: ``[L, D]`` for all networks, ``[batch, L, D]`` one input a network, or anything
            that broadcasts against ``[*lead, L, D]``.
        weights: of `spaces.attention_block` (or with biases, `spaces.biased_block`).

    Returns:
        ``[*lead, L, D]``.
    """
    return layer_norm(mlp(layer_norm(multi_head(X, weights)), weights))


def grouped_query_block(X: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The paper's block with grouped-query attention."""
    return layer_norm(mlp(layer_norm(grouped_query(X, weights)), weights))


def rope_block(X: Tensor, weights: Mapping[str, Tensor], *, base: float = 10000.0) -> Tensor:
    """The paper's block with rotary positions."""
    return layer_norm(mlp(layer_norm(rotary(X, weights, base)), weights))


def swiglu_block(X: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The paper's block with a gated MLP, ``(silu(x W_G) ∘ x W_U) W_D``."""
    return layer_norm(gated_mlp(layer_norm(multi_head(X, weights)), weights))


def residual_stack(X: Tensor, weights: Mapping[str, Tensor], *, blocks: int) -> Tensor:
    """A pre-norm residual transformer: embed, ``x + f(LN(x))`` twice a block, LN, head."""

    def norm(x: Tensor, gain: str, bias: str) -> Tensor:
        return layer_norm(x) * weights[gain].unsqueeze(-2) + weights[bias].unsqueeze(-2)

    X = inputs_for(X, weights["W_E"], 2)
    x = X @ weights["W_E"] + weights["b_E"].unsqueeze(-2)
    for i in range(blocks):
        own = under_prefix(weights, f"{i}.")
        x = x + multi_head(norm(x, f"{i}.g_1", f"{i}.b_1"), own)
        x = x + mlp(norm(x, f"{i}.g_2", f"{i}.b_2"), own)
    return norm(x, "g", "b") @ weights["W_C"] + weights["b_C"].unsqueeze(-2)


def decoder_stack(
    X: Tensor, weights: Mapping[str, Tensor], *, blocks: int, base: float, pairing: str
) -> Tensor:
    """A decoder of today's kind: RMS norms, grouped queries with rotary positions, gated MLPs.

    Embed, ``x + f(norm(x))`` twice a block, norm, head; no mask, as everywhere here.
    """

    def norm(x: Tensor, gain: str) -> Tensor:
        return rms_norm(x) * weights[gain].unsqueeze(-2)

    X = inputs_for(X, weights["W_E"], 2)
    x = X @ weights["W_E"]
    for i in range(blocks):
        own = under_prefix(weights, f"{i}.")
        attended = grouped_query(norm(x, f"{i}.g_1"), own, base=base, pairing=pairing)
        x = x + attended
        x = x + gated_mlp(norm(x, f"{i}.g_2"), own)
    return norm(x, "g") @ weights["W_C"]


def gated_mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """``(silu(x W_G + b_G) ∘ (x W_U + b_U)) W_D + b_D``, biases where present."""
    gate, up = x @ weights["W_G"], x @ weights["W_U"].squeeze(-1)
    if "b_G" in weights:
        gate = gate + weights["b_G"].unsqueeze(-2)
        up = up + weights["b_U"].squeeze(-1).unsqueeze(-2)
    out = (silu(gate) * up) @ weights["W_D"].squeeze(-2)
    return out + weights["b_D"].unsqueeze(-2) if "b_D" in weights else out
