"""What does a whole real transformer compute? Ids or pixels to logits, from canonical tensors.

The reference forward of every family: one description, one set of names, any float dtype. Weights
are fetched block by block, so a lazy model costs the memory of one block and of its ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.sublayers import (
    activation,
    affine_norm,
    attention,
    mlp,
    relative_buckets,
)

if TYPE_CHECKING:
    from transformer_nfn.functional.description import Block, Stack, Transformer

CHUNK = 16384
"""Columns of the output matrix that are brought to the working dtype at a time."""


class LazyTensors(Protocol):
    """Tensors that are read when asked for, such as `architectures.families.Model`."""

    @property
    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Their shapes by canonical name."""

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Some of them."""


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
    found = fetch(weights, [name for name in names if name.startswith(prefix)], dtype)
    return {name.removeprefix(prefix): w for name, w in found.items()}


def transformer(
    about: Transformer,
    weights: Weights,
    inputs: Tensor,
    *,
    decoder: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits of a network, or its final hidden states where it has no head.

    Args:
        about: the network's description.
        weights: its canonical tensors, in memory or read when asked for.
        inputs: token ids ``[batch, L]``; pixels ``[batch, channels, height, width]``; or vectors
            of the stream ``[batch, L, D]`` for a network without embeddings.
        decoder: token ids for the decoder of an encoder-decoder.
        dtype: to compute in; that of the weights if not given.

    Returns:
        ``[batch, L, vocab]``; ``[batch, classes]`` for images; or ``[batch, L, D]``.
    """
    x = hidden_states(about, weights, inputs, decoder=decoder, dtype=dtype)
    return logits(about, weights, x)


def hidden_states(
    about: Transformer,
    weights: Weights,
    inputs: Tensor,
    *,
    decoder: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The final stream ``[batch, L, D]`` (of the decoder, where there are two stacks)."""
    memory = None
    given = [inputs] if len(about.stacks) == 1 else [inputs, decoder]
    for stack, tokens in zip(about.stacks, given, strict=True):
        if tokens is None:
            raise SpaceError(f"{about.family} has a decoder: give it token ids")
        x = embed(about, weights, tokens, dtype=dtype)
        memory = run_stack(about, stack, weights, x, memory=memory)
    assert memory is not None
    return memory


def embed(
    about: Transformer,
    weights: Weights,
    inputs: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What enters the first block, ``[batch, L, D]``."""

    def one(name: str, dtype: torch.dtype | None = dtype) -> Tensor:
        return fetch(weights, [name], dtype)[name]

    if about.inputs == "vectors":
        return inputs if dtype is None else inputs.to(dtype)
    if about.inputs == "patches":
        x = _patches(inputs, one("patch"), about.side) + one("patch_bias")
        first = [one(name) for name in ("cls", "dist") if about.has(name)]
        x = torch.cat([v.expand(len(x), 1, -1) for v in first] + [x], dim=1)
    else:
        rows = one("token", None)[inputs]  # only the rows in use need the working dtype
        x = (rows if dtype is None else rows.to(dtype)) * about.embedding_scale
    if about.has("position"):
        start, table = about.position_offset, one("position")
        if start + x.shape[1] > len(table):
            raise SpaceError(
                f"'position': expected at least {start + x.shape[1]} rows for inputs of length "
                f"{x.shape[1]}, found {len(table)}"
            )
        x = x + table[start : start + x.shape[1]]
    if about.has("type"):
        x = x + one("type")[0]
    if about.has("embed_norm.g"):
        x = affine_norm(x, about.norm, about.eps, one("embed_norm.g"), one("embed_norm.b"))
    return x


def _patches(pixels: Tensor, patch: Tensor, side: int) -> Tensor:
    """``[batch, patches, D]`` of ``[batch, channels, height, width]``, row by row."""
    cut = torch.nn.functional.unfold(pixels.to(patch.dtype), side, stride=side)
    return cut.mT @ patch


def run_stack(
    about: Transformer,
    stack: Stack,
    weights: Weights,
    x: Tensor,
    *,
    memory: Tensor | None = None,
) -> Tensor:
    """``x [batch, L, D]`` through all blocks of a stack and its final norm."""
    table = None
    for i, block in enumerate(stack.blocks):
        own = fetch_under(weights, f"{stack.prefix}{i}.", x.dtype)
        table = own.get("bias_table", table)
        bias = None if table is None else position_bias(block, table, x.shape[1])
        x = run_block(about, block, own, x, memory=memory, position_bias=bias)
    if not stack.final_norm:
        return x
    own = fetch_under(weights, f"{stack.prefix}norm.", x.dtype)
    return affine_norm(x, about.norm, about.eps, own["g"], own.get("b"))


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
    about: Transformer,
    block: Block,
    weights: Mapping[str, Tensor],
    x: Tensor,
    *,
    memory: Tensor | None = None,
    position_bias: Tensor | None = None,
) -> Tensor:
    """``x [batch, L, D]`` through one block, ``weights`` named without its prefix."""

    def norm(x: Tensor, name: str) -> Tensor:
        gain, bias = weights[f"{name}.g"], weights.get(f"{name}.b")
        return affine_norm(x, about.norm, about.eps, gain, bias)

    def attend(x: Tensor) -> Tensor:
        return attention(x, weights, block.attention, position_bias=position_bias, eps=about.eps)

    if block.order == "post":
        x = norm(x + attend(x), "norm_1")
        return norm(x + mlp(x, weights, block.mlp), "norm_2")
    if block.order == "parallel":
        read = norm(x, "norm_1")
        also = norm(x, "norm_2") if "norm_2.g" in weights else read
        return x + attend(read) + mlp(also, weights, block.mlp)
    if block.order == "sandwich":
        x = x + norm(attend(norm(x, "norm_1")), "after_1")
        return x + norm(mlp(norm(x, "norm_2"), weights, block.mlp), "after_2")
    x = x + attend(norm(x, "norm_1"))
    if block.cross is not None:
        own = fetch_under(weights, "cross.", x.dtype)
        x = x + attention(norm(x, "norm_x"), own, block.cross, memory=memory, eps=about.eps)
    return x + mlp(norm(x, "norm_2"), weights, block.mlp)


def logits(about: Transformer, weights: Weights, x: Tensor) -> Tensor:
    """What the head says of the final stream ``x``; ``x`` itself where there is no head.

    Where a head reads the pooler only, this is what the pooler says.
    """
    if not about.tied and not about.has("head"):
        return x if about.headless or about.pooler is None else pooled(about, weights, x)
    if about.inputs == "patches":
        x = x[:, 0]
    if about.mlm is not None:
        own = fetch_under(weights, "extra.mlm", x.dtype)
        x = activation(about.mlm)(x @ own[".W"] + own[".b"])
        x = affine_norm(x, about.norm, about.eps, own["_norm.g"], own["_norm.b"])
    if about.has("head"):
        head = fetch(weights, ["head"])["head"]
    else:
        head = fetch(weights, ["token"])["token"].mT
    parts = [x @ columns.to(x.dtype) for columns in head.split(CHUNK, dim=1)]
    out = torch.cat(parts, dim=-1) * about.head_scale
    if about.has("head_bias"):
        out = out + fetch(weights, ["head_bias"], x.dtype)["head_bias"]
    cap = about.final_softcap
    return out if cap is None else torch.tanh(out / cap) * cap


def pooled(about: Transformer, weights: Weights, x: Tensor) -> Tensor:
    """What the pooler says of the first token of the final stream, ``[batch, n]``."""
    if about.pooler is None:
        raise SpaceError(f"this {about.family} has no pooler")
    own = fetch_under(weights, "extra.pooler.", x.dtype)
    return activation(about.pooler)(x[:, 0] @ own["W"] + own["b"])
