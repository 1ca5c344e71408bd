"""Calibrated test of common ancestry: how often trained strangers score as high.

The score of two models does not depend on a disguise of either, so this test holds where the exact
one (`evidence`) is defeated by permuted units. Its null distribution is not known and was measured:
``benchmarks/calibration.py`` scores pairs of models that were trained on the same data from other
seeds. Strangers share features, so their scores are above zero, and depend on family and size.

For each family the mean of log(score + OFFSET) is linear in the logarithms of width and depth. A
p-value is the share of strangers whose residual is at least as large, ``(1 + number) / (1 +
pairs)``; no tail is extrapolated. Outside the calibrated sizes the nearest one stands in, and the
outcome is labelled as extrapolated. A family without strangers of its own gets the largest p-value
of all families.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from transformer_nfn.functional.description import Transformer

OFFSET = 0.05
"""Added to scores before their logarithm. This form (constant spread, this offset) had the lowest
rate of rejections among nine when each size in turn was left out of the calibration seeds."""


@dataclass(frozen=True)
class Strangers:
    """Null distribution of the scores of one family.

    Attributes:
        width: smallest and largest that was calibrated.
        depth: likewise.
        location: mean of log(score + OFFSET): constant, and slopes in log2 of width and of depth.
        residuals: of all pairs, in ascending order.

    Example:
        >>> strangers = Strangers((32, 64), (2, 4), (-2.0, 0.0, 0.0), (-0.5, -0.1, 0.2, 0.4))
        >>> strangers.p_value((64, 2), 0.3), strangers.covers((128, 2))
        (0.2, False)
    """

    width: tuple[int, int]
    depth: tuple[int, int]
    location: tuple[float, ...]
    residuals: tuple[float, ...]

    def residual(self, size: tuple[int, int], score: float) -> float:
        """How far a score lies above the mean for a width and depth, in logarithms."""
        limits = (self.width, self.depth)
        w, d = (min(max(x, low), high) for x, (low, high) in zip(size, limits, strict=True))
        constant, by_width, by_depth = self.location
        mean = constant + by_width * math.log2(w) + by_depth * math.log2(d)
        return math.log(max(score, 0.0) + OFFSET) - mean

    def p_value(self, size: tuple[int, int], score: float) -> float:
        """Share of strangers that score as high, of models with this width and depth."""
        pairs = len(self.residuals)
        # Ties count as higher, whatever their rounding.
        below = bisect_left(self.residuals, self.residual(size, score) - 1e-9)
        return (1 + pairs - below) / (1 + pairs)

    def covers(self, size: tuple[int, int]) -> bool:
        """Whether models of this width and depth were among the strangers."""
        limits = (self.width, self.depth)
        return all(low <= x <= high for x, (low, high) in zip(size, limits, strict=True))


@cache
def calibrated_families() -> Mapping[str, Strangers]:
    """The strangers of each family that was calibrated."""
    text = files(__package__).joinpath("data/strangers.json").read_text(encoding="utf-8")
    return {
        name: Strangers(**{key: tuple(values) for key, values in content.items()})
        for name, content in json.loads(text)["families"].items()
    }


@dataclass(frozen=True)
class CalibratedTest:
    """Outcome of the calibrated test on two models, from `calibrated_test`.

    Attributes:
        p: share of strangers that score as high.
        pairs: number of strangers.
        family: whose strangers they are.
        extrapolated: why the models lie outside what was calibrated; None where they lie inside.

    >>> print(CalibratedTest(0.01, 99, "gpt2", None))
    calibrated test: p = 0.01, none of 99 pairs of gpt2 strangers trained alike scores as high
    """

    p: float
    pairs: int
    family: str
    extrapolated: str | None

    def __str__(self) -> str:
        higher = round(self.p * (1 + self.pairs)) - 1
        text = (
            f"calibrated test: p = {self.p:.2g}, {higher or 'none'} of {self.pairs} pairs of "
            f"{self.family} strangers trained alike score{'' if higher > 1 else 's'} as high"
        )
        return text if self.extrapolated is None else f"{text} (extrapolated: {self.extrapolated})"

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)


def calibrated_test(model: Transformer, score: float) -> CalibratedTest:
    """Compare a score with those of strangers.

    Args:
        model: description of one of the two models.
        score: of both, from `relate`.
    """
    known = calibrated_families()
    size = (model.width, len(model.blocks))
    if model.family not in known:
        p, family = max((known[name].p_value(size, score), name) for name in known)
        unknown = f"no strangers of family {model.family} were trained"
        return CalibratedTest(p, len(known[family].residuals), family, unknown)
    strangers = known[model.family]
    reason: str | None = None
    if not strangers.covers(size):
        (w, W), (d, D) = strangers.width, strangers.depth
        reason = f"width {size[0]}, depth {size[1]}; calibrated for {w} to {W} and {d} to {D}"
    p = strangers.p_value(size, score)
    return CalibratedTest(p, len(strangers.residuals), model.family, reason)
