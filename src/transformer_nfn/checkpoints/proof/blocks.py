"""Element that takes one block to another, with every tensor of both checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.pieces import Piece, filled
from transformer_nfn.checkpoints.proof.attention import AttentionElement, match_attention
from transformer_nfn.checkpoints.proof.checks import BlockChecks, Check, Squares, has_duplicate
from transformer_nfn.checkpoints.reduced import ReducedBlock
from transformer_nfn.checkpoints.sketches import (
    BlockSketch,
    NeuronSketch,
    Probes,
    sketch_neurons,
)
from transformer_nfn.checkpoints.stream import BlockStreams
from transformer_nfn.checkpoints.symmetries import NeuronScale, Site, StreamMap
from transformer_nfn.checkpoints.symmetries.neurons import neuron_scales
from transformer_nfn.spaces.actions.permutation import assign, match_rows

FAINT = 1e-3
"""Neurons quieter than this share of the mean do not determine their scale: rounding may have
taken all of what they read or write."""


@dataclass(frozen=True)
class BlockElement:
    """Element that takes one block to another.

    Attributes:
        attentions: by the prefix of their tensors.
        neurons: neuron of A that each neuron of B is, ``[f]``; of a mixture ``[experts, f]``.
        scales: of what neurons read against what they write, as ``neurons``; None where none acts.
        streams: maps of what the block reads and writes.
        experts: expert of A that each expert of B is, ``[experts]``; None without a mixture.
    """

    attentions: Mapping[str, AttentionElement]
    neurons: Tensor
    scales: Tensor | None
    streams: BlockStreams
    experts: Tensor | None = None


def match_block(
    a: ReducedBlock,
    b: ReducedBlock,
    streams: BlockStreams,
    sketches: tuple[BlockSketch, BlockSketch],
    order: Tensor | None,
) -> tuple[BlockElement, list[Check]]:
    """Fit the element that takes block ``a`` to ``b``, and check every tensor under it.

    Args:
        a: a block of one model. b: of the other, of the same description.
        streams: take the first block's streams to the second's.
        sketches: of both blocks in one basis, by which heads and neurons are matched.
        order: of heads, where blocks share a position bias and so their order.
    """
    block = BlockChecks(a, b, streams)
    attentions = {}
    for prefix, config in a.attentions():
        shared = None if prefix else order
        heads = (sketches[0].heads[prefix], sketches[1].heads[prefix])
        attentions[prefix] = match_attention(block, prefix, config, heads, shared)
        biases = a.output_bias(prefix), b.output_bias(prefix)
        block.vector(f"{prefix}b_O", streams.middle, *biases)
    neurons, scales, experts = _match_mlp(block, (sketches[0].neurons, sketches[1].neurons))
    block.vector("b_B", streams.after, a.mlp_bias(), b.mlp_bias())
    others = b.norms()
    for name, piece in a.norms().items():
        gain = name.endswith(".g")
        block.vector(name, streams.after, piece, others.get(name), gain=gain)
    return BlockElement(attentions, neurons, scales, streams, experts), block.checks


def match_classifier(
    a: ReducedBlock, b: ReducedBlock, stream: StreamMap, drawn: Probes
) -> tuple[BlockElement, list[Check]]:
    """Fit the element that takes one classifier to another, and check its tensors.

    Args:
        a: the MLP after the last block of one model. b: of the other.
        stream: takes the first final stream to the second.
        drawn: probes by which neurons are matched.
    """
    fixed = StreamMap()
    block = BlockChecks(a, b, BlockStreams(stream, stream, fixed))
    classes = torch.eye(a.writer("W_B").value.shape[1], dtype=torch.float64)
    probes = Probes(drawn.into, classes), Probes(stream(drawn.into), classes)
    sketches = sketch_neurons(a, probes[0]), sketch_neurons(b, probes[1])
    neurons, scales = _match_neurons(block, sketches, ("", ""))
    block.vector("b_B", fixed, a.mlp_bias(), b.mlp_bias())
    return BlockElement({}, neurons, scales, block.streams), block.checks


def _match_mlp(
    block: BlockChecks, sketches: tuple[NeuronSketch, NeuronSketch]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Order and scales of the neurons, and the order of the experts of a mixture."""
    mlp = block.a.description.mlp
    if not mlp.experts:
        return *_match_neurons(block, sketches, ("", "")), None
    parts = [_by_expert(sketch, mlp.experts) for sketch in sketches]
    experts = _match_experts(block, parts)
    found = [
        _match_neurons(block, (parts[0][i], parts[1][j]), (mlp.prefixes[i], mlp.prefixes[j]))
        for j, i in enumerate(experts.tolist())
    ]
    scales = [s for _, s in found if s is not None]
    neurons = torch.stack([order for order, _ in found])
    return neurons, torch.stack(scales) if scales else None, experts


def _by_expert(sketch: NeuronSketch, experts: int) -> list[NeuronSketch]:
    def cut(x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(experts)

    ups = [None] * experts if sketch.up is None else cut(sketch.up)
    rows = (cut(sketch.read), ups, cut(sketch.write), *map(cut, sketch.noise))
    return [NeuronSketch(r, u, w, (e, f)) for r, u, w, e, f in zip(*rows, strict=True)]


def _match_experts(block: BlockChecks, sketches: list[list[NeuronSketch]]) -> Tensor:
    """Order of the experts, with the router checked.

    What the neurons of an expert read together tells experts apart, and where these are copies
    of each other (an upcycled model) the router does.
    """
    (R, p), (S, q) = block.a.router(), block.b.router()
    routers = Piece(block.streams.middle.columns(R.value).mT, R.error), Piece(S.value.mT, S.error)
    sums = [torch.stack([n.read.double().sum(0) for n in side]) for side in sketches]
    similarity = torch.zeros(len(sums[0]), len(sums[0]), dtype=torch.float64)
    for x, y in ((routers[0].value, routers[1].value), sums):
        x, y = (z / z.norm(dim=1, keepdim=True).clamp_min(1e-300) for z in (x, y))
        similarity += (y @ x.mT).double()
    order = assign(similarity)
    block.add("router", Squares.between(routers[0][order], routers[1], 1), len(R.value))
    _check_bias(block, "router bias", (p, q), order, torch.ones(len(order), dtype=R.value.dtype))
    return order


def _match_neurons(
    block: BlockChecks, sketches: tuple[NeuronSketch, NeuronSketch], prefixes: tuple[str, str]
) -> tuple[Tensor, Tensor | None]:
    """Order and scales of the neurons, with every tensor of the MLP checked.

    Args:
        block: both blocks, and the checks so far.
        sketches: of the neurons of both.
        prefixes: of the tensors in both; of A an expert, of B the one that it is matched with.
    """
    mlp = block.a.description.mlp
    sides = tuple(zip((block.a, block.b), prefixes, strict=True))
    named = prefixes[0]
    allowed = neuron_scales(mlp)
    scaled = allowed is not None
    features = [neuron_features(s, gated=mlp.gated, scaled=scaled) for s in sketches]
    order = match_rows(features[1], features[0]).index
    (W_A, b_A), (V_A, c_A) = (side.reader(f"{p}W_A") for side, p in sides)
    W_B, V_B = (side.writer(f"{p}W_B") for side, p in sides)
    read = Piece(block.streams.middle.columns(W_A.value)[:, order], W_A.error[order])
    write = Piece(block.streams.after(W_B.value[order]), W_B.error[order])
    width = len(read.value)
    scales: Tensor | None = None
    s = torch.ones(len(order), dtype=read.value.dtype)
    if scaled:
        site = Site(block.a.network.description, {}, allowed)
        for _ in range(2):  # with the errors that the first fit implies
            a, b = {"W_A": read.value, "W_B": write.value}, {"W_A": V_A.value, "W_B": V_B.value}
            noise = {
                "W_A": s.square() * read.error + V_A.error,
                "W_B": write.error + s.square() * V_B.error,
            }
            if b_A is not None and c_A is not None:  # counted by its own error
                error = s.square() * b_A.error[order] + c_A.error
                factor = (noise["W_A"] / (width * error).clamp_min(1e-300)).sqrt()
                a["b_A"], b["b_A"] = factor * b_A.value[order], factor * c_A.value
            s = NeuronScale().fit(site, a, b, noise)
        scales = s
        _check_scales(block, named, (read, V_A), (write, V_B), s)
    size = V_A.value.square().sum(0)
    # The input of a neuron matters if it has an output, and the output if it has an input.
    unique = ~has_duplicate(sketches[1].read)
    used = torch.where(unique & (V_B.value.square().sum(1) > V_B.error), torch.inf, 0.0)
    squares = Squares.between(Piece(read.value * s, s.square() * read.error), V_A, 0)
    block.add(f"{named}W_A", squares, width, observable=used)
    inputs = size if c_A is None else size + c_A.value.square()
    used = torch.where(unique & (inputs > V_A.error), torch.inf, 0.0)
    squares = Squares.between(Piece(s.unsqueeze(-1) * V_B.value, s.square() * V_B.error), write, 1)
    block.add(f"{named}W_B", squares, width, observable=used)
    _check_bias(block, f"{named}b_A", (b_A, c_A), order, s)
    if mlp.gated:
        (W_G, b_G), (V_G, c_G) = (side.reader(f"{p}W_G") for side, p in sides)
        gate = Piece(block.streams.middle.columns(W_G.value)[:, order], W_G.error[order])
        block.add(f"{named}W_G", Squares.between(gate, V_G, 0), width)
        _check_bias(block, f"{named}b_G", (b_G, c_G), order, torch.ones_like(s))
    return order, scales


def _check_scales(
    block: BlockChecks,
    named: str,
    read: tuple[Piece, Piece],
    write: tuple[Piece, Piece],
    s: Tensor,
) -> None:
    """Check that ``W_A`` and ``W_B`` determine the same scale of each neuron that is not dead."""
    (u, V_A), (w, V_B) = read, write
    size_u, size_w = u.value.square().sum(0), V_B.value.square().sum(1)
    alive = size_u * size_w > FAINT**2 * (size_u * size_w).mean()
    size_u, size_w = size_u.clamp_min(1e-100), size_w.clamp_min(1e-100)
    by_read = (u.value * V_A.value).sum(0) / size_u
    by_write = (w.value * V_B.value).sum(1) / size_w
    # Rounding moves large entries most, and a projection onto the neuron weighs them most again.
    weight_u = u.value.pow(4).sum(0) / size_u.square()
    weight_w = V_B.value.pow(4).sum(1) / size_w.square()
    error = (s.square() * u.error + V_A.error) * weight_u / size_u
    error += (w.error + s.square() * V_B.error) * weight_w / size_w
    squares = Squares((by_read - by_write).square()[alive], error[alive], s.square()[alive])
    block.add(f"{named}W_A·W_B", squares, 1)


def _check_bias(
    block: BlockChecks,
    name: str,
    biases: tuple[Piece | None, Piece | None],
    order: Tensor,
    s: Tensor,
) -> None:
    pair = filled(*biases)
    if pair is None:
        return
    a, b = pair
    moved = Piece(s * a.value[order], s.square() * a.error[order])
    block.add(name, Squares.between(moved, b, larger=True), 1)


def neuron_features(n: NeuronSketch, *, gated: bool, scaled: bool) -> Tensor:
    """Features of each neuron that do not depend on its scale, ``[f, …]``."""
    if gated:
        return n.read
    if scaled:
        pair = [x / x.norm(dim=1, keepdim=True).clamp_min(1e-30) for x in (n.read, n.write)]
        return torch.cat(pair, 1)
    sizes = [x.square().mean().sqrt().clamp_min(1e-30) for x in (n.read, n.write)]
    return torch.cat([n.read / sizes[0], n.write / sizes[1]], 1)
