"""The forward of a transformer of any family: ids or pixels to logits, from canonical tensors.

Weights are fetched block by block, so a lazy model costs the memory of one block and of its ends.
Everything runs in the dtype of the weights: a float64 model gives float64 outputs. Vectors are
rows, ``y = x W + b``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.blocks import layer_norm, rms_norm, rotate, sinusoids
from transformer_nfn.functional.description import Attention, Block, Mlp, Stack, Transformer
from transformer_nfn.spaces.axis import under_prefix

ENDS = {"first": 0, "last": -1}
CHUNK = 16384
"""Columns of the output matrix that are brought to the working dtype at a time."""


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
"""Activations by the names of `functional.description`."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of a name; an unknown one is rejected.

    >>> activation("relu")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    if name not in ACTIVATIONS:
        raise SpaceError(
            f"activation: expected one of {', '.join(sorted(ACTIVATIONS))}, found '{name}'"
        )
    return ACTIVATIONS[name]


def affine_norm(
    x: Tensor, kind: str, eps: float, gain: Tensor | None, bias: Tensor | None
) -> Tensor:
    """``norm(x) ∘ γ + β`` with LayerNorm (``kind`` "layer") or RMS norm ("rms")."""
    out = layer_norm(x, eps) if kind == "layer" else rms_norm(x, eps)
    out = out if gain is None else out * gain
    return out if bias is None else out + bias


def hidden_from(
    description: Attention, queries: int, keys: int, device: torch.device | None = None
) -> Tensor:
    """``[queries, keys]``, True where attention is masked: the future, and out of the window."""
    back = torch.arange(queries, device=device).unsqueeze(-1) - torch.arange(keys, device=device)
    hidden = torch.zeros_like(back, dtype=torch.bool)
    if description.causal:
        hidden |= back < 0
    if description.window is not None:
        hidden |= back >= description.window
        if not description.causal:
            hidden |= -back >= description.window
    return hidden


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    description: Attention,
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
        description: of the attention.
        memory: ``[batch, M, D]``, what keys and values are made of; ``x`` if not given.
        position_bias: ``[h, L, M]``, added to the scores.
        eps: of the norms on queries and keys.
    """
    memory = x if memory is None else memory
    share = description.heads // description.groups
    queries, keys, values = (
        _per_head(source, weights, part)
        for source, part in ((x, "Q"), (memory, "K"), (memory, "V"))
    )
    if description.qk_norm:
        queries = _head_norm(queries, weights["q_norm.g"], eps)
        keys = _head_norm(keys, weights["k_norm.g"], eps)
    if description.rotary:
        frequencies = description.frequencies().to(queries)
        queries, keys = (rotate(z, frequencies) for z in (queries, keys))
    keys, values = (z.repeat_interleave(share, dim=1) for z in (keys, values))
    scores = queries @ keys.mT * description.scale
    if description.softcap is not None:
        scores = torch.tanh(scores / description.softcap) * description.softcap
    if position_bias is not None:
        scores = scores + position_bias
    if description.alibi:
        rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        back = (rows.unsqueeze(-1) - columns).abs().to(scores.dtype)
        scores = scores - description.slopes().to(scores)[:, None, None] * back
    if description.causal or description.window is not None:
        hidden = hidden_from(description, scores.shape[-2], scores.shape[-1], scores.device)
        scores = scores.masked_fill(hidden, -math.inf)
    mixed = torch.softmax(scores, dim=-1) @ values  # [batch, h, L, d_v]
    out = torch.einsum("bhlv,hvd->bld", mixed, weights["W_O"])
    return out + weights["b_O"] if "b_O" in weights else out


def _per_head(x: Tensor, weights: Mapping[str, Tensor], part: str) -> Tensor:
    """``x W + b`` for every head: ``[batch, heads, L, d]``."""
    out = torch.einsum("bld,hdk->bhlk", x, weights[f"W_{part}"])
    bias = weights.get(f"b_{part}")
    return out if bias is None else out + bias.unsqueeze(-2)


def _head_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm of ``x [batch, heads, L, d]`` in each head; over all with a gain ``[heads, d]``."""
    if gain.ndim == 1:
        return rms_norm(x, eps) * gain
    joined = x.transpose(1, 2)
    return (rms_norm(joined.flatten(2), eps).reshape(joined.shape) * gain).transpose(1, 2)


def mlp(x: Tensor, weights: Mapping[str, Tensor], description: Mlp) -> Tensor:
    """``φ(x W_A + b_A) W_B + b_B``; gated ``(φ(x W_G) ∘ (x W_A + b_A)) W_B + b_B``.

    Of a mixture the sum over the experts that each token uses, with the weights of its router.
    """
    if description.experts:
        shares = torch.softmax(x @ weights["router"], dim=-1)
        top = shares.topk(description.active, dim=-1)
        used = top.values
        if description.normalised:
            used = used / used.sum(-1, keepdim=True)
        shares = torch.zeros_like(shares).scatter(-1, top.indices, used)
        single = replace(description, experts=0)
        outputs = (
            mlp(x, under_prefix(weights, prefix), single) * shares[..., e : e + 1]
            for e, prefix in enumerate(description.prefixes)
        )
        return torch.stack(list(outputs)).sum(0)
    phi = activation(description.activation)
    up = x @ weights["W_A"]
    if "W_A.A" in weights:
        up = up + x @ weights["W_A.A"] @ weights["W_A.B"]
    if "b_A" in weights:
        up = up + weights["b_A"]
    hidden = phi(x @ weights["W_G"]) * up if description.gated else phi(up)
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


class LazyTensors(Protocol):
    """Tensors that are read on access, such as `checkpoints.families.Model`."""

    @property
    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by canonical name."""

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read some tensors."""


Weights = Mapping[str, Tensor] | LazyTensors


def fetch(
    weights: Weights, names: Iterable[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Some tensors by canonical name; no others are read."""
    if not isinstance(weights, Mapping):
        return weights.read(names, dtype)
    return {name: weights[name] if dtype is None else weights[name].to(dtype) for name in names}


def fetch_under(
    weights: Weights, prefix: str, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors below a prefix, under the rest of their names."""
    names = weights if isinstance(weights, Mapping) else weights.names
    tensors = fetch(weights, [name for name in names if name.startswith(prefix)], dtype)
    return {name.removeprefix(prefix): w for name, w in tensors.items()}


def transformer(
    description: Transformer,
    weights: Weights,
    inputs: Tensor,
    *,
    decoder: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits of a network, or its final hidden states where it has no head.

    Args:
        description: of the network.
        weights: its canonical tensors, in memory or read on access.
        inputs: token ids ``[batch, L]`` or mixtures of tokens ``[batch, L, vocab]``, whose rows
            weigh the token embeddings; pixels ``[batch, channels, height, width]``; audio
            ``[batch, mel, frames]``; or vectors ``[batch, L, D]`` (``[batch, L, pixels]`` of
            patches that are cut already).
        decoder: token ids for the decoder of an encoder-decoder.
        dtype: to compute in; that of the weights if not given.

    Returns:
        ``[batch, L, vocab]``; ``[batch, classes]`` of a classifier; or ``[batch, L, D]``.
    """
    x = hidden_states(description, weights, inputs, decoder=decoder, dtype=dtype)
    return logits(description, weights, x)


def hidden_states(
    description: Transformer,
    weights: Weights,
    inputs: Tensor,
    *,
    decoder: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The final stream ``[batch, L, D]`` (of the decoder, where there are two stacks)."""
    memory = None
    given = [inputs] if len(description.stacks) == 1 else [inputs, decoder]
    for stack, tokens in zip(description.stacks, given, strict=True):
        if tokens is None:
            raise SpaceError(f"{description.family} has a decoder: give it token ids")
        x = embed(description, stack, weights, tokens, dtype=dtype)
        memory = run_stack(description, stack, weights, x, memory=memory)
    assert memory is not None
    return memory


def embed(
    description: Transformer,
    stack: Stack,
    weights: Weights,
    inputs: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The input of the first block of a stack, ``[batch, L, D]``."""

    def one(name: str, dtype: torch.dtype | None = dtype) -> Tensor:
        return fetch(weights, [name], dtype)[name]

    if description.inputs == "vectors":
        x = inputs if dtype is None else inputs.to(dtype)
        if description.has("patch"):
            x = x @ one("patch") + one("patch_bias")
        return x + _fixed_positions(description, x)
    if description.inputs == "audio" and stack == description.stacks[0]:
        x = inputs
        for i, stride in ((1, 1), (2, 2)):
            W, b = one(f"kept.conv_{i}.W"), one(f"kept.conv_{i}.b")
            x = F.gelu(F.conv1d(x.to(W), W, b, stride, padding=1))
        x = x.mT
    elif description.inputs == "patches":
        x = _patches(inputs, one("patch"), description.side)
        x = x + one("patch_bias") if description.has("patch_bias") else x
        first = [one(name) for name in ("cls", "dist") if description.has(name)]
        x = torch.cat([v.expand(len(x), 1, -1) for v in first] + [x], dim=1)
    elif description.has("projection"):
        return _projected(description, weights, inputs, dtype)
    else:
        rows = _token_rows(one("token", None), inputs)  # these alone need the working dtype
        x = (rows if dtype is None else rows.to(dtype)) * description.embedding_scale
        if description.dropped_token is not None:
            mixed, dropped = inputs.is_floating_point(), description.dropped_token
            there = 1 - inputs[..., dropped] if mixed else inputs != dropped
            there = there.to(x.dtype).unsqueeze(-1)
            x = x * there / there.mean(1, keepdim=True)
    if (position := description.of_stack(stack, "position")) is not None:
        start, table = description.position_offset, one(position)
        if start + x.shape[1] > len(table):
            raise SpaceError(
                f"'{position}': expected at least {start + x.shape[1]} rows for inputs of length "
                f"{x.shape[1]}, found {len(table)}"
            )
        x = x + table[start : start + x.shape[1]]
    else:
        x = x + _fixed_positions(description, x)
    if description.has("type"):
        x = x + one("type")[0]
    if (gained := description.of_stack(stack, "embed_norm.g")) is not None:
        gain, bias = one(gained), one(f"{gained.removesuffix('g')}b")
        x = affine_norm(x, description.norm, description.eps, gain, bias)
    return x


def _token_rows(table: Tensor, inputs: Tensor) -> Tensor:
    """Rows of an embedding by ids ``[batch, L]``, or mixed ``[batch, L, vocab]``."""
    return inputs.to(table.dtype) @ table if inputs.is_floating_point() else table[inputs]


def _fixed_positions(description: Transformer, x: Tensor) -> Tensor:
    """Sinusoids for ``x [batch, L, D]``, or nothing."""
    if description.sinusoids is None:
        return x.new_zeros(())
    table = sinusoids(x.shape[-2], x.shape[-1]).to(x)
    halves = description.sinusoids == "halves"
    return torch.cat([table[:, ::2], table[:, 1::2]], 1) if halves else table


def _projected(
    description: Transformer, weights: Weights, inputs: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """An embedding of another width, normed and projected into the stream (ALBERT)."""
    kept = fetch_under(weights, "kept.", dtype)
    x = _token_rows(kept["token"], inputs) + kept["position"][: inputs.shape[1]] + kept["type"][0]
    x = affine_norm(x, description.norm, description.eps, kept["norm.g"], kept["norm.b"])
    into = fetch(weights, ["projection", "projection_bias"], dtype)
    return x @ into["projection"] + into["projection_bias"]


def _patches(pixels: Tensor, patch: Tensor, side: int) -> Tensor:
    """``[batch, patches, D]`` of ``[batch, channels, height, width]``, row by row, or of patches
    that are cut already."""
    if pixels.ndim == 3:
        return pixels.to(patch.dtype) @ patch
    cut = torch.nn.functional.unfold(pixels.to(patch.dtype), side, stride=side)
    return cut.mT @ patch


def run_stack(
    description: Transformer,
    stack: Stack,
    weights: Weights,
    x: Tensor,
    *,
    memory: Tensor | None = None,
) -> Tensor:
    """``x [batch, L, D]`` through all blocks of a stack and its final norm."""
    table = None
    for i, block in enumerate(stack.blocks * stack.repeats):
        i %= len(stack.blocks)
        tensors = fetch_under(weights, f"{stack.prefix}{i}.", x.dtype)
        table = tensors.get("bias_table", table)
        bias = None if table is None else position_bias(block, table, x.shape[1])
        x = run_block(description, block, tensors, x, memory=memory, position_bias=bias)
    if not stack.final_norm:
        return x
    tensors = fetch_under(weights, f"{stack.prefix}norm.", x.dtype)
    return affine_norm(x, description.norm, description.eps, tensors.get("g"), tensors.get("b"))


def position_bias(block: Block, table: Tensor, length: int) -> Tensor:
    """T5's bias of every query and key, ``[h, L, L]``, from ``table [buckets, h]``."""
    buckets = relative_buckets(
        length,
        length,
        buckets=len(table),
        farthest=block.attention.max_distance,
        both_ways=not block.attention.causal,
    )
    return table[buckets].movedim(-1, 0)


def run_block(
    description: Transformer,
    block: Block,
    weights: Mapping[str, Tensor],
    x: Tensor,
    *,
    memory: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """``x [batch, L, D]`` through one block, ``weights`` named without its prefix."""

    def norm(x: Tensor, name: str) -> Tensor:
        gain, bias = weights.get(f"{name}.g"), weights.get(f"{name}.b")
        return affine_norm(x, description.norm, description.eps, gain, bias)

    def attend(x: Tensor) -> Tensor:
        eps = description.eps
        return attention(x, weights, block.attention, position_bias=position_bias, eps=eps)

    def across(x: Tensor) -> Tensor:
        assert block.cross is not None
        cross = fetch_under(weights, "cross.", x.dtype)
        return attention(x, cross, block.cross, memory=memory, eps=description.eps)

    if block.order == "chain":
        return mlp(norm(attend(norm(x, "norm_1")), "norm_2"), weights, block.mlp)
    if block.order == "post":
        x = norm(x + attend(x), "norm_1")
        if block.cross is not None:
            x = norm(x + across(x), "norm_x")
        return norm(x + mlp(x, weights, block.mlp), "norm_2")
    if block.order == "parallel":
        read = norm(x, "norm_1")
        also = norm(x, "norm_2") if "norm_2.g" in weights else read
        return x + attend(read) + mlp(also, weights, block.mlp)
    if block.order == "sandwich":
        before = "norm_1.g" in weights
        x = x + norm(attend(norm(x, "norm_1") if before else x), "after_1")
        return x + norm(mlp(norm(x, "norm_2") if before else x, weights, block.mlp), "after_2")
    x = x + attend(norm(x, "norm_1"))
    if block.cross is not None:
        x = x + across(norm(x, "norm_x"))
    return x + mlp(norm(x, "norm_2"), weights, block.mlp)


def logits(description: Transformer, weights: Weights, x: Tensor) -> Tensor:
    """Output of the head on the final stream ``x``; ``x`` itself where there is no head."""
    if description.classifier is not None:
        tensors = fetch_under(weights, "classifier.", x.dtype)
        return mlp(x.mean(-2), tensors, description.classifier)
    if description.has("extra.decoder.W"):
        return _decoded(description, weights, x)
    if not description.tied and not description.has("head"):
        if description.headless or description.pooler is None:
            return x
        x = pooled(description, weights, x)
        if not description.has("kept.pooled.W"):
            return x
        reader = fetch_under(weights, "kept.pooled.", x.dtype)
        return x @ reader["W"] + reader["b"]
    if description.pooling is not None:
        x = x.mean(1) if description.pooling == "mean" else x[:, ENDS[description.pooling]]
    if description.mlm is not None:
        mlm = fetch_under(weights, "extra.mlm", x.dtype)
        x = activation(description.mlm)(x @ mlm[".W"] + mlm[".b"])
        x = affine_norm(x, description.norm, description.eps, mlm["_norm.g"], mlm["_norm.b"])
    if description.has("head"):
        head = fetch(weights, ["head"])["head"]
    else:
        head = fetch(weights, ["token"])["token"].mT
    parts = [x @ columns.to(x.dtype) for columns in head.split(CHUNK, dim=1)]
    out = torch.cat(parts, dim=-1) * description.head_scale
    if description.has("head_bias"):
        out = out + fetch(weights, ["head_bias"], x.dtype)["head_bias"]
    cap = description.final_softcap
    return out if cap is None else torch.tanh(out / cap) * cap


def _decoded(description: Transformer, weights: Weights, x: Tensor) -> Tensor:
    """Logits by the embedding of another width, or a matrix of that size (ALBERT)."""
    inner = fetch_under(weights, "extra.decoder.", x.dtype)
    kept = fetch_under(weights, "kept.", x.dtype)
    x = activation(description.stacks[-1].blocks[-1].mlp.activation)(x @ inner["W"] + inner["b"])
    gain, bias = kept["decoder_norm.g"], kept["decoder_norm.b"]
    x = affine_norm(x, description.norm, description.eps, gain, bias)
    return x @ (kept["head"] if "head" in kept else kept["token"].mT) + kept["head_bias"]


def pooled(description: Transformer, weights: Weights, x: Tensor) -> Tensor:
    """Output of the pooler, ``[batch, n]``, which reads the first token of the final stream.

    Of an encoder-decoder it reads the last one.
    """
    if description.pooler is None:
        raise SpaceError(f"this {description.family} has no pooler")
    pooler = fetch_under(weights, "extra.pooler.", x.dtype)
    token = -1 if len(description.stacks) > 1 else 0
    return activation(description.pooler)(x[:, token] @ pooler["W"] + pooler["b"])
