"""How good are fitted predictors on networks they were not trained on, kind by kind?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.intervals import radius
from transformer_nfn.prediction.kinds import Kinds
from transformer_nfn.prediction.metrics import kendall_tau, r_squared, scores, standard_error
from transformer_nfn.prediction.predictors import Predictor, seed_predictions
from transformer_nfn.prediction.records import CONFIGURATION

LEFT_OUT = "left_out"
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Judged:
    """Networks of one kind in one part, and what every seed says of them.

    Attributes:
        kind: its name.
        split: ``val``, ``test`` or ``left_out``.
        columns: of the networks.
        truth: their accuracy, ``[n]``.
        said: by each seed, ``[seeds, n]``.
    """

    kind: str
    split: str
    columns: Columns
    truth: np.ndarray
    said: np.ndarray

    @property
    def residuals(self) -> np.ndarray:
        """Of the mean over the seeds."""
        return np.asarray(self.truth - sum(each / len(self.said) for each in self.said))

    def figures(self, reach: float | None = None) -> dict[str, Any]:
        """τ, R² and error, means over seeds; how many lie within ``reach`` of the seeds' mean."""
        taus = [kendall_tau(self.truth, each) for each in self.said]
        found = {
            "networks": len(self.truth),
            "tau": float(np.mean(taus)),
            "tau_se": standard_error(taus),
            "r2": float(np.mean([r_squared(self.truth, each) for each in self.said])),
            "mae": float(np.abs(self.truth - self.said).mean()),
        }
        if reach is not None:
            found["coverage"] = float((np.abs(self.residuals) <= reach).mean())
        return found


@dataclass(frozen=True)
class Judgements:
    """All held-out networks, a list for each split with an entry for each kind."""

    val: list[Judged]
    test: list[Judged]
    left_out: list[Judged]

    @staticmethod
    def of(predictors: Sequence[Predictor], kinds: Kinds) -> Judgements:
        """Asks every predictor about every network that it was not trained on."""

        def ask(kind: str, split: str, data: Dataset) -> Judged:
            said = seed_predictions(predictors, data).numpy()
            return Judged(kind, split, dict(data.columns), data.truth, said)

        return Judgements(
            [ask(name, "val", part) for name, part in zip(kinds.names, kinds.val, strict=True)],
            [ask(name, "test", part) for name, part in zip(kinds.names, kinds.test, strict=True)],
            [ask(name, LEFT_OUT, data) for name, data in kinds.left_out.items()],
        )

    def residuals(self, split: str) -> np.ndarray:
        """Of the mean over the seeds, all kinds together."""
        parts: list[Judged] = getattr(self, split)
        return np.concatenate([part.residuals for part in parts])

    def seed_rows(self, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The scores of each seed on the test networks of all kinds together."""
        truth = np.concatenate([part.truth for part in self.test])
        said = np.concatenate([part.said for part in self.test], 1)
        return [{"seed": seed, **scores(truth, said[i])} for i, seed in enumerate(seeds)]

    def by_kind(self, reach: Callable[[str], float]) -> dict[str, Any]:
        """For a record: figures of each kind on its test networks, of those left out on all theirs.

        Args:
            reach: half the width of the intervals of a kind left out.
        """
        kinds = {part.kind: part.figures() for part in self.test}
        return {
            "tau_within": float(np.mean([found["tau"] for found in kinds.values()])),
            "kinds": kinds,
            LEFT_OUT: {part.kind: part.figures(reach(part.kind)) for part in self.left_out},
        }

    def columns(
        self, seeds: Sequence[int], widened: Callable[[str], float], *, named: bool
    ) -> Columns:
        """A row for each seed and network, for ``predictions.parquet``.

        Args:
            seeds: which.
            widened: how many times wider the intervals of a kind are; 1 where it was seen.
            named: whether kinds are told apart.
        """
        parts = [*self.val, *self.test, *self.left_out]
        columns: dict[str, list[np.ndarray]] = {}
        for i, seed in enumerate(seeds):
            reach = radius(np.concatenate([part.truth - part.said[i] for part in self.val]))
            for part in parts:
                count, predicted = len(part.truth), part.said[i]
                wide = reach * widened(part.kind)
                values = {
                    "seed": np.full(count, seed),
                    "split": np.full(count, part.split, dtype=object),
                    "accuracy": part.truth,
                    "predicted": predicted,
                    "low": np.clip(predicted - wide, 0, 1),
                    "high": np.clip(predicted + wide, 0, 1),
                    **{key: part.columns[key] for key in ("row", "run", *CONFIGURATION)},
                }
                if named:
                    values["kind"] = np.full(count, part.kind, dtype=object)
                for key, value in values.items():
                    columns.setdefault(key, []).append(value)
        return {key: np.concatenate(value) for key, value in columns.items()}
