"""Predictions for held-out networks: scores, figures by size, and the table of predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_nfn.models.predictor import Predictor
from transformer_nfn.prediction.data import TWIN, Dataset, SizeGroups
from transformer_nfn.prediction.metrics import (
    conformal_radius,
    kendall_tau,
    mean,
    r_squared,
    scores,
    standard_error,
)
from transformer_nfn.prediction.predictors import seed_predictions
from transformer_nfn.prediction.runs import CONFIGURATION
from transformer_nfn.prediction.target import Target

LEFT_OUT = "left_out"


@dataclass(frozen=True)
class HeldOutPart:
    """Held-out networks of one size in one part, and the predictions of every seed.

    Attributes:
        size: its name.
        split: ``val``, ``test`` or ``left_out``.
        columns: of the networks.
        truth: their accuracy, ``[n]``.
        predicted: by each seed, ``[seeds, n]``.
    """

    size: str
    split: str
    columns: Mapping[str, np.ndarray]
    truth: np.ndarray
    predicted: np.ndarray

    @property
    def residuals(self) -> np.ndarray:
        """Residuals of the mean prediction."""
        return np.asarray(self.truth - sum(each / len(self.predicted) for each in self.predicted))

    def figures(self, radius: float | None = None) -> dict[str, Any]:
        """Mean τ, R² and error over seeds; with a radius also the coverage of the intervals."""
        taus = [kendall_tau(self.truth, each) for each in self.predicted]
        figures = {
            "networks": len(self.truth),
            "tau": float(np.mean(taus)),
            "tau_se": standard_error(taus),
            "r2": mean([r_squared(self.truth, each) for each in self.predicted]),
            "mae": float(np.abs(self.truth - self.predicted).mean()),
        }
        if radius is not None:
            figures["coverage"] = float((np.abs(self.residuals) <= radius).mean())
        return figures


@dataclass(frozen=True)
class HeldOut:
    """Predictions for all held-out networks; a list for each split with an entry per size."""

    val: list[HeldOutPart]
    test: list[HeldOutPart]
    left_out: list[HeldOutPart]

    @staticmethod
    def of(predictors: Sequence[Predictor], groups: SizeGroups) -> HeldOut:
        """Predict every network that was not trained on."""

        def predict(size: str, split: str, data: Dataset) -> HeldOutPart:
            predicted = data.target.decode(seed_predictions(predictors, data).numpy())
            return HeldOutPart(size, split, data.columns, data.truth, predicted)

        return HeldOut(
            [predict(name, "val", parts.val) for name, parts in groups.parts.items()],
            [predict(name, "test", parts.test) for name, parts in groups.parts.items()],
            [predict(name, LEFT_OUT, data) for name, data in groups.left_out.items()],
        )

    def residuals(self, split: str) -> np.ndarray:
        """Residuals of the mean prediction, all sizes together."""
        parts: list[HeldOutPart] = getattr(self, split)
        return np.concatenate([part.residuals for part in parts])

    def seed_rows(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """Scores of each seed on the test networks of all sizes together."""
        truth = np.concatenate([part.truth for part in self.test])
        predicted = np.concatenate([part.predicted for part in self.test], 1)
        return [{"seed": seed, **scores(truth, predicted[i])} for i, seed in enumerate(seeds)]

    def by_size(self, radius: Callable[[str], float]) -> dict[str, Any]:
        """Figures of each size for a record; ``radius`` gives the intervals of left-out sizes."""
        sizes = {part.size: part.figures() for part in self.test}
        return {
            "tau_within": float(np.mean([figures["tau"] for figures in sizes.values()])),
            "kinds": sizes,
            LEFT_OUT: {part.size: part.figures(radius(part.size)) for part in self.left_out},
        }

    def span(self, target: Target) -> float:
        """Largest half width of an interval: 1 for shares, else the span of the known values."""
        if target.kind == "share":
            return 1.0
        values = np.concatenate([part.truth for part in [*self.val, *self.test]])
        return float(values.max() - values.min())

    def columns(
        self,
        seeds: Sequence[int],
        factor: Callable[[str], float],
        *,
        mixed: bool,
        target: Target,
    ) -> dict[str, np.ndarray]:
        """Columns of ``predictions.parquet``, a row for each seed and network.

        Args:
            seeds: which.
            factor: by which the intervals of a size are wider.
            mixed: whether to add a column of sizes.
            target: what is predicted; its values stand in the column ``accuracy``.
        """
        widest = self.span(target)
        columns: dict[str, list[np.ndarray]] = {}
        for i, seed in enumerate(seeds):
            residuals = np.concatenate([part.truth - part.predicted[i] for part in self.val])
            radius = conformal_radius(residuals, widest=widest)
            for part in [*self.val, *self.test, *self.left_out]:
                count, predicted = len(part.truth), part.predicted[i]
                half = radius * factor(part.size)
                values = {
                    "seed": np.full(count, seed),
                    "split": np.full(count, part.split, dtype=object),
                    "accuracy": target.in_unit(part.truth),
                    "predicted": target.in_unit(predicted),
                    "low": target.in_unit(target.clip(predicted - half)),
                    "high": target.in_unit(target.clip(predicted + half)),
                    **configuration(part.columns),
                }
                if mixed:
                    values["kind"] = np.full(count, part.size, dtype=object)
                for key, value in values.items():
                    columns.setdefault(key, []).append(value)
        return {key: np.concatenate(value) for key, value in columns.items()}


def configuration(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns that say which networks these are, as far as the zoo has them."""
    names = ("row", "run", *CONFIGURATION, TWIN)
    return {name: columns[name] for name in names if name in columns}
