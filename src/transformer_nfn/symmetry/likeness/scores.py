"""How alike are two blocks? Heads and neurons are matched on one half and scored on the other.

Whatever is matched on is alike by selection: among thousands of strangers' neurons the nearest
one always looks near. So heads are matched on QK and scored on VO, and the reverse; neurons are
matched on what they read and scored on what they write, and the reverse. A score is the mean
cosine of matched pairs, 0 for strangers, 1 for a disguise. Who found no partner counts as unlike:
of two models that learnt the same text, a third of the neurons are each other's nearest, and those
few do resemble each other in the first block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.symmetry.likeness.probes import BlockSketch

NEURONS = 1024
"""Neurons of a block that are looked for in the other, evenly spread; all where there are fewer.
A mean over a thousand cosines is known to 0.002."""


@dataclass(frozen=True)
class Part:
    """How alike one part of two blocks is.

    Attributes:
        score: mean cosine of pairs matched on the other half, at least 0; 0 for what has no pair.
        distance: root mean square relative distance of those pairs; infinite where too few
            neurons found a partner to speak of all of them.
    """

    score: float
    distance: float


@dataclass(frozen=True)
class Directions:
    """A block's sketch as unit vectors, which is all that cosines need.

    Attributes:
        heads: QK (without what all queries have in common), VO, and QK as it is, ``[h, …]`` each.
        read: ``[f, n]``, centred over the probes, so that a common bias makes nobody alike.
        plain: the same as they are.
        written: ``[f, n]`` each: what neurons write, and the other factor of gated ones, whose
            signs only cancel together.
    """

    heads: Mapping[str, tuple[Tensor, Tensor, Tensor]]
    read: Tensor
    plain: Tensor
    written: tuple[Tensor, ...]


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
        on_VO, on_QK = compare_heads(a.heads[prefix], b.heads[prefix])
        parts |= {f"{word}QK": on_QK, f"{word}VO": on_VO}
    if len(a.written) == len(b.written):
        parts |= compare_neurons(a, b, neurons)
    order = ("QK", "VO", "cross QK", "cross VO", "read", "write")
    return {name: parts[name] for name in order if name in parts}


def block_score(parts: Mapping[str, Part]) -> float:
    """The mean of a block's parts."""
    return sum(p.score for p in parts.values()) / max(len(parts), 1)


def compare_heads(
    a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]
) -> tuple[Part, Part]:
    """VO of heads matched on QK, and QK of heads matched on VO; distances of QK as it is."""
    QK, VO, plain = zip(a, b, strict=True)
    by_QK, by_VO = (_assigned(x @ y.mT) for x, y in (QK, VO))
    on_QK = Part(_part(*QK, *by_VO).score, _part(*plain, *by_VO).distance)
    return _part(*VO, *by_QK), on_QK


def compare_neurons(a: Directions, b: Directions, most: int) -> dict[str, Part]:
    """What neurons write that read alike, and what they read that write alike.

    For gated neurons ``write`` is what scale and sign cannot change: cos(up)·cos(down).
    """
    sample = torch.linspace(0, len(a.read) - 1, min(most, len(a.read))).long()
    read = [(a.read, b.read)]
    written = list(zip(a.written, b.written, strict=True))
    by_read, by_write = _mutual(read, sample), _mutual(written, sample)
    return {
        "read": _product_part([(a.plain, b.plain)], by_write, len(sample), centred=read),
        "write": _product_part(written, by_read, len(sample)),
    }


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


def _part(a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Part:
    """Of unit vectors, those matched. Heads left without a partner count as unlike."""
    cosines = (a[i] * b[j]).sum(-1)
    away = (a[i] - b[j]).square().sum(-1).double()
    most = max(len(a), len(b))
    score = max(float(cosines.sum()) / most, 0.0)
    return Part(score, float(away.mean().sqrt()) if len(i) == most else float("inf"))


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


def _product_part(
    factors: list[tuple[Tensor, Tensor]],
    matched: tuple[Tensor, Tensor],
    asked: int,
    centred: list[tuple[Tensor, Tensor]] | None = None,
) -> Part:
    """Product of cosines of matched neurons, mean over all that were asked for; their distance,
    up to signs that cancel."""
    i, j = matched
    if len(i) == 0:
        return Part(0.0, float("inf"))
    cosines, away = None, torch.zeros(len(i), dtype=torch.float64)
    for a, b in centred or factors:
        own = (a[i] * b[j]).sum(-1)
        cosines = own if cosines is None else cosines * own
    for a, b in factors:
        signs = torch.where((a[i] * b[j]).sum(-1, keepdim=True) < 0, -1.0, 1.0)
        if len(factors) == 1:
            signs = torch.ones_like(signs)
        away += (a[i] * signs - b[j]).square().sum(-1).double()
    assert cosines is not None
    told = len(i) >= 0.99 * asked
    distance = float(away.mean().sqrt()) if told else float("inf")
    return Part(max(float(cosines.sum()) / asked, 0.0), distance)
