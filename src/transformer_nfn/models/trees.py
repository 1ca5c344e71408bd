"""Tree ensembles on the flattened weights: gradient boosting and random forests, as in the paper.

The libraries are needed only to fit. A fitted ensemble is kept as arrays, which hold no code and
are checked when they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from transformer_nfn.errors import needs_extra
from transformer_nfn.models.learners import Held, Learner, PredictorError

BINS = 63
"""Histogram bins of a weight. With 255, the libraries' default, XGBoost predicts no better from
8,422 networks; histograms of 18,000 weights then take twice the time and 15 GB."""
HISTOGRAMS_MB = 256
"""Memory that LightGBM keeps histograms in; the others it computes again."""
TREES_FILE = "trees.safetensors"
ROWS_AT_ONCE = 256
XGBOOST: Mapping[str, Any] = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "learning_rate": 0.1,
    "max_depth": 10,
    "max_leaves": 256,
    "min_child_weight": 50,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "reg_lambda": 0.01,
    "reg_alpha": 0.02,
}
LIGHTGBM: Mapping[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.1,
    "num_leaves": 256,
    "max_depth": 10,
    "min_data_in_leaf": 50,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "feature_fraction": 0.8,
    "lambda_l1": 0.1,
    "lambda_l2": 0.2,
    "min_gain_to_split": 0.01,
}
FOREST: Mapping[str, Any] = {**LIGHTGBM, "boosting": "rf"}
SMALL: Mapping[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.05,
    "num_leaves": 7,
    "min_data_in_leaf": 10,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "feature_fraction": 0.2,
    "lambda_l2": 1.0,
}
"""Settings: the authors' for all weights, and of small trees for invariants."""


@dataclass(frozen=True)
class TreeEnsemble:
    """Sum of regression trees, as arrays over the nodes of all trees.

    A row goes left where ``x[feature] <= threshold``. Children have larger numbers than their
    parent; a leaf is its own child.

    >>> stump = TreeEnsemble.join([([1, -1, -1], [2, -1, -1], [0, 0, 0], [0.5] * 3, [0, 1, 2])])
    >>> stump.predict(np.array([[0.0], [1.0]]))
    array([1., 2.])

    Attributes:
        root: ``[trees]``, the first node of each tree.
        left, right: ``[nodes]``, children.
        feature: ``[nodes]``, the column to compare.
        threshold: ``[nodes]``.
        value: ``[nodes]``, what a leaf adds.
        base: ``[1]``, added to every sum.
    """

    root: np.ndarray
    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray
    base: np.ndarray

    @staticmethod
    def join(trees: Iterable[tuple[Any, Any, Any, Any, Any]], base: float = 0.0) -> TreeEnsemble:
        """Join trees given as (left, right, feature, threshold, value); leaves have child -1."""
        root, columns, start = [], [], 0
        for left, right, feature, threshold, value in trees:
            left, right = np.asarray(left, np.int64), np.asarray(right, np.int64)
            node, leaf = np.arange(len(left)), left < 0
            root.append(start)
            columns.append((
                np.where(leaf, node, left) + start,
                np.where(leaf, node, right) + start,
                np.where(leaf, 0, np.asarray(feature, np.int64)),
                np.where(leaf, 0.0, np.asarray(threshold, np.float64)),
                np.asarray(value, np.float64),
            ))  # fmt: skip
            start += len(left)
        left, right, feature, threshold, value = map(np.concatenate, zip(*columns, strict=True))
        roots = np.array(root, np.int64)
        return TreeEnsemble(roots, left, right, feature, threshold, value, np.array([base]))

    @cached_property
    def depth(self) -> int:
        """Splits on the longest path from a root to a leaf."""
        depth, nodes = 0, self.root
        while len(inner := nodes[self.left[nodes] != nodes]):
            nodes = np.unique(np.concatenate([self.left[inner], self.right[inner]]))
            depth += 1
        return depth

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The sum over all trees for each row of ``x``."""
        children = np.stack([self.left, self.right], 1).ravel()
        out = np.empty(len(x))
        for start in range(0, len(x), ROWS_AT_ONCE):
            rows = x[start : start + ROWS_AT_ONCE]
            number = np.arange(len(rows))[:, None]
            at = np.broadcast_to(self.root, (len(rows), len(self.root)))
            for _ in range(self.depth):
                goes_right = rows[number, self.feature[at]] > self.threshold[at]
                at = children[2 * at + goes_right]
            out[start : start + ROWS_AT_ONCE] = self.value[at].sum(1) + self.base
        return out

    def to_bytes(self) -> bytes:
        """The arrays as a safetensors file."""
        return safetensors.numpy.save(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, width: int) -> TreeEnsemble:
        """Read what `to_bytes` wrote; rejects arrays that are no trees over ``width`` columns."""
        try:
            arrays = safetensors.numpy.load(data)
        except (safetensors.SafetensorError, KeyError, ValueError) as error:
            raise PredictorError(f"{TREES_FILE} is not readable: {error}") from error
        if arrays.keys() != cls.__dataclass_fields__.keys():
            raise PredictorError(f"{TREES_FILE} holds {', '.join(sorted(arrays))[:80]}")
        nodes = arrays["value"].size
        lengths = {"root": arrays["root"].size, "base": 1}
        for name, array in arrays.items():
            dtype = np.float64 if name in ("threshold", "value", "base") else np.int64
            length = lengths.get(name, nodes)
            if not length or array.shape != (length,) or array.dtype != dtype:
                raise PredictorError(
                    f"{TREES_FILE}: '{name}' expected {length} numbers in {dtype.__name__}, found "
                    f"{list(array.shape)} in {array.dtype}"
                )
            if not np.isfinite(array).all():
                raise PredictorError(f"{TREES_FILE}: '{name}' holds values that are not finite")
        parents = np.arange(nodes)
        ranges = {"root": (0, nodes), "left": (parents, nodes), "right": (parents, nodes),
                  "feature": (0, width)}  # fmt: skip
        for name, (least, end) in ranges.items():
            if (arrays[name] < least).any() or (arrays[name] >= end).any():
                raise PredictorError(f"{TREES_FILE}: '{name}' points outside its trees")
        if ((arrays["left"] == parents) != (arrays["right"] == parents)).any():
            raise PredictorError(f"{TREES_FILE}: a node has one child")
        return cls(**arrays)


class TreeLearner(Learner):
    """A learner whose fitted state is a `TreeEnsemble`."""

    _trees: TreeEnsemble

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The sum over all trees."""
        return self._trees.predict(x)

    def files(self) -> dict[str, bytes]:
        """The trees as a safetensors file."""
        return {TREES_FILE: self._trees.to_bytes()}

    def restore(self, files: Mapping[str, bytes], width: int) -> None:
        """Read trees; rejects arrays that are none."""
        self._trees = TreeEnsemble.from_bytes(files[TREES_FILE], width)


@dataclass
class XGBoost(TreeLearner):
    """Gradient boosting by XGBoost with the authors' settings.

    >>> XGBoost(rounds=10).settings
    {'rounds': 10, 'threads': None}

    Attributes:
        rounds: number of trees.
        threads: None for as many as OpenMP allows.
    """

    rounds: int = 50
    threads: int | None = None

    def fit(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        """Take all rounds."""
        with needs_extra(PredictorError, "xgboost", "baselines", "this predictor"):
            import xgboost
        leaf = leaf_size(XGBOOST["min_child_weight"], XGBOOST["subsample"], len(x))
        params = {
            **XGBOOST, "min_child_weight": leaf, "max_bin": BINS, "seed": seed, "verbosity": 0,
        }  # fmt: skip
        if self.threads is not None:
            params["nthread"] = self.threads
        data = xgboost.DMatrix(x, y, nthread=self.threads)
        self._trees = xgboost_trees(xgboost.train(params, data, self.rounds))


@dataclass
class LightGBM(TreeLearner):
    """Gradient boosting or a random forest by LightGBM.

    >>> LightGBM(patience=10, params=FOREST).params["boosting"]
    'rf'

    Attributes:
        rounds: largest number of trees.
        patience: rounds without a smaller validation error before training stops.
        threads: None for as many as OpenMP allows.
        params: of LightGBM.
    """

    rounds: int = 1000
    patience: int = 50
    threads: int | None = None
    params: Mapping[str, Any] = field(default_factory=lambda: LIGHTGBM)

    def fit(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        """Grow trees until the validation error no longer falls."""
        with needs_extra(PredictorError, "lightgbm", "baselines", "this predictor"):
            import lightgbm
        default, share = self.params["min_data_in_leaf"], self.params["bagging_fraction"]
        leaf = leaf_size(default, share, len(x))
        params = {
            **self.params,
            "min_data_in_leaf": leaf,
            "histogram_pool_size": HISTOGRAMS_MB,
            "max_bin": BINS,
            "seed": seed,
            "verbosity": -1,
            "metric": "l2",
            # Few rows and many columns; also the same trees with one thread and with many.
            "deterministic": True,
            "force_col_wise": True,
            # Weights are hardly ever zero, so no two columns share one; to look takes a second.
            "enable_bundle": False,
            "num_threads": self.threads or 0,
        }
        data = lightgbm.Dataset(x, y)
        sets: list[Any] = []
        stops: list[Any] = []
        if held is not None:
            sets = [lightgbm.Dataset(*held, reference=data)]
            stops = [lightgbm.early_stopping(self.patience, verbose=False)]
        booster = lightgbm.train(params, data, self.rounds, valid_sets=sets, callbacks=stops)
        text = booster.model_to_string(num_iteration=booster.best_iteration)
        self._trees = lightgbm_trees(text)


def lightgbm_trees(text: str) -> TreeEnsemble:
    """Trees of a LightGBM model text; an averaging ensemble has its leaves divided."""
    head, *parts = text.partition("\nend of trees\n")[0].split("\nTree=")
    header = dict(line.partition("=")[::2] for line in head.splitlines())
    share = len(parts) if "average_output" in header else 1
    trees = []
    for part in parts:
        lines = dict(line.partition("=")[::2] for line in part.splitlines())
        leaves = np.array(lines["leaf_value"].split(), np.float64) / share
        inner, leaf_nodes = len(leaves) - 1, np.full(len(leaves), -1)
        # LightGBM counts leaves -1, -2, …; here they follow the inner nodes.
        sides = [np.array(lines.get(k, "").split(), int) for k in ("left_child", "right_child")]
        left, right = (np.append(np.where(s < 0, inner + ~s, s), leaf_nodes) for s in sides)
        feature = np.append(np.array(lines.get("split_feature", "").split(), int), leaf_nodes)
        limits = np.append(np.array(lines.get("threshold", "").split(), float), leaf_nodes)
        trees.append((left, right, feature, limits, np.append(np.zeros(inner), leaves)))
    return TreeEnsemble.join(trees)


def xgboost_trees(booster: Any) -> TreeEnsemble:
    """Trees of an XGBoost booster."""
    learner = json.loads(bytes(booster.save_raw("json")))["learner"]
    trees = []
    for tree in learner["gradient_booster"]["model"]["trees"]:
        condition = np.array(tree["split_conditions"], np.float32)
        # XGBoost goes left where x < threshold in float32; a leaf keeps its value there.
        limits = np.nextafter(condition, np.float32(-np.inf))
        trees.append((tree["left_children"], tree["right_children"], tree["split_indices"], limits,
                      condition))  # fmt: skip
    return TreeEnsemble.join(trees, float(learner["learner_model_param"]["base_score"].strip("[]")))


def leaf_size(default: int, share: float, networks: int) -> int:
    """Smallest number of networks in a leaf.

    The authors' number is for thousands of networks. Where the networks of a tree do not fill two
    such leaves, no tree could split and all predictions would be equal: then a leaf holds at least
    a tenth of the networks.

    >>> leaf_size(50, 0.8, 1000), leaf_size(50, 0.8, 100)
    (50, 10)

    Args:
        default: the number for many networks.
        share: share of the networks drawn for each tree.
        networks: size of the training set.
    """
    return default if share * networks >= 2 * default else max(1, networks // 10)
