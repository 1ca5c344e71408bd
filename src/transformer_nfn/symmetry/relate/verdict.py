"""What do the scores of two models say? Every threshold, and the numbers behind it.

Measured on small GPT-2s (D = 64, three blocks), each pair fully disguised: scores of derived
models (fine-tuned, pruned by half, averaged, int8, int4, retrained as long on other data) from
0.54 up; of models that share embeddings only up to 0.165; of strangers up to 0.109, also those
trained on the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Verdict = Literal["same", "derived", "partly", "embeddings only", "unrelated", "unclear"]

RELATED = 0.35
"""A block that scores at least this has the other's weights behind it: midway between the lowest
derived model (0.54) and the highest that shared embeddings only (0.165)."""
STRANGE = 0.22
"""A block that scores at most this has not: a third above the highest such score."""
SHARED_EMBEDDINGS = 0.9
"""Embeddings that agree so well were taken over: strangers trained on the same data reach 0.68,
a model fine-tuned on other data keeps 0.93."""
SAME_DISTANCE = {
    torch.float64: 5e-5,
    torch.float32: 5e-5,
    torch.float16: 1.2e-3,
    torch.bfloat16: 8.5e-3,
}
"""Relative distance of a matched part up to which rounding is an explanation. In bfloat16 a
disguise of condition 10 leaves 0.6 %; a matrix changed by 1 % stands at 1 %. Scores are computed
in float32, which leaves 1e-6."""

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
    distances: Sequence[float],
    embeddings: float | None,
    allowed: float,
) -> Judgement:
    """The verdict on two models of one depth.

    Args:
        scores: of each block, by its name.
        distances: of every part and table that was compared.
        embeddings: the best score of a table of embeddings; None where there is none.
        allowed: distance that rounding explains.
    """
    worst = max(distances, default=float("inf"))
    if worst <= allowed and all(s >= RELATED for s in scores.values()):
        return Judgement(
            "same",
            f"every part agrees up to {worst:.1g}, which the rounding of the files explains "
            f"(up to {allowed:.1g}); --prove verifies every tensor",
            tuple(scores),
        )
    related = tuple(name for name, s in scores.items() if s >= RELATED)
    strange = tuple(name for name, s in scores.items() if s <= STRANGE)
    if len(related) == len(scores):
        low = min(scores.values())
        return Judgement(
            "derived", f"every block scores at least {low:.2f}, strangers at most 0.11", related
        )
    if len(strange) == len(scores):
        return _no_blocks(max(scores.values(), default=0.0), embeddings)
    if related:
        others = [name for name in scores if name not in related]
        return Judgement(
            "partly",
            f"blocks {listed(related)} agree (at least {RELATED}), blocks {listed(others)} do not",
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
            f"no block scores above {highest:.2f}, but embeddings agree to {embeddings:.2f}",
        )
    return Judgement("unrelated", f"no block scores above {highest:.2f}, as strangers do")


def listed(names: Sequence[str]) -> str:
    """``0, 1, 4``; long lists shortened."""
    shown = list(names) if len(names) <= 12 else [*names[:10], "…", names[-1]]
    return ", ".join(shown)
