"""Distance of two fingerprints, what of it rounding explains, and what agrees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_nfn.checkpoints.fingerprints.blocks import CONSTANTS, PARTS
from transformer_nfn.checkpoints.fingerprints.ends import ENDS
from transformer_nfn.checkpoints.fingerprints.stored import ROWS, STEPS, Array, Print

TOLERANCE = 3.0
"""Expected rounding errors that a row may be away: disguises of all families, at conditions 10 and
1e5 and in four dtypes, stand at 1.6 at most."""
STORED = 4.5e-5
"""Rounding of a row to 16 bits, in units of its length: at most that of 64 normal numbers."""
WEIGHTS = {"sketch": 0.8, "constants": 0.1, "ends": 0.1}
"""Shares of the squared distance: blocks say who made a model, heads are replaced in fine-tunes."""
NEAR = 0.6
"""A step of depth whose cosine is at least this is alike: fine-tuned, pruned and averaged models
have 0.8 and more, those retrained as long as they were trained about 0.4."""
FINE_TUNED = 0.5
"""Largest distance that is called a fine-tune's: real ones stand at 0.17 to 0.46, small models with
one block of three replaced at 0.52 and more."""
HINT = 0.3
"""A mean cosine above this is no stranger's: models retrained as long as they were trained keep
0.32 to 0.45, strangers that learnt the same text reach 0.27, most of it in the first block."""
SAME_EMBEDDINGS = 0.9
"""Embeddings that agree so well were taken over."""
NAMED = 4
"""Differences up to which all are named."""
MEANING = (
    "distance 0: same up to rounding; to 0.03: int8, or a few weights edited; to 0.5: fine-tuned, "
    "pruned, averaged; to 0.85: retrained, or a part replaced; above: strangers, or only "
    "embeddings in common. A fingerprint suggests whom to look at; `tnfn compare` decides."
)


@dataclass(frozen=True)
class Likeness:
    """How alike two prints are.

    Attributes:
        distance: root mean square distance of all rows beyond what rounding explains, each in
            units of both rows' length: 0 for disguises of one model, about 1 for strangers.
        changed: rows that differ by more than rounding explains, each with its distance.
        unchanged: share of all rows that do not.
        score: mean cosine of all parts at all steps of depth: 1 for disguises, about 0 for
            strangers.
        parts: mean cosine of each part over the depth.
        depth: mean cosine of each step of depth over the parts.
        embedding: cosine of the numbers of the embeddings; None where they do not compare, or have
            fewer rows than the width: nearly orthogonal rows are alike in strangers too.
        sizes: root mean square difference of logarithms of sizes: 0 for disguises.
        comparable: whether both read sums over as many rows of the same table. Where they do not,
            a distance near 1 means nothing.
    """

    distance: float
    changed: Mapping[str, float]
    unchanged: float
    score: float
    parts: Mapping[str, float]
    depth: tuple[float, ...]
    embedding: float | None
    sizes: float
    comparable: bool

    def words(self) -> str:
        """What is alike, in a few words."""
        if not self.comparable:
            return "not comparable: other vocabulary or inputs"
        if not self.changed:
            return "same up to rounding"
        if len(self.changed) <= NAMED and self.unchanged >= 0.5:
            return f"same but for {', '.join(self.changed)}"
        near = [step for step, score in enumerate(self.depth) if score >= NEAR]
        if len(near) == STEPS:
            near_enough = self.distance <= FINE_TUNED
            return "all blocks" + (", as near as fine-tunes were" if near_enough else "")
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
            "changed": dict(self.changed),
            "unchanged": self.unchanged,
            "score": self.score,
            "parts": dict(self.parts),
            "depth": list(self.depth),
            "embedding": self.embedding,
            "sizes": self.sizes,
            "comparable": self.comparable,
        }


def likeness(a: Print, b: Print) -> Likeness:
    """How alike two prints are."""
    comparable = a.frame == b.frame and a.rows == b.rows
    squares = _distances(a, b)
    present = np.concatenate([x[~np.isnan(x)] for x in squares.values()])
    cosines = (_units(a.sketch) * _units(b.sketch)).sum(-1)
    embedding = None
    if comparable and a.frame != "fixed" and a.rows >= max(a.width, b.width):
        embedding = float((_units(a.ends[0]) * _units(b.ends[0])).sum())
    return Likeness(
        _joined(squares),
        _changed(squares),
        float((present == 0).mean()) if len(present) else 1.0,
        float(cosines.mean()),
        {part: float(x) for part, x in zip(PARTS, cosines.mean(0), strict=True)},
        tuple(float(x) for x in cosines.mean(1)),
        embedding,
        float(np.sqrt(np.square(a.sizes.astype(np.float64) - b.sizes).mean())),
        comparable,
    )


def distance(a: Print, b: Print) -> float:
    """`Likeness.distance` alone."""
    return _joined(_distances(a, b))


def _distances(a: Print, b: Print) -> dict[str, Array]:
    """Squared distances of rows beyond rounding, in units of both; NaN where both are zero."""
    out = {}
    for name, _ in ROWS:
        x, y = (getattr(p, name).astype(np.float64) for p in (a, b))
        noise = sum(np.square(getattr(p, f"{name}_noise").astype(np.float64)) for p in (a, b))
        length = np.square(x).sum(-1) + np.square(y).sum(-1)
        explained = TOLERANCE**2 * (noise + STORED**2 * length)
        beyond = np.maximum(np.square(x - y).sum(-1) - explained, 0.0)
        out[name] = beyond / np.where(length > 0, length, np.nan)
    return out


def _joined(squares: Mapping[str, Array]) -> float:
    """One distance of the squared distances of all rows."""
    total = weight = 0.0
    for name, x in squares.items():
        present = x[~np.isnan(x)]
        if len(present):
            total += WEIGHTS[name] * float(present.mean())
            weight += WEIGHTS[name]
    return float((total / max(weight, 1e-300)) ** 0.5)


def _changed(squares: Mapping[str, Array]) -> dict[str, float]:
    """Rows that differ beyond rounding, by what they are and where."""
    out = {}
    for name, names in (("sketch", PARTS), ("constants", CONSTANTS)):
        for i, part in enumerate(names):
            steps = [int(step) for step in np.flatnonzero(squares[name][:, i] > 0)]
            if steps:
                at = f"{part} at {_ranges(steps)} of the depth"
                out[at] = float(np.sqrt(np.nanmax(squares[name][:, i])))
    found = zip(ENDS, squares["ends"], strict=True)
    return out | {name: float(np.sqrt(x)) for name, x in found if x > 0}


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
