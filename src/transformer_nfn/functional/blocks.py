"""The paper's maps as functions of input and weights: norms, attention, blocks and stacks.

Weights have leading axes ``[*lead, ...]``, one network for each index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.axis import under_prefix


def layer_norm(x: Tensor, eps: float = 0.0) -> Tensor:
    """LayerNorm without affine parameters, along the last axis (appendix B).

    ``√D (x − x̄) / ‖x − x̄‖``. The paper's has no ``eps``; any other value breaks the exact
    invariance under scaling.

    >>> layer_norm(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.])
    """
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, eps: float = 0.0) -> Tensor:
    """RMS norm without gain, along the last axis: ``√D x / ‖x‖``.

    >>> rms_norm(torch.tensor([3.0, 3.0]))
    tensor([1., 1.])
    """
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def inputs_for(X: Tensor, weight: Tensor, axes: int) -> Tensor:
    """``X`` lined up with weights that have ``weight.ndim - axes`` leading axes.

    Args:
        X: ``[L, D]`` for all networks alike; ``[batch, L, D]``, one input a network; or
            ``[…, batch, channels, L, D]``, anything that broadcasts.
        weight: any tensor of the network.
        axes: how many axes of its own that tensor has.
    """
    lead = weight.ndim - axes
    if X.ndim < 2:
        raise SpaceError(f"X must have shape [..., tokens, width], found {list(X.shape)}")
    if X.ndim == 3 and lead == 2:
        if X.shape[0] not in (1, weight.shape[0]) and weight.shape[0] != 1:
            raise SpaceError(
                f"X axis 'batch': expected {weight.shape[0]} as in the weights, found {X.shape[0]}"
            )
        X = X.unsqueeze(1)
    return X


def softmax_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """``softmax(Q Kᵀ / √D_k)`` over the last axis, for ``[..., L, D_k]`` each."""
    return torch.softmax(queries @ keys.mT / math.sqrt(queries.shape[-1]), dim=-1)


def multi_head(
    X: Tensor,
    weights: Mapping[str, Tensor],
    *,
    base: float | None = None,
    pairing: str = "neighbours",
) -> Tensor:
    """MultiHead (eq. 2): ``Σ_i softmax(X Q_i (X K_i)ᵀ / √D_k) X V_i O_i``.

    Args:
        X: see `inputs_for`; one ``[L, D]`` serves all networks.
        weights: ``W_Q, W_K [*lead, h, D, D_k]``, ``W_V [*lead, h, D, D_v]``,
            ``W_O [*lead, h, D_v, D]``; biases ``b_Q, b_K, b_V, b_O`` are used where present. With
            r queries for each key, ``W_Q`` and ``W_O`` have an axis r after h.
        base: of rotary positions: pair j of Q and K turns by position·base^(−2j/D_k); None for
            no positions.
        pairing: which entries turn together, ``neighbours`` or ``halves``.

    Returns:
        ``[*lead, L, D]``.

    >>> from transformer_nfn import spaces
    >>> weights = spaces.multi_head(6, 2, 3, 3).randn(4)
    >>> multi_head(torch.randn(5, 6), weights).shape
    torch.Size([4, 1, 5, 6])
    >>> weights = spaces.grouped_query_block(6, 2, 2, 4, 3, 8).randn(1)
    >>> multi_head(torch.randn(5, 6), weights, base=10000.0).shape
    torch.Size([1, 1, 5, 6])
    """
    W_Q, W_K = weights["W_Q"], weights["W_K"]
    X = inputs_for(X, W_K, 3)
    if X.shape[-1] != W_Q.shape[-2]:
        raise SpaceError(
            f"X axis 'width': expected {W_Q.shape[-2]} as in 'W_Q', found {X.shape[-1]}"
        )
    tokens = X.unsqueeze(-3)  # a place for the heads

    def project(part: str) -> Tensor:
        x = tokens @ weights[f"W_{part}"]
        return x + weights[f"b_{part}"].unsqueeze(-2) if f"b_{part}" in weights else x

    keys, values = project("K"), project("V")
    heads = [-3]
    if W_Q.ndim > W_K.ndim:  # a place for the queries of a key
        tokens, keys, values = (x.unsqueeze(-3) for x in (tokens, keys, values))
        heads = [-3, -4]
    queries = project("Q")
    if base is not None:
        n = queries.shape[-1]
        frequencies = base ** (-torch.arange(0, n, 2, dtype=X.dtype, device=X.device) / n)
        queries, keys = (rotate(x, frequencies, pairing=pairing) for x in (queries, keys))
    out = (softmax_scores(queries, keys) @ values @ weights["W_O"]).sum(heads)
    return out + weights["b_O"].unsqueeze(-2) if "b_O" in weights else out


def rotate(
    x: Tensor,
    frequencies: Tensor,
    *,
    pairing: str = "halves",
    positions: Tensor | None = None,
) -> Tensor:
    """Rotary positions: rotate the pairs of the first r entries by position · frequency.

    Args:
        x: ``[..., L, n]``.
        frequencies: ``[r / 2]``, in radians per position; entries past r stay as they are.
        pairing: ``halves`` pairs j with j + r/2, ``neighbours`` 2j with 2j + 1 (where r is n).
        positions: ``[L]``, or ``[1]`` for one of all rows; 0, 1, … if not given.

    >>> x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    >>> rotate(x, torch.tensor([torch.pi / 2])).round().tolist()
    [[1.0, 2.0, 3.0], [-2.0, 1.0, 3.0]]
    """
    if positions is None:
        positions = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    angle = positions.unsqueeze(-1) * frequencies
    cos, sin = angle.cos(), angle.sin()
    if pairing == "neighbours":
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    half = len(frequencies)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


def mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """``ReLU(x W_A + b_A) W_B + b_B`` for ``x [*lead, L, D]``.

    >>> from transformer_nfn import spaces
    >>> mlp(torch.randn(5, 6), spaces.attention_block(6, 2, 3, 3, 8).randn(4)).shape
    torch.Size([4, 1, 5, 6])
    """
    hidden = torch.relu(x @ weights["W_A"] + weights["b_A"].unsqueeze(-2))
    return hidden @ weights["W_B"] + weights["b_B"].unsqueeze(-2)


def gated_mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """``(silu(x W_G + b_G) ∘ (x W_U + b_U)) W_D + b_D``, biases where present."""
    gate, up = x @ weights["W_G"], x @ weights["W_U"].squeeze(-1)
    if "b_G" in weights:
        gate = gate + weights["b_G"].unsqueeze(-2)
        up = up + weights["b_U"].squeeze(-1).unsqueeze(-2)
    out = (silu(gate) * up) @ weights["W_D"].squeeze(-2)
    return out + weights["b_D"].unsqueeze(-2) if "b_D" in weights else out


def block(X: Tensor, weights: Mapping[str, Tensor], *, base: float | None = None) -> Tensor:
    """The paper's Attn (eqs. 8, 9): ``LN(MLP(LN(MultiHead(X))))``, no residuals.

    Args:
        X: ``[L, D]`` for all networks, ``[batch, L, D]`` one input a network, or anything
            that broadcasts against ``[*lead, L, D]``.
        weights: of `spaces.attention_block`, or one with biases, grouped queries or a gated MLP.
        base: of rotary positions, as in `multi_head`.

    Returns:
        ``[*lead, L, D]``.

    >>> from transformer_nfn import spaces
    >>> block(torch.randn(5, 6), spaces.attention_block(6, 2, 3, 3, 8).randn(4)).shape
    torch.Size([4, 1, 5, 6])
    >>> block(torch.randn(5, 6), spaces.swiglu_block(6, 2, 3, 3, 8).randn(1)).shape
    torch.Size([1, 1, 5, 6])
    """
    hidden = gated_mlp if "W_G" in weights else mlp
    return layer_norm(hidden(layer_norm(multi_head(X, weights, base=base)), weights))


def residual_stack(
    X: Tensor,
    weights: Mapping[str, Tensor],
    *,
    blocks: int,
    base: float | None = None,
    pairing: str = "neighbours",
) -> Tensor:
    """A pre-norm residual transformer: embed, ``x + f(norm(x))`` twice a block, norm, head.

    No mask. Norms with a bias are LayerNorms, those without one RMS norms.

    Args:
        X: see `inputs_for`.
        weights: of `spaces.residual_stack` or `spaces.decoder_stack`.
        blocks: number of blocks.
        base: of rotary positions, as in `multi_head`.
        pairing: of rotary positions, as in `multi_head`.
    """

    def norm(x: Tensor, gain: str, bias: str) -> Tensor:
        if bias not in weights:
            return rms_norm(x) * weights[gain].unsqueeze(-2)
        return layer_norm(x) * weights[gain].unsqueeze(-2) + weights[bias].unsqueeze(-2)

    def linear(x: Tensor, matrix: str, bias: str) -> Tensor:
        out = x @ weights[matrix]
        return out + weights[bias].unsqueeze(-2) if bias in weights else out

    x = linear(inputs_for(X, weights["W_E"], 2), "W_E", "b_E")
    for i in range(blocks):
        inner = under_prefix(weights, f"{i}.")
        hidden = gated_mlp if "W_G" in inner else mlp
        read = norm(x, f"{i}.g_1", f"{i}.b_1")
        x = x + multi_head(read, inner, base=base, pairing=pairing)
        x = x + hidden(norm(x, f"{i}.g_2", f"{i}.b_2"), inner)
    return linear(norm(x, "g", "b"), "W_C", "b_C")


def sinusoids(tokens: int, d_model: int) -> Tensor:
    """The fixed positions ``[tokens, d_model]``, in float32 as the networks have them.

    >>> sinusoids(2, 4)[0]
    tensor([0., 1., 0., 1.])
    """
    where = torch.arange(tokens, dtype=torch.float64)[:, None]
    pair = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = where * torch.exp(pair * (-math.log(10000.0) / d_model))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(torch.float32)
