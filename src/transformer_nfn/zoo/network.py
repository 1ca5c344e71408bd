"""The small transformer as one function over many networks at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_nfn.spaces.axis import under_prefix
from transformer_nfn.zoo.sizes import NetworkSizes

Drop = Callable[[Tensor, int], Tensor]


def forward(
    arch: NetworkSizes,
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    positions: Tensor,
    *,
    lengths: Tensor | None = None,
    drop: Drop | None = None,
) -> Tensor:
    """Logits ``[networks, batch, classes]`` of every network on its own batch.

    Embed and add positions, dropout; in each block LayerNorm, attention, dropout, LayerNorm,
    MLP, dropout; then LayerNorm, mean over tokens, two linear maps. No residuals, no affine
    LayerNorm (paper, appendix on the zoo).

    Args:
        weights: the views of `NetworkSizes.views`, leading axis ``networks``.
        inputs: patches ``[networks, batch, tokens, patch]`` or word vectors (last axis
            ``d_model``); a leading axis of 1 gives every network the same batch.
        positions: ``[≥ tokens, d_model]``.
        lengths: for text, ``int [networks]``: how far each network's batch is padded. Tokens
            past it do not exist for that network; None where all are as long as ``inputs``.
        drop: called with activations and the number of the dropout site (1 + 2·blocks sites).
    """
    D, H = arch.d_model, arch.heads
    M = weights["classifier.W_1"].shape[0]
    B, T = inputs.shape[1:3]
    x = inputs.expand(M, -1, -1, -1).flatten(1, 2)
    if arch.patch:
        x = torch.baddbmm(weights["embedding.b"][:, None], x, weights["embedding.W"])
    x = x.unflatten(1, (B, T)) + positions[:T]
    mask, there = _token_masks(lengths, B, T, x)
    x = drop(x, 0) if drop else x
    for i in range(arch.blocks):
        w = under_prefix(weights, f"blocks.{i}.")
        x = F.layer_norm(x, (D,))
        qkv = torch.bmm(x.flatten(1, 2), w["W_QKV"])
        q, k, v = qkv.view(M * B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = torch.bmm(a.transpose(1, 2).reshape(M, B * T, D), w["W_O"]).unflatten(1, (B, T))
        x = drop(x, 1 + 2 * i) if drop else x
        x = F.layer_norm(x, (D,)).flatten(1, 2)
        x = torch.baddbmm(w["b_A"][:, None], x, w["W_A"]).relu()
        x = torch.baddbmm(w["b_B"][:, None], x, w["W_B"]).unflatten(1, (B, T))
        x = drop(x, 2 + 2 * i) if drop else x
    x = F.layer_norm(x, (D,))
    x = x.mean(2) if there is None else (x * there).sum(2)
    x = torch.baddbmm(weights["classifier.b_1"][:, None], x, weights["classifier.W_1"]).relu()
    return torch.baddbmm(weights["classifier.b_2"][:, None], x, weights["classifier.W_2"])


def _token_masks(
    lengths: Tensor | None, B: int, T: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What attention adds to its scores, and the weight of each token in the mean."""
    if lengths is None:
        return None, None
    lengths = lengths.expand(like.shape[0])
    real = torch.arange(T, device=like.device) < lengths[:, None]
    # A padded query attends like any other; its output is weighted by zero in the mean.
    mask = real.repeat_interleave(B, 0)[:, None, None, :].expand(-1, 1, T, -1)
    return mask, (real / lengths[:, None]).to(like.dtype)[:, None, :, None]


def sites(arch: NetworkSizes) -> int:
    """How many times dropout acts in one forward."""
    return 1 + 2 * arch.blocks
