"""Scores of two blocks: heads and neurons are matched on one half and scored on the other.

Whatever is matched on is alike by selection: among thousands of strangers' neurons the nearest
one always looks near. So heads are matched on QK and scored on VO, and the reverse; neurons are
matched on what they read and scored on what they write, and the reverse. A score is the mean
cosine of matched pairs, 0 for strangers, 1 for a disguise. Unmatched units score zero: of two
models that learnt the same text, a third of the neurons are each other's nearest, and those few do
resemble each other in the first block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.scores.probes import BlockSketch

NEURONS = 1024
"""Neurons of a block that are looked for in the other, evenly spread; all where there are fewer.
A mean over a thousand cosines is known to 0.002."""


@dataclass(frozen=True)
class Part:
    """Agreement of one part of two blocks.

    Attributes:
        score: mean cosine of pairs matched on the other half, at least 0; 0 for what has no pair.
        distance: root mean square relative distance of those pairs, in direction; infinite where
            the numbers of heads differ.
        noise: the same distance as the rounding of both files alone is expected to cause it.
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
        read: ``[f, n]``, centred over the probes, so that a common bias makes nobody alike.
        plain: the same as they are.
        written: ``[f, n]`` each: what neurons write, and the other factor of gated ones, whose
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
    """The directions of a sketch."""
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


def compare_blocks(a: Directions, b: Directions, neurons: int = NEURONS) -> dict[str, Part]:
    """Every part that both blocks have: ``QK, VO, read, write``, of cross-attention ``cross QK``.

    Args:
        a: a block of one model, in the probes' coordinates.
        b: a block of the other.
        neurons: of the first block to look for in the second.
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
    """The mean of a block's parts."""
    return sum(p.score for p in parts.values()) / max(len(parts), 1)


def _compare_heads(a: Directions, b: Directions, prefix: str) -> tuple[Part, Part]:
    """QK of heads matched on VO, and VO of heads matched on QK; distances of QK as it is."""
    QK, VO, plain = zip(a.heads[prefix], b.heads[prefix], strict=True)
    noise = list(zip(a.head_noise[prefix], b.head_noise[prefix], strict=True))
    by_QK, by_VO = (_assigned(x @ y.mT) for x, y in (QK, VO))
    most = max(len(x) for x in QK)
    parts = []
    for scored, measured, (i, j), errors in (
        (QK, plain, by_VO, noise[0]),
        (VO, VO, by_QK, noise[1]),
    ):
        cosines = (scored[0][i] * scored[1][j]).sum(-1)
        away = (measured[0][i] - measured[1][j]).square().sum(-1)
        if len(i) < most:
            away = torch.full_like(away, torch.inf)
        parts.append(_part(cosines, away, errors[0][i] + errors[1][j], most))
    return parts[0], parts[1]


def _part(cosines: Tensor, away: Tensor, noise: Tensor, units: int) -> Part:
    """A part from the cosines, squared distances and squared noise of its matched pairs."""
    if len(cosines) == 0:
        return Part(0.0, 0.0, 0.0, 1.0)
    score = max(float(cosines.sum()) / units, 0.0)
    distance, expected = (float(x.double().mean().sqrt()) for x in (away, noise))
    return Part(score, distance, expected, float((1 + noise).rsqrt().mean()))


def _compare_neurons(a: Directions, b: Directions, most: int) -> dict[str, Part]:
    """What neurons write that read alike, and what they read that write alike.

    For gated neurons ``write`` is what scale and sign cannot change: cos(up)·cos(down).
    """
    sample = torch.linspace(0, len(a.read) - 1, min(most, len(a.read))).long()
    read = [(a.read, b.read)]
    written = list(zip(a.written, b.written, strict=True))
    parts = {}
    for name, scored, measured, (i, j), which in (
        ("read", read, [(a.plain, b.plain)], _mutual(written, sample), 0),
        ("write", written, written, _mutual(read, sample), 1),
    ):
        noise = a.neuron_noise[which][i] + b.neuron_noise[which][j]
        parts[name] = _part(
            _matched_cosines(scored, i, j), _matched_distances(measured, i, j), noise, len(sample)
        )
    return parts


def _centred(QK: Tensor) -> Tensor:
    """Scores ``[h, n · n]`` less their mean over the queries: a query bias makes nobody alike.

    In the first block strangers that learnt the same text have much the same one.
    """
    n = math.isqrt(QK.shape[1])
    by_query = QK.reshape(len(QK), n, n)
    return (by_query - by_query.mean(1, keepdim=True)).flatten(1)


def _unit(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(1e-30)


def _assigned(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """The best one-to-one matching, ``a[i]`` with ``b[j]``."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    i, j = linear_sum_assignment(-cosines.cpu().numpy())
    return torch.as_tensor(i), torch.as_tensor(j)


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
