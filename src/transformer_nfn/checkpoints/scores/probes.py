"""Sketch of a block: what it does to fixed random vectors of the stream, shared by all disguises.

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

from transformer_nfn.checkpoints.reduced import Piece, ReducedBlock
from transformer_nfn.functional.description import Attention
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
    """Heads of one attention.

    Attributes:
        QK: ``[h, …]`` scores of the probes.
        VO: ``[h, …]`` what they write.
        noise: ``[h]`` each, of QK and VO: expected squares of the relative rounding error. A
            basis of large condition makes them large: products of large numbers cancel.
    """

    QK: Tensor
    VO: Tensor
    noise: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class NeuronSketch:
    """Neurons of one MLP.

    Attributes:
        read: ``[f, n]`` what each reads of the probes (the gate, where it is gated).
        up: ``[f, n]`` the other factor of gated neurons, or None.
        write: ``[f, n]`` how what it writes is read by the probes.
        noise: ``[f]`` each, of ``read`` and of ``write`` (with ``up``): expected squares of the
            relative rounding error.
    """

    read: Tensor
    up: Tensor | None
    write: Tensor
    noise: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockSketch:
    """One block.

    Attributes:
        heads: attentions by the prefix of their tensors.
        neurons: the MLP.
        constants: what is added to the stream whatever is read, seen by the probes.
        constants_error: expected square of their rounding error.
    """

    heads: Mapping[str, HeadSketch]
    neurons: NeuronSketch
    constants: Tensor
    constants_error: float


def sketch_block(block: ReducedBlock, probes: Probes) -> BlockSketch:
    """What a block does to the probes (in the model's own coordinates)."""
    heads = {prefix: _heads(block, prefix, about, probes) for prefix, about in block.attentions()}
    biases = [block.output_bias(prefix) for prefix, _ in block.attentions()]
    constants = [c for c in (*biases, block.mlp_bias()) if c is not None]
    written = [probes.out @ c.value for c in constants]
    error = sum(float(c.error.sum()) for c in constants) * float(probes.out.square().mean())
    empty = probes.out.new_zeros(0)
    return BlockSketch(
        heads, _neurons(block, probes), torch.cat([empty, *written]), error * len(probes.out)
    )


def _read(probes: Tensor, weight: Piece, bias: Piece | None) -> Tensor:
    """``z W + b`` for every head: ``[h, n, d]``."""
    W = weight.value
    # One product for all heads: a batch of narrow ones takes several times as long.
    out = probes @ W if W.ndim == 2 else _by_head(probes @ W.movedim(0, 1).flatten(1), len(W))
    return out if bias is None else out + bias.value.unsqueeze(-2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[n, h · d] → [h, n, d]``."""
    return x.reshape(len(x), heads, -1).movedim(1, 0)


def _query_key_probes(
    block: ReducedBlock, prefix: str, about: Attention, into: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Queries ``[h, n, d]`` of the probes before positions turn them, with their expected squared
    rounding errors ``[h, d]`` summed over the probes; and keys ``[g, n, d]`` likewise."""
    pieces = block.query_key(prefix, about)
    out = []
    for part in "QK":
        weight, bias = pieces[f"W_{part}"], pieces.get(f"b_{part}")
        z, error = _read(into, weight, bias), _read_error(into, weight, bias)
        if about.qk_norm:
            size = (z.square().mean(-1, keepdim=True) + 1e-12).sqrt()
            gain = pieces[f"{part.lower()}_norm.g"].value
            error = error * (gain / size).square().mean(-2)
            z = z / size * gain
        out.append((z, error))
    return out[0], out[1]


def _read_error(probes: Tensor, weight: Piece, bias: Piece | None) -> Tensor:
    """Expected squares of the rounding error of `_read`, summed over the probes."""
    error = weight.error * probes.square().mean()
    return len(probes) * (error if bias is None else error + bias.error)


def _relative(error: Tensor, size: Tensor) -> Tensor:
    """``error / size``; 0 where there is no error, at most 1e6 where there is nothing else."""
    return error / torch.maximum(size, 1e-6 * error).clamp_min(1e-30)


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
    (q, q_error), (k, k_error) = _query_key_probes(block, prefix, about, probes.into)
    k, k_error = (x.repeat_interleave(share, dim=0) for x in (k, k_error))
    offsets = OFFSETS if about.rotary else OFFSETS[:1]
    # Each offset has its own third of the queries, so that the sketch stays as small.
    chunks = q.chunk(len(offsets), 1)
    parts = [turned(c, about, o) for c, o in zip(chunks, offsets, strict=True)]
    QK = (torch.cat(parts, 1) @ k.mT).flatten(1)
    QK_noise = _product_noise((q, q_error), (k.mT, k_error), QK)
    del q, k, parts
    W_V, W_O = block.reader(f"{prefix}W_V")[0], block.writer(f"{prefix}W_O")
    v = _read(probes.into, W_V, None).repeat_interleave(share, dim=0)
    v_error = _read_error(probes.into, W_V, None).repeat_interleave(share, dim=0)
    o = (W_O.value.flatten(0, 1) @ probes.out.mT).reshape(len(v), -1, len(probes.out))
    VO = (v @ o).flatten(1)
    o_error = W_O.error * probes.out.square().sum() / probes.out.shape[1]
    return HeadSketch(QK, VO, (QK_noise, _product_noise((v, v_error), (o, o_error), VO)))


def _product_noise(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], product: Tensor
) -> Tensor:
    """Expected square of the relative rounding error of ``x y``, for every head.

    Args:
        left: x ``[h, n, d]`` and its squared errors ``[h, d]``.
        right: y ``[h, d, n]`` and its squared errors ``[h, d]``.
        product: ``[h, n · n]``.
    """
    (x, x_error), (y, y_error) = left, right
    error = x_error * y.square().sum(-1) + x.square().sum(-2) * y_error
    return _relative(error.sum(-1), product.square().sum(-1))


def _neurons(block: ReducedBlock, probes: Probes) -> NeuronSketch:
    def read(tensor: str) -> tuple[Tensor, Tensor]:
        weight, bias = block.reader(tensor)
        values = _read(probes.into, weight, bias).mT
        return values, _relative(
            _read_error(probes.into, weight, bias), values.square().sum(-1)
        )

    W_B = block.writer("W_B")
    write = W_B.value @ probes.out.mT
    error = W_B.error * probes.out.square().sum() / probes.out.shape[1]
    write_noise = _relative(error, write.square().sum(-1))
    first, first_noise = read("W_A")
    if not block.about.mlp.gated:
        return NeuronSketch(first, None, write, (first_noise, write_noise))
    gate, gate_noise = read("W_G")
    return NeuronSketch(gate, first, write, (gate_noise, write_noise + first_noise))
