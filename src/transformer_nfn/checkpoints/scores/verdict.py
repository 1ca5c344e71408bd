"""Verdicts from the scores of two models: every threshold, and the numbers behind it.

Measured by ``benchmarks/relations.py`` on eight families of small language models (GPT-2s and
Llamas, D = 64, three blocks) that were really trained, the second model of each pair disguised by
every symmetry it has at condition 10. Thresholds hold for each block:

======================================  =====  ==============  ==============
relation                                pairs  score           each block
======================================  =====  ==============  ==============
fine-tuned, averaged, pruned by half,
int8, int4, two fine-tunes of a third      56  0.943 to 1.000  0.924 to 1.000
retrained as long on other data             8  0.553 to 0.614  0.455 to 0.694
one block replaced: the others            110                  0.918 to 1.000
one block replaced: that block            110                  0.000 to 0.053
started from the other's embeddings         8  0.083 to 0.129  0.044 to 0.229
strangers on the same data                130  0.041 to 0.127  0.023 to 0.188
======================================  =====  ==============  ==============

With the thresholds below every one of these pairs gets the right verdict. They were set on the
same pairs; no error among 130 strangers and 64 relatives bounds the rates at about 2 % and 5 %.
Trained four times as long (one pair each), strangers had a block at 0.22, and a model retrained as
long on other data fell to 0.26 in its last block, *partly*: see ``docs/relations.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal[
    "same",
    "same backbone",
    "consistent with a disguise, not proved",
    "derived",
    "partly",
    "embeddings only",
    "unrelated",
    "unclear",
]
CONSISTENT: Verdict = "consistent with a disguise, not proved"
"""Scores differ by no more than rounding explains. They do not see every tensor, nor any scale:
only a proof makes this *same*."""

RELATED = 0.35
"""A block that scores at least this has the other's weights behind it: midway between the lowest
of a derived model (0.455) and the highest of one that shared embeddings only (0.229)."""
STRANGE = 0.28
"""A block that scores at most this has not: a fifth above the highest such score (0.229)."""
SHARED_EMBEDDINGS = 0.76
"""Embeddings that agree so well were taken over: strangers trained on the same data reach 0.701,
those that a model started from, and trained along, stay above 0.817."""
STRANGERS, HIGHEST_STRANGER = 130, 0.19
"""Pairs of strangers that were measured, and the highest score of a block among them."""
DERIVED, LOWEST_DERIVED = 64, 0.45
"""Pairs of relatives that were measured, and the lowest score of a block among them."""
FLOAT32 = 5e-5
"""Distance up to which arithmetic in float32, which scores are computed in, is an explanation."""
EXPLAINED, EXPLAINED_HALF = 64.0, 4.0
"""Times the expected noise up to which rounding is an explanation of a distance; the second where
a file is in half precision, where there is less room between rounding and a change."""
READABLE = 0.8
"""A block in which rounding leaves a part of an exact disguise a lower score than this cannot be
judged by its score: its matrices have a condition that its dtype does not carry."""
FEWEST = 4
"""Directions of the stream that tables must determine for scores to mean anything."""

NO_DIRECTION = (
    "Scores are symmetric: which of the two came first, or whether both came from a third, "
    "is not something they can tell."
)


@dataclass(frozen=True)
class Judgement:
    """A verdict, in one sentence, and which blocks of A it rests on."""

    verdict: Verdict
    reason: str
    blocks: tuple[str, ...] = ()


def judge(
    scores: Mapping[str, float],
    ceilings: Mapping[str, float],
    explained: bool,
    embeddings: float | None,
) -> Judgement:
    """The verdict on two models of one depth.

    Args:
        scores: of each block, by its name.
        ceilings: the lowest score that rounding leaves of a part of an exact disguise, by block.
        explained: every distance that was measured is one that rounding explains.
        embeddings: the best score of a table of embeddings; None where there is none.
    """
    if explained and all(s >= RELATED for s in scores.values()):
        return Judgement(
            CONSISTENT,
            "every part that scores compare agrees up to what the rounding of the files explains; "
            "scores see neither every tensor nor any scale",
            tuple(scores),
        )
    unreadable = tuple(name for name, c in ceilings.items() if c < READABLE)
    if unreadable:
        return Judgement(
            "unclear",
            f"in blocks {listed(unreadable)} rounding leaves parts of even an exact disguise a "
            f"score of {min(ceilings.values()):.2f} only: their matrices have a condition that the "
            "dtype of the files does not carry",
        )
    related = tuple(name for name, s in scores.items() if s >= RELATED)
    strange = tuple(name for name, s in scores.items() if s <= STRANGE)
    if len(related) == len(scores):
        low = min(scores.values())
        return Judgement(
            "derived",
            f"every block scores at least {low:.2f}; of {STRANGERS} pairs of strangers trained on "
            f"the same data none had a block above {HIGHEST_STRANGER:.2f}",
            related,
        )
    if len(strange) == len(scores):
        return _no_blocks(max(scores.values(), default=0.0), embeddings)
    if related:
        others = [name for name in scores if name not in related]
        return Judgement(
            "partly",
            f"blocks {listed(related)} agree (at least {RELATED}; strangers reach "
            f"{HIGHEST_STRANGER:.2f}), blocks {listed(others)} do not",
            related,
        )
    return Judgement(
        "unclear",
        f"scores between {STRANGE} and {RELATED} belong to neither relatives nor strangers",
    )


def judge_matrix(best: Mapping[str, tuple[str, float]], embeddings: float | None) -> Judgement:
    """The verdict on models of different depth, from each block's best partner."""
    related = {name: pair for name, pair in best.items() if pair[1] >= RELATED}
    if related:
        pairs = ", ".join(f"{a} with {b}" for a, (b, _) in related.items())
        return Judgement("partly", f"the depths differ; blocks agree: {pairs}", tuple(related))
    highest = max((score for _, score in best.values()), default=0.0)
    if highest <= STRANGE:
        return _no_blocks(highest, embeddings)
    return Judgement("unclear", f"the depths differ, and no block scores above {highest:.2f}")


def _no_blocks(highest: float, embeddings: float | None) -> Judgement:
    if embeddings is not None and embeddings >= SHARED_EMBEDDINGS:
        return Judgement(
            "embeddings only",
            f"no block scores above {highest:.2f}, but embeddings agree to {embeddings:.2f} "
            "(those of strangers trained on the same data to 0.70 at most)",
        )
    return Judgement(
        "unrelated",
        f"no block scores above {highest:.2f}; of {DERIVED} pairs of trained relatives none had a "
        f"block below {LOWEST_DERIVED:.2f}",
    )


def listed(names: Sequence[str]) -> str:
    """``0, 1, 4``; long lists shortened."""
    shown = list(names) if len(names) <= 12 else [*names[:10], "…", names[-1]]
    return ", ".join(shown)
