"""Regressors of scikit-learn as predictors: they learn, are stored as data, and fail by name."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.models import Batch, InvariantMLP, Tabular, WeightsMLP

pytest.importorskip("skops")
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler


def xgboost_regressor() -> Any:
    xgboost = pytest.importorskip("xgboost")
    return xgboost.XGBRegressor(n_estimators=10, max_depth=3, subsample=0.7, n_jobs=1)


CASES: dict[str, Callable[[], Any]] = {
    "forest": lambda: RandomForestRegressor(10),
    "ridge": Ridge,
    "pipeline": lambda: make_pipeline(StandardScaler(), PCA(20), RandomForestRegressor(5)),
    "logarithm": lambda: make_pipeline(FunctionTransformer(np.arctan), Ridge()),
    "target": lambda: TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
    "xgboost": xgboost_regressor,
}
RANDOM = ("forest", "pipeline", "xgboost")


def networks(n: int, seed: int = 0) -> tuple[Batch, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {f"classifier.W_{i}": torch.randn(n, 4, 6, generator=draw) for i in range(3)}
    accuracy = torch.sigmoid(5 * tensors["classifier.W_0"].mean((1, 2)))
    return Batch.of(tensors), accuracy


def fitted(estimator: Any, reads: str = "statistics", seed: int = 0, n: int = 80) -> Tabular:
    return Tabular(reads, estimator).fit(*networks(n), validation=networks(10, 1), seed=seed)


@pytest.mark.parametrize("reads", ["statistics", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_an_estimator_is_fitted_and_comes_back_the_same(
    case: str, reads: str, tmp_path: Path
) -> None:
    predictor = fitted(CASES[case](), reads)
    network, _ = networks(50, 2)
    predicted = predictor.predict(network)
    assert predicted.dtype == torch.float32
    assert len(predicted.unique()) > 30
    predictor.save(tmp_path)
    back = Tabular.load(tmp_path)
    assert torch.equal(back.predict(network), predicted)
    assert back.settings == predictor.settings == {"reads": reads, "learner": "Estimator"}
    assert back.num_parameters is None
    assert {p.name for p in tmp_path.iterdir()} == {"predictor.json", "estimator.skops"}
    again = back.save(tmp_path / "again")
    assert (again / "predictor.json").read_bytes() == (tmp_path / "predictor.json").read_bytes()


@pytest.mark.parametrize("case", RANDOM)
def test_every_seed_has_its_own_copy(case: str) -> None:
    network, _ = networks(50, 2)
    estimator = CASES[case]()
    template = Tabular("statistics", estimator)
    one, same, other = (template.fresh().fit(*networks(80), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.predict(network), same.predict(network))
    assert not torch.equal(one.predict(network), other.predict(network))
    assert not hasattr(estimator, "n_features_in_")
    assert template.width is None
    assert one.fresh().width is None
    with pytest.raises(TransformerNFNError, match="has to be fitted"):
        one.fresh().predict(network)


def test_a_predictor_with_a_name_is_a_template_too() -> None:
    network, accuracy = networks(40)
    template = WeightsMLP(epochs=2).fit(network, accuracy)
    expected = template.predict(network)
    other = template.fresh().fit(network, accuracy, seed=1)
    assert type(other) is WeightsMLP
    assert not torch.equal(other.predict(network), expected)
    assert torch.equal(template.predict(network), expected)


def test_a_learner_by_name_reads_any_table(tmp_path: Path) -> None:
    network, accuracy = networks(40)
    for reads in ("packed", "statistics"):
        made = Tabular(reads, "SmallMLP", epochs=3).fit(network, accuracy)
        back = Tabular.load(made.save(tmp_path / reads))
        assert torch.equal(back.predict(network), made.predict(network))
        assert back.settings == {"reads": reads, "learner": "SmallMLP", "epochs": 3}
    with pytest.raises(TransformerNFNError, match="kind Tabular, expected InvariantMLP"):
        InvariantMLP.load(tmp_path / "packed")


class Constant(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Predicts one value in some shape, and counts how many rows it learns."""

    rows: tuple[int, ...] = ()

    def __init__(self, value: float = 0.5, shape: tuple[int, ...] = (-1,)) -> None:
        self.value, self.shape = value, shape

    def fit(self, x: np.ndarray, y: np.ndarray) -> Constant:
        Constant.rows += (len(x),)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self.value).reshape(self.shape)


class Broken(Constant):
    """Raises in `fit`."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> Constant:
        raise ValueError("no such solver\nat all")


REFUSED: dict[str, tuple[Any, str]] = {
    "untrusted": (
        Constant(),
        r"^Constant cannot be stored without pickle \(.*Untrusted types .*\.Constant'\]\.\)$",
    ),
    "untrusted, of scikit-learn": (
        HistGradientBoostingRegressor(),
        r"^HistGradientBoostingRegressor cannot be stored .*\.TreePredictor'",
    ),
    "untrusted part": (
        TransformedTargetRegressor(Constant()),
        r"^TransformedTargetRegressor cannot be stored .*\.Constant'",
    ),
    "unknown function": (
        make_pipeline(FunctionTransformer(abs), Ridge()),
        r"^Pipeline cannot be stored .*builtins\.abs'",
    ),
    "a column": (
        Constant(shape=(-1, 1)),
        r"^Constant must predict one number for each network, found \[16, 1\] for 16$",
    ),
    "a row": (Constant(shape=(1, -1)), r"found \[1, 16\] for 16$"),
    "not a number": (Constant(float("nan")), "^Constant predicts values that are not finite$"),
    "infinite": (Constant(float("inf")), "^Constant predicts values that are not finite$"),
    "fails": (Broken(), r"^Broken cannot be fitted \(ValueError: no such solver\)$"),
    "a class": (Ridge, "ABCMeta cannot be fitted .*instance of scikit-learn estimator instead"),
    "no regressor": (StandardScaler(), "StandardScaler cannot predict"),
    "a number": (5, "int cannot be fitted .*does not seem to be a scikit-learn estimator"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_by_name_before_the_training(case: str) -> None:
    estimator, words = REFUSED[case]
    Constant.rows = ()
    with pytest.raises(TransformerNFNError, match=words) as caught:
        fitted(estimator)
    assert len(str(caught.value).splitlines()) == 1
    assert set(Constant.rows) <= {16}


def test_unknown_tables_and_learners_are_refused() -> None:
    with pytest.raises(TransformerNFNError, match="packed, statistics or invariants, found 'all'"):
        Tabular("all", Ridge())
    with pytest.raises(TransformerNFNError, match="there is no learner 'Ridge'"):
        Tabular("packed", "Ridge")


def test_an_estimator_that_needs_more_rows_than_the_trial_has_is_fitted() -> None:
    predictor = fitted(make_pipeline(PCA(20), Ridge()), "packed", n=300)
    network, accuracy = networks(50, 2)
    predicted = predictor.predict(network)
    assert float(torch.corrcoef(torch.stack([predicted, accuracy]))[0, 1]) > 0.2


def test_a_known_function_is_learned() -> None:
    network, accuracy = networks(50, 2)
    predicted = fitted(Ridge(), "packed", n=300).predict(network)
    assert float(torch.corrcoef(torch.stack([predicted, accuracy]))[0, 1]) > 0.9


def test_networks_whose_numbers_overflow_have_no_prediction() -> None:
    predictor = fitted(RandomForestRegressor(5))
    network, _ = networks(4, 2)
    wide = torch.linspace(-1e30, 1e30, 24).view(4, 6)  # the variance overflows
    network.views["classifier.W_1"][1] = wide
    network.views["classifier.W_2"][2] = torch.inf
    assert predictor.predict(network).isnan().tolist() == [False, True, True, False]


def test_a_type_that_is_not_trusted_is_not_loaded(tmp_path: Path) -> None:
    import skops.io

    folder = fitted(Ridge()).save(tmp_path)
    path = folder / "predictor.json"
    for data, words in (
        (skops.io.dumps(Constant()), r"Untrusted types .*\.Constant"),
        ((folder / "estimator.skops").read_bytes()[:2000], r"estimator\.skops is not readable"),
    ):
        (folder / "estimator.skops").write_bytes(data)
        metadata = json.loads(path.read_text())
        metadata["sha256"]["estimator.skops"] = hashlib.sha256(data).hexdigest()
        path.write_text(json.dumps(metadata))
        with pytest.raises(TransformerNFNError, match=f"holds no readable predictor: .*{words}"):
            Tabular.load(folder)


def test_a_missing_skops_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "skops"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "skops", None)
    with pytest.raises(TransformerNFNError, match=r"pip install 'transformer-nfn\[baselines\]'"):
        fitted(Ridge())


@pytest.mark.nightly
def test_nothing_but_an_estimator_imports_scikit_learn() -> None:
    code = "import sys, transformer_nfn.models; assert not {'sklearn', 'skops'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
