"""Sketches of blocks, and the scores of two blocks from them.

Sketches. Gaussian vectors z of the stream, brought to each model's own coordinates, are read by
queries, keys, values and neurons, and further ones y read what is written. Heads then have the
numbers `q(z)·k(z′)` (under rotary positions at several distances) and `z V O y`, neurons what they
read and what they write. None of this depends on a basis of a head, and no product is formed.

Scores. Heads and neurons are matched on one half and scored on the other: among thousands of
unrelated neurons the nearest one always looks near. So heads are matched on QK and scored on VO,
and the reverse; neurons are matched on what they read and scored on what they write, and the
reverse. A score is the mean cosine of matched pairs, 0 for unrelated models, 1 for a disguise.
Unmatched units score zero: of two models trained on the same text, a third of the neurons are each
other's nearest, and those few do resemble each other in the first block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.pieces import Piece
from transformer_nfn.checkpoints.reduced import ReducedBlock
from transformer_nfn.functional.blocks import rotate
from transformer_nfn.functional.description import Attention
from transformer_nfn.spaces.actions.permutation import assign_pairs
from transformer_nfn.symmetry.sources import directions

PROBES = 256
OFFSETS = (0, 3, 40)
"""Distances between query and key at which rotary attention is evaluated."""
NEURONS = 1024
"""Neurons of a block that are matched with the other, evenly spread; all where there are fewer.
A mean over a thousand cosines is known to 0.002."""
FEWER_PROBES, FEWER_NEURONS = 64, 128
"""The same where all pairs of blocks are scored, and all sketches are in memory at once."""


@dataclass(frozen=True)
class Probes:
    """Random vectors of a stream: ``into [n, D]`` are read, ``out [n, D]`` read what is written.

    ``memory [n, D]`` are read in the stream of an encoder, where that is another.
    """

    into: Tensor
    out: Tensor
    memory: Tensor | None = None


def draw_probes(width: int, *, centred: bool, dtype: torch.dtype) -> Probes:
    """Fixed probes, the same on every machine; without a mean where the model ignores it."""
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
        VO: ``[h, …]`` outputs, read by the probes.
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
        read: ``[f, n]`` input of each neuron on the probes (of the gate, where it is gated).
        up: ``[f, n]`` the other factor of gated neurons, or None.
        write: ``[f, n]`` output of each neuron, read by the probes.
        noise: ``[f]`` each, of ``read`` and of ``write`` (with ``up``): expected squares of the
            relative rounding error.
    """

    read: Tensor
    up: Tensor | None
    write: Tensor
    noise: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockSketch:
    """Sketch of one block.

    Attributes:
        heads: attentions by the prefix of their tensors.
        neurons: the MLP.
        constants: what is added to the stream for any input, read by the probes.
        constants_error: expected square of their rounding error.
    """

    heads: Mapping[str, HeadSketch]
    neurons: NeuronSketch
    constants: Tensor
    constants_error: float


def sketch_block(
    block: ReducedBlock, probes: Probes, mlp_probes: Probes | None = None
) -> BlockSketch:
    """Sketch a block with probes in the model's own coordinates.

    Args:
        block: of a reduced form.
        probes: of its stream.
        mlp_probes: of the streams that its MLP reads and writes, where those are others.
    """
    attentions = block.attentions()
    inner = probes if mlp_probes is None else mlp_probes
    biases = [block.output_bias(prefix) for prefix, _ in attentions]
    constants = [c for c in (*biases, block.mlp_bias()) if c is not None]
    outs = [*(probes.out for bias in biases if bias is not None), inner.out]
    written = [out @ c.value for out, c in zip(outs, constants, strict=False)]
    error = sum(float(c.error.sum()) for c in constants) * float(probes.out.square().mean())
    return BlockSketch(
        {prefix: _heads(block, prefix, attention, probes) for prefix, attention in attentions},
        sketch_neurons(block, inner),
        torch.cat([probes.out.new_zeros(0), *written]),
        error * len(probes.out),
    )


def turned(q: Tensor, attention: Attention, offset: int) -> Tensor:
    """Queries ``[..., d]`` rotated as for a key ``offset`` tokens away."""
    if attention.rotary == 0 or offset == 0:
        return q
    return rotate(q, attention.frequencies().to(q), positions=q.new_tensor([offset]))


def read_heads(vectors: Tensor, W: Tensor) -> Tensor:
    """``[n, D]`` read by every head, ``W [h, D, d] → [h, n, d]``.

    One product for all heads: a batch of narrow ones takes several times as long.
    """
    flat = vectors @ W.movedim(0, 1).flatten(1)
    return flat.reshape(len(vectors), len(W), -1).movedim(1, 0)


def _read(probes: Tensor, weight: Piece, bias: Piece | None) -> Tensor:
    """``z W + b``; for every head ``[h, n, d]``."""
    W = weight.value
    out = probes @ W if W.ndim == 2 else read_heads(probes, W)
    return out if bias is None else out + bias.value.unsqueeze(-2)


def _read_error(probes: Tensor, weight: Piece, bias: Piece | None) -> Tensor:
    """Expected squares of the rounding error of `_read`, summed over the probes."""
    error = weight.error * probes.square().mean()
    return len(probes) * (error if bias is None else error + bias.error)


def _relative(error: Tensor, size: Tensor) -> Tensor:
    """``error / size``; 0 where there is no error, at most 1e6 where there is nothing else."""
    return error / torch.maximum(size, 1e-6 * error).clamp_min(1e-30)


def _heads(block: ReducedBlock, prefix: str, attention: Attention, probes: Probes) -> HeadSketch:
    share = attention.heads // attention.groups
    memory = probes.memory if prefix and probes.memory is not None else probes.into
    (q, q_error), (k, k_error) = _query_key(block, prefix, attention, (probes.into, memory))
    k, k_error = (x.repeat_interleave(share, dim=0) for x in (k, k_error))
    offsets = OFFSETS if attention.rotary else OFFSETS[:1]
    # Each offset has its own third of the queries, so that the sketch stays as small.
    chunks = q.chunk(len(offsets), 1)
    parts = [turned(c, attention, o) for c, o in zip(chunks, offsets, strict=True)]
    QK = (torch.cat(parts, 1) @ k.mT).flatten(1)
    QK_noise = _product_noise((q, q_error), (k.mT, k_error), QK)
    del q, k, parts
    W_V, W_O = block.reader(f"{prefix}W_V")[0], block.writer(f"{prefix}W_O")
    v = _read(memory, W_V, None).repeat_interleave(share, dim=0)
    v_error = _read_error(memory, W_V, None).repeat_interleave(share, dim=0)
    o = (W_O.value.flatten(0, 1) @ probes.out.mT).reshape(len(v), -1, len(probes.out))
    VO = (v @ o).flatten(1)
    o_error = W_O.error * probes.out.square().sum() / probes.out.shape[1]
    return HeadSketch(QK, VO, (QK_noise, _product_noise((v, v_error), (o, o_error), VO)))


def _query_key(
    block: ReducedBlock, prefix: str, attention: Attention, probes: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Queries ``[h, n, d]`` of the probes before positions rotate them, with their expected squared
    rounding errors ``[h, d]`` summed over the probes; and keys ``[g, n, d]`` likewise."""
    pieces = block.query_key(prefix)
    out = []
    for part, into in zip("QK", probes, strict=True):
        weight, bias = pieces[f"W_{part}"], pieces.get(f"b_{part}")
        z, error = _read(into, weight, bias), _read_error(into, weight, bias)
        if attention.qk_norm:
            gain = pieces[f"{part.lower()}_norm.g"]
            z, errors = normed_heads(z, error.unsqueeze(-2) / len(into), gain, attention)
            error = errors.sum(-2)
        out.append((z, error))
    return out[0], out[1]


def normed_heads(
    x: Tensor, error: Tensor, gain: Piece, attention: Attention
) -> tuple[Tensor, Tensor]:
    """Queries or keys ``[h, n, d]`` under their norm, with the expected squares of their errors."""
    axes = (0, -1) if attention.qk_norm == "all heads" else (-1,)
    size = (x.square().mean(axes, keepdim=True) + 1e-12).sqrt()
    value, value_error = (z.unsqueeze(-2) for z in (gain.value, gain.error))
    return x / size * value, error / size.square() * value.square() + value_error


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


def sketch_neurons(block: ReducedBlock, probes: Probes) -> NeuronSketch:
    """The neurons of an MLP, or of all experts one after the other."""
    experts = [_expert_neurons(block, prefix, probes) for prefix in block.description.mlp.prefixes]
    if len(experts) == 1:
        return experts[0]
    ups = [e.up for e in experts if e.up is not None]
    return NeuronSketch(
        torch.cat([e.read for e in experts]),
        torch.cat(ups) if ups else None,
        torch.cat([e.write for e in experts]),
        (torch.cat([e.noise[0] for e in experts]), torch.cat([e.noise[1] for e in experts])),
    )


def _expert_neurons(block: ReducedBlock, prefix: str, probes: Probes) -> NeuronSketch:
    def read(tensor: str) -> tuple[Tensor, Tensor]:
        weight, bias = block.reader(tensor)
        values = _read(probes.into, weight, bias).mT
        error = _read_error(probes.into, weight, bias)
        return values, _relative(error, values.square().sum(-1))

    W_B = block.writer(f"{prefix}W_B")
    write = W_B.value @ probes.out.mT
    error = W_B.error * probes.out.square().sum() / probes.out.shape[1]
    write_noise = _relative(error, write.square().sum(-1))
    first, first_noise = read(f"{prefix}W_A")
    if not block.description.mlp.gated:
        return NeuronSketch(first, None, write, (first_noise, write_noise))
    gate, gate_noise = read(f"{prefix}W_G")
    return NeuronSketch(gate, first, write, (gate_noise, write_noise + first_noise))


@dataclass(frozen=True)
class Part:
    """Agreement of one part of two blocks.

    Attributes:
        score: mean cosine of pairs matched on the other half, at least 0; unmatched units count 0.
        distance: root mean square relative distance of those pairs, in direction; infinite where
            the numbers of heads differ.
        noise: the distance that the rounding of both files alone is expected to cause.
        ceiling: the score that rounding is expected to leave of an exact disguise.
    """

    score: float
    distance: float
    noise: float
    ceiling: float


@dataclass(frozen=True)
class Directions:
    """A block's sketch as unit vectors, which is all that cosines need.

    Attributes:
        heads: QK (without what all queries have in common), VO, and QK as it is, ``[h, …]`` each.
        read: ``[f, n]``, centred over the probes, so that a common bias makes no neurons similar.
        plain: the same, not centred.
        written: ``[f, n]`` each: outputs of neurons, and the other factor of gated ones, whose
            signs only cancel together.
        head_noise: see `HeadSketch`.
        neuron_noise: see `NeuronSketch`.
    """

    heads: Mapping[str, tuple[Tensor, Tensor, Tensor]]
    read: Tensor
    plain: Tensor
    written: tuple[Tensor, ...]
    head_noise: Mapping[str, tuple[Tensor, Tensor]]
    neuron_noise: tuple[Tensor, Tensor]


def unit_directions(sketch: BlockSketch) -> Directions:
    """Normalise a sketch to unit vectors."""
    n = sketch.neurons
    return Directions(
        {
            prefix: (_unit(_centred(h.QK)), _unit(h.VO), _unit(h.QK))
            for prefix, h in sketch.heads.items()
        },
        _unit(n.read - n.read.mean(1, keepdim=True)),
        _unit(n.read),
        (_unit(n.write),) if n.up is None else (_unit(n.write), _unit(n.up)),
        {prefix: h.noise for prefix, h in sketch.heads.items()},
        n.noise,
    )


def thumbnail(sketch: BlockSketch) -> Directions:
    """Unit vectors of a sketch on `FEWER_PROBES`."""

    def fewer(x: Tensor) -> Tensor:
        # Every fourth probe of both sides, so that each distance of rotary positions occurs.
        step = PROBES // FEWER_PROBES
        return x.reshape(len(x), PROBES, PROBES)[:, ::step, ::step].flatten(1)

    heads = {
        prefix: HeadSketch(fewer(head.QK), fewer(head.VO), head.noise)
        for prefix, head in sketch.heads.items()
    }
    n = sketch.neurons
    up = None if n.up is None else n.up[:, :FEWER_PROBES]
    neurons = NeuronSketch(n.read[:, :FEWER_PROBES], up, n.write[:, :FEWER_PROBES], n.noise)
    return unit_directions(replace(sketch, heads=heads, neurons=neurons))


def block_matrix(A: Sequence[Directions], B: Sequence[Directions]) -> Tensor:
    """Scores of all blocks of A against all of B, ``[a, b]``, from their thumbnails."""
    rows = [[block_score(compare_blocks(a, b, FEWER_NEURONS)) for b in B] for a in A]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(A), len(B))


def compare_blocks(a: Directions, b: Directions, neurons: int = NEURONS) -> dict[str, Part]:
    """Every part that both blocks have: ``QK, VO, read, write``, of cross-attention ``cross QK``.

    Args:
        a: a block of one model, in the probes' coordinates.
        b: a block of the other.
        neurons: number of neurons of the first block to match with the second.
    """
    parts: dict[str, Part] = {}
    for prefix in a.heads.keys() & b.heads.keys():
        word = prefix.replace(".", " ")
        on_QK, on_VO = _compare_heads(a, b, prefix)
        parts |= {f"{word}QK": on_QK, f"{word}VO": on_VO}
    if len(a.written) == len(b.written):
        parts |= _compare_neurons(a, b, neurons)
    order = ("QK", "VO", "cross QK", "cross VO", "read", "write")
    return {name: parts[name] for name in order if name in parts}


def block_score(parts: Mapping[str, Part]) -> float:
    """The mean score of a block's parts.

    >>> block_score({"QK": Part(1.0, 0.0, 0.0, 1.0), "VO": Part(0.5, 0.7, 0.0, 1.0)})
    0.75
    """
    return sum(p.score for p in parts.values()) / max(len(parts), 1)


def _compare_heads(a: Directions, b: Directions, prefix: str) -> tuple[Part, Part]:
    """QK of heads matched on VO, and VO of heads matched on QK; distances of QK not centred."""
    QK, VO, plain = zip(a.heads[prefix], b.heads[prefix], strict=True)
    noise = list(zip(a.head_noise[prefix], b.head_noise[prefix], strict=True))
    by_QK, by_VO = (assign_pairs(x @ y.mT) for x, y in (QK, VO))
    counts = [len(x) for x in QK]
    parts = []
    for scored, measured, (i, j), errors in (
        (QK, plain, by_VO, noise[0]),
        (VO, VO, by_QK, noise[1]),
    ):
        cosines = (scored[0][i] * scored[1][j]).sum(-1)
        squares = (measured[0][i] - measured[1][j]).square().sum(-1)
        if counts[0] != counts[1]:
            squares = torch.full_like(squares, torch.inf)
        parts.append(_part(cosines, squares, errors[0][i] + errors[1][j], min(counts)))
    return parts[0], parts[1]


def _compare_neurons(a: Directions, b: Directions, most: int) -> dict[str, Part]:
    """Outputs of neurons matched on inputs, and inputs of neurons matched on outputs.

    For gated neurons ``write`` is what scale and sign cannot change: cos(up)·cos(down).
    """
    if len(b.read) < len(a.read):  # of a cut model, how many of its neurons the other has
        a, b = b, a
    sample = torch.linspace(0, len(a.read) - 1, min(most, len(a.read))).long()
    read = [(a.read, b.read)]
    written = list(zip(a.written, b.written, strict=True))
    parts = {}
    for name, scored, measured, (i, j), which in (
        ("read", read, [(a.plain, b.plain)], _mutual(written, sample), 0),
        ("write", written, written, _mutual(read, sample), 1),
    ):
        noise = a.neuron_noise[which][i] + b.neuron_noise[which][j]
        cosines, squares = _matched_cosines(scored, i, j), _matched_distances(measured, i, j)
        parts[name] = _part(cosines, squares, noise, len(sample))
    return parts


def _part(cosines: Tensor, squares: Tensor, noise: Tensor, units: int) -> Part:
    """A part from the cosines, squared distances and squared noise of its matched pairs."""
    if len(cosines) == 0:
        return Part(0.0, 0.0, 0.0, 1.0)
    score = max(float(cosines.sum()) / units, 0.0)
    distance, expected = (float(x.double().mean().sqrt()) for x in (squares, noise))
    return Part(score, distance, expected, float((1 + noise).rsqrt().mean()))


def _centred(QK: Tensor) -> Tensor:
    """Scores ``[h, n · n]`` less their mean over the queries: a query bias makes no heads similar.

    In the first block unrelated models trained on the same text have much the same one.
    """
    n = math.isqrt(QK.shape[1])
    by_query = QK.reshape(len(QK), n, n)
    return (by_query - by_query.mean(1, keepdim=True)).flatten(1)


def _unit(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(1e-30)


def _cosines(factors: list[tuple[Tensor, Tensor]], rows: Tensor, *, back: bool = False) -> Tensor:
    """Products of cosines of some rows of one side with all rows of the other."""
    here, there = (1, 0) if back else (0, 1)
    out = factors[0][here][rows] @ factors[0][there].mT
    for pair in factors[1:]:
        out *= pair[here][rows] @ pair[there].mT
    return out


def _mutual(factors: list[tuple[Tensor, Tensor]], sample: Tensor) -> tuple[Tensor, Tensor]:
    """Of a sample of the first side, the pairs that are each other's nearest."""
    near = [_cosines(factors, rows).argmax(1) for rows in sample.split(512)]
    partner = torch.cat(near)
    back = [_cosines(factors, rows, back=True).argmax(1) for rows in partner.split(512)]
    agree = torch.cat(back) == sample
    return sample[agree], partner[agree]


def _matched_cosines(factors: list[tuple[Tensor, Tensor]], i: Tensor, j: Tensor) -> Tensor:
    """Products of the cosines of matched neurons."""
    out = torch.ones(len(i))
    for a, b in factors:
        out = out * (a[i] * b[j]).sum(-1)
    return out


def _matched_distances(factors: list[tuple[Tensor, Tensor]], i: Tensor, j: Tensor) -> Tensor:
    """Squared distances of matched neurons, up to signs that cancel between two factors."""
    out = torch.zeros(len(i))
    for a, b in factors:
        signs = torch.ones(len(i), 1)
        if len(factors) > 1:
            signs = torch.where((a[i] * b[j]).sum(-1, keepdim=True) < 0, -1.0, 1.0)
        out = out + (a[i] * signs - b[j]).square().sum(-1)
    return out
