"""What does a block do to the same random vectors of the stream? A sketch that disguises share.

Gaussian vectors z of the stream, brought to each model's own coordinates, are read by queries,
keys, values and neurons, and further ones y read what is written. Heads then show the numbers
`q(z)·k(z′)` (under rotary positions at several distances) and `z V O y`, neurons what they read
and what they write. Nothing of this depends on a basis of a head, and no product is formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.architectures.families.description import Attention
from transformer_nfn.symmetry.reduced import Piece, ReducedBlock
from transformer_nfn.symmetry.sketch import directions

PROBES = 256
OFFSETS = (0, 3, 40)
"""Distances between query and key at which rotary attention is looked at."""


@dataclass(frozen=True)
class Probes:
    """Random vectors of a stream: ``into [n, D]`` are read, ``out [n, D]`` read what is written."""

    into: Tensor
    out: Tensor


def draw_probes(width: int, *, centred: bool, dtype: torch.dtype) -> Probes:
    """The same vectors on every machine; without a mean where nobody sees it."""
    like = torch.zeros(0, dtype=dtype)
    pair = [directions(f"relate {way}", PROBES, width, like) for way in ("into", "out")]
    if centred:
        pair = [z - z.mean(-1, keepdim=True) for z in pair]
    return Probes(pair[0], pair[1])


@dataclass(frozen=True)
class HeadSketch:
    """Heads of one attention: ``QK [h, …]`` scores of probes, ``VO [h, …]`` what they write."""

    QK: Tensor
    VO: Tensor


@dataclass(frozen=True)
class NeuronSketch:
    """Neurons of one MLP.

    Attributes:
        read: ``[f, n]`` what each reads of the probes (the gate, where it is gated).
        up: ``[f, n]`` the other factor of gated neurons, or None.
        write: ``[f, n]`` how what it writes is read by the probes.
    """

    read: Tensor
    up: Tensor | None
    write: Tensor


@dataclass(frozen=True)
class BlockSketch:
    """Attentions by the prefix of their tensors, the MLP, and constants added to the stream."""

    heads: Mapping[str, HeadSketch]
    neurons: NeuronSketch
    constants: Tensor


def sketch_block(block: ReducedBlock, probes: Probes) -> BlockSketch:
    """What a block does to the probes (in the model's own coordinates)."""
    heads = {prefix: _heads(block, prefix, about, probes) for prefix, about in block.attentions()}
    constants = [block.output_bias(prefix) for prefix, _ in block.attentions()]
    constants.append(block.mlp_bias())
    written = [probes.out @ c.value for c in constants if c is not None]
    empty = probes.out.new_zeros(0)
    return BlockSketch(heads, _neurons(block, probes), torch.cat([empty, *written]))


def _read(probes: Tensor, weight: Piece, bias: Piece | None) -> Tensor:
    """``z W + b`` for every head: ``[h, n, d]``."""
    W = weight.value
    # One product for all heads: a batch of narrow ones takes several times as long.
    out = probes @ W if W.ndim == 2 else _by_head(probes @ W.movedim(0, 1).flatten(1), len(W))
    return out if bias is None else out + bias.value.unsqueeze(-2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[n, h · d] → [h, n, d]``."""
    return x.reshape(len(x), heads, -1).movedim(1, 0)


def query_key_probes(
    block: ReducedBlock, prefix: str, about: Attention, into: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries ``[h, n, d]`` and keys ``[g, n, d]`` of the probes, before positions turn them."""
    pieces = block.query_key(prefix, about)
    q, k = (_read(into, pieces[f"W_{p}"], pieces.get(f"b_{p}")) for p in "QK")
    if about.qk_norm:
        q, k = (
            z / (z.square().mean(-1, keepdim=True) + 1e-12).sqrt() * pieces[f"{p}_norm.g"].value
            for p, z in (("q", q), ("k", k))
        )
    return q, k


def turned(q: Tensor, about: Attention, offset: int) -> Tensor:
    """Queries ``[..., d]`` as a key ``offset`` tokens away sees them."""
    half = about.rotary // 2
    if half == 0 or offset == 0:
        return q
    angle = offset * about.frequencies().to(q)
    first, second, rest = q.split([half, half, q.shape[-1] - 2 * half], -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


def _heads(block: ReducedBlock, prefix: str, about: Attention, probes: Probes) -> HeadSketch:
    share = about.heads // about.groups
    q, k = query_key_probes(block, prefix, about, probes.into)
    k = k.repeat_interleave(share, dim=0)
    offsets = OFFSETS if about.rotary else OFFSETS[:1]
    # Each offset has its own third of the queries, so that the sketch stays as small.
    chunks = q.chunk(len(offsets), 1)
    parts = [turned(c, about, o) for c, o in zip(chunks, offsets, strict=True)]
    QK = torch.cat(parts, 1) @ k.mT
    del q, k, parts
    v = _read(probes.into, block.reader(f"{prefix}W_V")[0], None)
    W_O = block.writer(f"{prefix}W_O").value
    o = (W_O.flatten(0, 1) @ probes.out.mT).reshape(len(W_O), -1, len(probes.out))
    VO = v.repeat_interleave(share, dim=0) @ o
    return HeadSketch(QK.flatten(1), VO.flatten(1))


def _neurons(block: ReducedBlock, probes: Probes) -> NeuronSketch:
    first = _read(probes.into, *block.reader("W_A")).mT
    gate = _read(probes.into, *block.reader("W_G")).mT if block.about.mlp.gated else None
    write = block.writer("W_B").value @ probes.out.mT
    if gate is None:
        return NeuronSketch(first, None, write)
    return NeuronSketch(gate, first, write)
