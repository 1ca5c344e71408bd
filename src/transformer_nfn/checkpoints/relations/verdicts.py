"""Verdicts on two checkpoints from their scores, and the thresholds.

Thresholds were measured by ``benchmarks/relations.py`` on eight families of small language models
(GPT-2s and Llamas, D = 64, three blocks) that were really trained, the second model of each pair
disguised by every symmetry it has at condition 10:

======================================  =====  ==============  ==============
relation                                pairs  score           each block
======================================  =====  ==============  ==============
fine-tuned, averaged, pruned by half,
int8, int4, two fine-tunes of a third      56  0.943 to 1.000  0.924 to 1.000
retrained as long on other data             8  0.553 to 0.614  0.455 to 0.694
one block replaced: the others            110                  0.918 to 1.000
one block replaced: that block            110                  0.000 to 0.053
started from the other's embeddings         8  0.083 to 0.129  0.044 to 0.229
unrelated, trained on the same data       130  0.041 to 0.127  0.023 to 0.188
======================================  =====  ==============  ==============

Every one of these pairs gets the right verdict. The thresholds were set on the same pairs; no error
among 130 unrelated and 64 related pairs bounds the rates at about 2 % and 5 %. Trained four times
as long (one pair each), unrelated models had a block at 0.22, and a model retrained as long on
other data fell to 0.26 in its last block, *partly*: see ``docs/relations.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from transformer_nfn.checkpoints.reduced import INPUTS, Reduced
from transformer_nfn.checkpoints.sketches import Part, block_score
from transformer_nfn.checkpoints.stream import StreamFit, fit_stream
from transformer_nfn.notebook import bound
from transformer_nfn.symmetry.rounding import rounding_rms

Verdict = Literal[
    "same",
    "same backbone",
    "consistent with a disguise, not proved",
    "derived",
    "partly",
    "embeddings only",
    "unrelated",
    "different",
    "unclear",
]
CONSISTENT: Verdict = "consistent with a disguise, not proved"
"""Scores differ by no more than rounding explains. They do not see every tensor, nor any scale:
only a proof makes this *same*."""

RELATED = 0.35
"""Least score of a related block: midway between the lowest of a derived model (0.455) and the
highest of one that shared embeddings only (0.229)."""
UNRELATED = 0.28
"""Largest score of an unrelated block: a fifth above the highest one measured (0.229)."""
SHARED_EMBEDDINGS = 0.76
"""Least score of copied embeddings: unrelated models of the same data reach 0.701, embeddings that
a model started from, and trained further, stay above 0.817."""
UNRELATED_PAIRS, HIGHEST_UNRELATED = 130, 0.19
"""Unrelated pairs that were measured, and the highest score of a block among them."""
DERIVED_PAIRS, LOWEST_DERIVED = 64, 0.45
"""Derived pairs that were measured, and the lowest score of a block among them."""
FLOAT32 = 5e-5
"""Largest distance that arithmetic in float32, which scores are computed in, explains."""
EXPLAINED, EXPLAINED_HALF, EXPLAINED_QUANTISED = 64.0, 4.0, 2.0
"""Times the expected noise up to which rounding explains a distance; the others where a file is in
half precision or quantised, where there is less room between rounding and a change."""
READABLE = 0.8
"""Least score that rounding must leave of every part of an exact disguise for a block to be judged
by its score: below, its matrices have a condition that its dtype does not carry."""
FEWEST = 4
"""Fewest directions of the stream that tables must determine for scores to be meaningful."""


@dataclass(frozen=True)
class Judgement:
    """A verdict, its reason, and the blocks of A it rests on."""

    verdict: Verdict
    reason: str
    blocks: tuple[str, ...] = ()


def judge(
    A: Reduced,
    B: Reduced,
    fit: StreamFit,
    blocks: Mapping[str, Mapping[str, Part]],
    constants: Sequence[tuple[float, float]],
    matrix: Tensor,
) -> Judgement:
    """The verdict on two models from the scores of their blocks."""
    span = fit.map.span
    if span is not None and span.shape[1] < FEWEST:
        return Judgement(
            "unclear",
            f"embeddings and outputs determine {span.shape[1]} of {len(span)} directions of the "
            "stream, too few to compare blocks by",
        )
    if A.blocks != B.blocks:
        return _judge_matrix(A, B, matrix)
    scores = {name: block_score(parts) for name, parts in blocks.items()}
    low, high = min(scores.values(), default=1.0), max(scores.values(), default=0.0)
    parts = [(p.distance, p.noise) for row in blocks.values() for p in row.values()]
    if low >= RELATED and _explained(A, B, fit, [*parts, *constants]):
        return Judgement(
            CONSISTENT,
            "every part that scores compare agrees up to what the rounding of the files explains; "
            "scores see neither every tensor nor any scale",
            tuple(scores),
        )
    # The lowest score that rounding leaves of a part of an exact disguise.
    ceilings = {n: min((p.ceiling for p in row.values()), default=1.0) for n, row in blocks.items()}
    unreadable = [name for name, ceiling in ceilings.items() if ceiling < READABLE]
    if unreadable:
        return Judgement(
            "unclear",
            f"in blocks {_listed(unreadable)} rounding leaves parts of even an exact disguise a "
            f"score of {min(ceilings.values()):.2g} only: their matrices have a condition that the "
            "dtype of the files does not carry",
        )
    related = tuple(name for name, score in scores.items() if score >= RELATED)
    if low >= RELATED:
        return Judgement(
            "derived",
            f"every block scores at least {bound(low)}; of {UNRELATED_PAIRS} pairs of strangers "
            f"trained on the same data none had a block above {HIGHEST_UNRELATED:.2f}",
            related,
        )
    if high <= UNRELATED:
        return _no_blocks(A, B, high)
    if related:
        others = [name for name in scores if name not in related]
        return Judgement(
            "partly",
            f"blocks {_listed(related)} agree (at least {RELATED}; strangers reach "
            f"{HIGHEST_UNRELATED:.2f}), blocks {_listed(others)} do not",
            related,
        )
    return Judgement(
        "unclear",
        f"scores between {UNRELATED} and {RELATED} belong to neither relatives nor strangers",
    )


def _judge_matrix(A: Reduced, B: Reduced, matrix: Tensor) -> Judgement:
    """The verdict on models of different depth, from the best partner of each block."""
    best = {
        name: (B.blocks[int(row.argmax())], float(row.max()))
        for name, row in zip(A.blocks, matrix, strict=True)
    }
    related = {name: partner for name, (partner, score) in best.items() if score >= RELATED}
    if related:
        pairs = ", ".join(f"{a} with {b}" for a, b in related.items())
        return Judgement("partly", f"the depths differ; blocks agree: {pairs}", tuple(related))
    high = max((score for _, score in best.values()), default=0.0)
    if high <= UNRELATED:
        return _no_blocks(A, B, high)
    most = bound(high, up=True)
    return Judgement("unclear", f"the depths differ, and no block scores above {most}")


def _no_blocks(A: Reduced, B: Reduced, high: float) -> Judgement:
    """The verdict on models without related blocks: their embeddings decide."""
    most = bound(high, up=True)
    names = [n for n in ("token", "patch", "projection") if n in A.names and n in B.names]
    # In the basis that is best for the embeddings, whatever the outputs are.
    scores = [
        a.score for n in names for a in fit_stream(A, B, only=(n,)).agreement.values()
    ]
    if scores and max(scores) >= SHARED_EMBEDDINGS:
        return Judgement(
            "embeddings only",
            f"no block scores above {most}, but embeddings agree to {bound(max(scores))} (those "
            "of strangers trained on the same data to 0.71 at most)",
        )
    return Judgement(
        "unrelated",
        f"no block scores above {most}; of {DERIVED_PAIRS} pairs of trained relatives none had a "
        f"block below {LOWEST_DERIVED:.2f}",
    )


def _listed(names: Sequence[str]) -> str:
    """``0, 1, 4``; long lists shortened."""
    shown = list(names) if len(names) <= 12 else [*names[:10], "…", names[-1]]
    return ", ".join(shown)


def _explained(
    A: Reduced, B: Reduced, fit: StreamFit, measured: Sequence[tuple[float, float]]
) -> bool:
    """Whether rounding explains every distance of blocks (measured, with its noise) and embeddings.

    Outputs do not count: models that differ there may share all the rest.
    """
    if shapes(A) != shapes(B):
        return False
    embeddings = [n for n in INPUTS if n in A.names or n in B.names]
    if any((n in A.names) != (n in B.names) for n in embeddings):
        return False
    if any(A.table_rows(n) != B.table_rows(n) for n in embeddings):
        return False
    tables = [(a.distance, a.noise) for n, a in fit.agreement.items() if n in embeddings]
    return all(is_rounding(A, B, distance, noise) for distance, noise in (*measured, *tables))


def is_rounding(A: Reduced, B: Reduced, distance: float, noise: float) -> bool:
    """Whether rounding explains a distance."""
    unit, times = max(A.unit, B.unit), EXPLAINED
    if unit > rounding_rms(torch.bfloat16) ** 2:
        times = EXPLAINED_QUANTISED
    elif unit >= rounding_rms(torch.float16) ** 2:
        times = EXPLAINED_HALF
    return distance <= max(FLOAT32, times * noise)


def shapes(model: Reduced) -> tuple[object, ...]:
    """Width of the stream, and numbers of heads and neurons of every block."""
    blocks = model.description.blocks.values()
    units = ((b.attention.heads, b.attention.groups, b.mlp.neurons, b.mlp.experts) for b in blocks)
    return model.description.width, *units
