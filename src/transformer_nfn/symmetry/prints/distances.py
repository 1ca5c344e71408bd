"""How alike are two fingerprints, and in what? A distance, and cosines by part and depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_nfn.symmetry.prints.blocks import PARTS
from transformer_nfn.symmetry.prints.stored import STEPS, Array, Print

ROUNDING = 1e-3
"""Distance up to which rounding is an explanation: bfloat16 leaves 2e-4."""
NEAR = 0.6
"""A step of depth that scores at least this is called alike: fine-tuned, pruned and averaged
models score 0.9 and more, those retrained as long as they were trained about 0.4."""
HINT = 0.3
"""A score above this is no stranger's. Small models retrained as long as they were trained keep
0.32 to 0.45; strangers that learnt the same text reach 0.27, most of it in the first block."""
SAME_EMBEDDINGS = 0.9
"""Embeddings that agree so well were taken over."""
MEANING = (
    "distance 0: a disguise or a rounded copy; to 0.1: fine-tuned, pruned, averaged; to 0.7: "
    "retrained, or a part replaced; above: strangers, or only embeddings in common. Measured on "
    "small models, so it suggests whom to look at; `tnfn compare` decides."
)


@dataclass(frozen=True)
class Likeness:
    """How alike two prints are.

    Attributes:
        score: mean cosine of all parts at all steps of depth: 1 for disguises of one model, about
            0 for strangers.
        parts: mean cosine of each part over the depth.
        depth: mean cosine of each step of depth over the parts.
        embedding: cosine of the numbers of the embeddings; None where they do not compare.
        sizes: root mean square difference of logarithms of sizes: 0 for disguises.
        comparable: whether both answer to sums over as many rows of the same table. Where they do
            not, a score near 0 says nothing.
    """

    score: float
    parts: Mapping[str, float]
    depth: tuple[float, ...]
    embedding: float | None
    sizes: float
    comparable: bool

    @property
    def distance(self) -> float:
        """``1 - score``: 0 for disguises of one model, about 1 for strangers."""
        return 1.0 - self.score

    def words(self) -> str:
        """What is alike, in a few words."""
        if not self.comparable:
            return "not comparable: other vocabulary or inputs"
        near = [step for step, score in enumerate(self.depth) if score >= NEAR]
        if self.score >= 1 - ROUNDING:
            return "everything: a disguise or a rounded copy"
        if len(near) == STEPS:
            return "all blocks"
        if near:
            return f"blocks at {_ranges(near)} of the depth"
        if self.score >= HINT:
            return "something: distant kin"
        if self.embedding is not None and self.embedding >= SAME_EMBEDDINGS:
            return "embeddings only"
        return "nothing"

    def as_json(self) -> dict[str, Any]:
        """Everything, as numbers and words."""
        return {
            "distance": self.distance,
            "alike": self.words(),
            "parts": dict(self.parts),
            "depth": list(self.depth),
            "embedding": self.embedding,
            "sizes": self.sizes,
            "comparable": self.comparable,
        }


def likeness(a: Print, b: Print) -> Likeness:
    """How alike two prints are."""
    both = _units(a.sketch) * _units(b.sketch)
    cosines = both.sum(-1)
    comparable = a.frame == b.frame and a.rows == b.rows
    embedding = None
    if comparable and a.frame != "fixed":
        embedding = float((_units(a.embedding) * _units(b.embedding)).sum())
    return Likeness(
        float(cosines.mean()),
        {part: float(x) for part, x in zip(PARTS, cosines.mean(0), strict=True)},
        tuple(float(x) for x in cosines.mean(1)),
        embedding,
        float(np.sqrt(np.square(a.sizes.astype(np.float64) - b.sizes).mean())),
        comparable,
    )


def _units(x: Array) -> Array:
    wide = x.astype(np.float64)
    length = np.sqrt(np.square(wide).sum(-1, keepdims=True))
    units: Array = wide / np.maximum(length, 1e-300)
    return units


def _ranges(steps: list[int]) -> str:
    """``0-25 %, 50-100 %`` for steps 0, 1, 4, 5, 6, 7."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step:
            ranges[-1][1] = step + 1
        else:
            ranges.append([step, step + 1])
    percent = 100 / STEPS
    return ", ".join(f"{start * percent:.0f}-{stop * percent:.0f} %" for start, stop in ranges)
