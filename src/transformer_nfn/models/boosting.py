"""Gradient-boosted trees on the flattened weights, by XGBoost and LightGBM, as in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from transformer_nfn.models.predictor import PredictorError, TabularPredictor, optional
from transformer_nfn.models.tree_files import checked_lightgbm, checked_xgboost

MANY = 2000
Held = tuple[np.ndarray, np.ndarray] | None


class XGBoostPredictor(TabularPredictor):
    """XGBoost on the flattened weights, with the authors' settings.

    Args:
        rounds: trees.
        params: of XGBoost, in place of or besides the authors'.
        threads: None for as many as OpenMP allows.
    """

    PARAMS: Mapping[str, Any] = {
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

    def __init__(
        self,
        rounds: int = 50,
        params: Mapping[str, Any] | None = None,
        threads: int | None = None,
    ) -> None:
        self.settings = {"rounds": rounds, "params": dict(params or {}), "threads": threads}
        self._booster: Any = None

    def _learn(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        xgboost = optional("xgboost")
        leaf = leaf_size(self.PARAMS["min_child_weight"], self.PARAMS["subsample"], len(x))
        params = {"max_bin": bins(len(x)), **self.PARAMS, "min_child_weight": leaf}
        params |= self.settings["params"]
        params |= {"seed": seed, "verbosity": 0}
        if self.settings["threads"] is not None:
            params["nthread"] = self.settings["threads"]
        data = xgboost.DMatrix(x, y, nthread=self.settings["threads"])
        self._booster = xgboost.train(params, data, self.settings["rounds"])

    def _read(self, x: np.ndarray) -> np.ndarray:
        out: np.ndarray = self._booster.inplace_predict(x)
        return out

    def _files(self) -> dict[str, bytes]:
        return {"model.ubj": bytes(self._booster.save_raw("ubj"))}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        xgboost = optional("xgboost")
        self._booster = xgboost.Booster()
        try:
            checked = checked_xgboost(files["model.ubj"], self.width or 0)
            self._booster.load_model(bytearray(checked))
        except xgboost.core.XGBoostError as error:
            raise PredictorError(f"XGBoost does not read model.ubj: {error}") from error


class LightGBMPredictor(TabularPredictor):
    """LightGBM on the flattened weights, with the authors' settings.

    Args:
        rounds: trees at most.
        patience: rounds without a better validation error before it stops.
        params: of LightGBM, in place of or besides the authors'.
        threads: None for as many as OpenMP allows.
    """

    PARAMS: Mapping[str, Any] = {
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

    def __init__(
        self,
        rounds: int = 1000,
        patience: int = 50,
        params: Mapping[str, Any] | None = None,
        threads: int | None = None,
    ) -> None:
        self.settings = {
            "rounds": rounds,
            "patience": patience,
            "params": dict(params or {}),
            "threads": threads,
        }
        self._booster: Any = None

    def _learn(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        params = {**with_leaf_size(self.PARAMS, len(x)), **self.settings["params"]}
        self._booster = train_lightgbm(params, x, y, held, seed, self.settings)

    def _read(self, x: np.ndarray) -> np.ndarray:
        out: np.ndarray = self._booster.predict(x, num_threads=self.settings["threads"] or 0)
        return out

    def _files(self) -> dict[str, bytes]:
        return {"model.txt": self._booster.model_to_string().encode()}

    def _restore(self, files: Mapping[str, bytes]) -> None:
        checked = checked_lightgbm(files["model.txt"], self.width or 0)
        self._booster = read_lightgbm(checked.encode())


def train_lightgbm(
    params: Mapping[str, Any],
    x: np.ndarray,
    y: np.ndarray,
    held: Held,
    seed: int,
    settings: Mapping[str, Any],
) -> Any:
    """A LightGBM booster, stopped early where there is something to stop on."""
    lightgbm = optional("lightgbm")
    fixed = {
        "max_bin": params.get("max_bin", bins(len(x))),
        "seed": seed,
        "verbosity": -1,
        "metric": "l2",
        # Few rows and many columns; also the same trees with one thread and with many.
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": settings["threads"] or 0,
    }
    data = lightgbm.Dataset(x, y)
    sets, stops = [], []
    if held is not None:
        sets = [lightgbm.Dataset(*held, reference=data)]
        stops = [lightgbm.early_stopping(settings["patience"], verbose=False)]
    booster = lightgbm.train(
        {**params, **fixed}, data, settings["rounds"], valid_sets=sets, callbacks=stops
    )
    # Only the rounds up to the best one are kept, so what is read back is what was fitted.
    return read_lightgbm(booster.model_to_string(num_iteration=booster.best_iteration).encode())


def read_lightgbm(text: bytes) -> Any:
    """A LightGBM booster from its model text."""
    lightgbm = optional("lightgbm")
    try:
        return lightgbm.Booster(model_str=text.decode())
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
        raise PredictorError(f"LightGBM does not read model.txt: {error}") from error


def leaf_size(usual: int, share: float, networks: int) -> int:
    """Networks that a leaf holds at least.

    The authors' number is for thousands of networks. Where the networks that a tree learns from do
    not fill two such leaves, no tree could split and all predictions would be one number: then a
    leaf holds a tenth of the networks at least.

    Args:
        usual: the number for many networks.
        share: of the networks, drawn at random for each tree.
        networks: of the training set.
    """
    return usual if share * networks >= 2 * usual else max(1, networks // 10)


def with_leaf_size(params: Mapping[str, Any], networks: int) -> dict[str, Any]:
    """Parameters of LightGBM with the leaf size for so many networks."""
    leaf = leaf_size(params["min_data_in_leaf"], params["bagging_fraction"], networks)
    return {**params, "min_data_in_leaf": leaf}


def bins(networks: int) -> int:
    """How many steps a weight is cut into: the libraries' own number where it can matter.

    A choice of ours, for time: histograms of 18,000 weights are where it goes, and with 50
    networks in a leaf 63 steps are fine enough for a thousand networks.
    """
    return 255 if networks >= MANY else 63
