"""Random forests on the flattened weights: the authors', or scikit-learn's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from transformer_nfn.models.boosting import (
    Held,
    LightGBMPredictor,
    leaf_size,
    read_lightgbm,
    train_lightgbm,
    with_leaf_size,
)
from transformer_nfn.models.predictor import PredictorError, TabularPredictor, optional
from transformer_nfn.models.tree_files import checked_lightgbm

IMPLEMENTATIONS = ("lightgbm", "sklearn")
BOOTSTRAP_SHARE = 0.632
"""Of all networks, those in a bootstrap sample: 1 - 1/e."""


class RandomForestPredictor(TabularPredictor):
    """A random forest on the flattened weights.

    Args:
        implementation: ``lightgbm`` for LightGBM's rf mode with the authors' settings,
            ``sklearn`` for scikit-learn's forest with the same depth, leaves and leaf size.
        rounds: trees; None for 1000 at most (lightgbm, stopped early) or 100 (sklearn).
        patience: lightgbm: trees without a better validation error before it stops.
        params: of the library, in place of or besides these.
        threads: None for as many as OpenMP allows (lightgbm) or one (sklearn).
    """

    SKLEARN: Mapping[str, Any] = {
        "max_depth": 10,
        "max_leaf_nodes": 256,
        "min_samples_leaf": 50,
        # Of 18,000 weights; trees that look at all of them take minutes each.
        "max_features": "sqrt",
    }

    def __init__(
        self,
        implementation: str = "lightgbm",
        rounds: int | None = None,
        patience: int = 50,
        params: Mapping[str, Any] | None = None,
        threads: int | None = None,
    ) -> None:
        if implementation not in IMPLEMENTATIONS:
            raise PredictorError(
                f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
                f"found {implementation!r}"
            )
        if rounds is None:
            rounds = 1000 if implementation == "lightgbm" else 100
        self.settings = {
            "implementation": implementation,
            "rounds": rounds,
            "patience": patience,
            "params": dict(params or {}),
            "threads": threads,
        }
        self._booster: Any = None
        self._trees: dict[str, np.ndarray] = {}

    @property
    def _sklearn(self) -> bool:
        return bool(self.settings["implementation"] == "sklearn")

    def _learn(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        given = self.settings["params"]
        if not self._sklearn:
            usual = with_leaf_size(LightGBMPredictor.PARAMS, len(x))
            params = {**usual, "boosting": "rf", **given}
            self._booster = train_lightgbm(params, x, y, held, seed, self.settings)
            return
        ensemble = optional("sklearn.ensemble")
        leaf = leaf_size(self.SKLEARN["min_samples_leaf"], BOOTSTRAP_SHARE, len(x))
        forest = ensemble.RandomForestRegressor(
            self.settings["rounds"],
            random_state=seed,
            n_jobs=self.settings["threads"],
            **{**self.SKLEARN, "min_samples_leaf": leaf, **given},
        )
        self._trees = trees_of(forest.fit(x, y))

    def _read(self, x: np.ndarray) -> np.ndarray:
        if self._sklearn:
            return walk(self._trees, x)
        out: np.ndarray = self._booster.predict(x, num_threads=self.settings["threads"] or 0)
        return out

    def _files(self) -> dict[str, bytes]:
        if self._sklearn:
            return {"trees.safetensors": safetensors.numpy.save(self._trees)}
        return {"model.txt": self._booster.model_to_string().encode()}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        if not self._sklearn:
            checked = checked_lightgbm(files["model.txt"], self.width or 0)
            self._booster = read_lightgbm(checked.encode())
            return
        try:
            trees = safetensors.numpy.load(files["trees.safetensors"])
        except (safetensors.SafetensorError, KeyError, ValueError) as error:
            raise PredictorError(f"trees.safetensors is not readable: {error}") from error
        check_trees(trees, self.width or 0)
        self._trees = trees


def trees_of(forest: Any) -> dict[str, np.ndarray]:
    """A fitted scikit-learn forest as arrays, all trees one after another.

    Kept this way because the library itself only pickles, which runs code when it is read.
    """
    trees = [tree.tree_ for tree in forest.estimators_]
    start = np.cumsum([0, *(t.node_count for t in trees)])
    pairs = list(zip(trees, start, strict=False))
    # A leaf leads to itself, so that a walk of the greatest depth ends in one from anywhere.
    left = [np.where(t.children_left < 0, np.arange(t.node_count), t.children_left) for t in trees]
    right = [
        np.where(t.children_right < 0, np.arange(t.node_count), t.children_right) for t in trees
    ]
    return {
        "root": start[:-1].astype(np.int64),
        "left": np.concatenate([a + s for a, (_, s) in zip(left, pairs, strict=True)]),
        "right": np.concatenate([a + s for a, (_, s) in zip(right, pairs, strict=True)]),
        "feature": np.concatenate([np.maximum(t.feature, 0) for t in trees]).astype(np.int64),
        "threshold": np.concatenate([t.threshold for t in trees]).astype(np.float64),
        "value": np.concatenate([t.value[:, 0, 0] for t in trees]).astype(np.float64),
        "depth": np.array([max(t.max_depth for t in trees)], dtype=np.int64),
    }


def check_trees(trees: Mapping[str, np.ndarray], width: int) -> None:
    """Refuses arrays that `walk` could leave, or never come to the end of."""
    nodes = len(trees["value"]) if "value" in trees and trees["value"].ndim == 1 else 0
    limits = {"root": nodes, "left": nodes, "right": nodes, "feature": width, "depth": 10_000}
    for name, most in limits.items():
        found = trees.get(name)
        fits = found is not None and found.dtype == np.int64 and found.ndim == 1 and len(found)
        if not fits or found.min() < 0 or found.max() >= most:  # type: ignore[union-attr]
            raise PredictorError(f"trees.safetensors: '{name}' are no whole numbers below {most}")
        if name in ("left", "right", "feature") and len(found) != nodes:  # type: ignore[arg-type]
            raise PredictorError(f"trees.safetensors: '{name}' expected {nodes} numbers")
    for name in ("value", "threshold"):
        column = trees.get(name)
        if column is None or column.dtype != np.float64 or column.shape != (nodes,):
            raise PredictorError(f"trees.safetensors: '{name}' expected {nodes} float64 numbers")
        if not np.isfinite(column).all():
            raise PredictorError(f"trees.safetensors: '{name}' holds values that are not finite")


def walk(trees: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The mean over all trees of the leaf that each row of ``x`` ends in."""
    at = np.broadcast_to(trees["root"], (len(x), len(trees["root"]))).copy()
    rows = np.arange(len(x))[:, None]
    for _ in range(int(trees["depth"][0])):
        goes_left = x[rows, trees["feature"][at]] <= trees["threshold"][at]
        at = np.where(goes_left, trees["left"][at], trees["right"][at])
    out: np.ndarray = trees["value"][at].mean(1)
    return out
