"""Regressors of scikit-learn as learners, stored by skops: as data of trusted types, not pickled.

Loading runs no code of the file. But neither skops nor XGBoost checks the arrays of a tree, as
`trees` does: a file made to harm can crash the process. Load estimators from trusted sources only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_nfn.errors import needs_extra
from transformer_nfn.models.learners import Held, Learner, PredictorError

FILE = "estimator.skops"
TRIAL = 16
"""Rows of the fit before training that shows whether an estimator can be stored."""
TRUSTED = tuple(
    f"xgboost.{name}" for name in ("core.Booster", "sklearn.XGBRegressor", "sklearn.XGBRFRegressor")
)
"""Types beside those that skops trusts: XGBoost keeps its trees in its own binary JSON."""
LARGEST = np.finfo(np.float32).max
"""Many estimators compute in float32: larger numbers have no prediction."""


class _FitError(PredictorError):
    """An estimator whose fit fails, maybe for too few rows."""


@dataclass
class Estimator(Learner):
    """A regressor with the interface of scikit-learn, cloned for every fit.

    Every ``random_state`` of it, also within a pipeline, is the seed of the fit. Validation
    networks are not used.

    Attributes:
        estimator: the regressor, which is only cloned; None for one that is restored.
    """

    estimator: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        """None: the file holds the estimator with its parameters."""
        return {}

    def fit(self, x: np.ndarray, y: np.ndarray, held: Held, seed: int) -> None:
        """Fit a few rows first: what cannot be stored is refused before the training."""
        with warnings.catch_warnings(), suppress(_FitError):
            warnings.simplefilter("ignore")
            self._learn(x[:TRIAL], y[:TRIAL], seed)
        self._fitted, self._data = self._learn(x, y, seed)

    def _learn(self, x: np.ndarray, y: np.ndarray, seed: int) -> tuple[Any, bytes]:
        with needs_extra(PredictorError, "skops", "baselines", "a regressor of scikit-learn"):
            import skops.io
            from sklearn.base import clone
        with _explained(f"{self._name} cannot be fitted", _FitError):
            fitted = clone(self.estimator)
            states = [k for k in fitted.get_params() if k.split("__")[-1] == "random_state"]
            fitted.set_params(**dict.fromkeys(states, seed)).fit(x, y)
        if not np.isfinite(self._predictions(fitted, x[:TRIAL])).all():
            raise PredictorError(f"{self._name} predicts values that are not finite")
        with _explained(f"{self._name} cannot be stored without pickle"):
            data = skops.io.dumps(fitted)
            return skops.io.loads(data, trusted=TRUSTED), data

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Prediction for each row; NaN where the numbers are not finite in float32."""
        out = np.full(len(x), np.nan)
        usable = (np.abs(x) <= LARGEST).all(1)
        if usable.any():
            out[usable] = self._predictions(self._fitted, x[usable])
        return out

    def files(self) -> dict[str, bytes]:
        """The fitted estimator as skops writes it."""
        return {FILE: self._data}

    def restore(self, files: Mapping[str, bytes], width: int) -> None:
        """Read an estimator; rejects types that are not trusted."""
        with needs_extra(PredictorError, "skops", "baselines", "a regressor of scikit-learn"):
            import skops.io
        self._data = files[FILE]
        with _explained(f"{FILE} is not readable"):
            self.estimator = self._fitted = skops.io.loads(self._data, trusted=TRUSTED)

    @property
    def _name(self) -> str:
        return type(self.estimator).__name__

    def _predictions(self, fitted: Any, x: np.ndarray) -> np.ndarray:
        with _explained(f"{self._name} cannot predict"):
            found = np.asarray(fitted.predict(x), np.float64)
        if found.shape != (len(x),):
            raise PredictorError(
                f"{self._name} must predict one number for each network, found "
                f"{list(found.shape)} for {len(x)}"
            )
        return found


@contextmanager
def _explained(what: str, kind: type[PredictorError] = PredictorError) -> Iterator[None]:
    """Errors of foreign code as one sentence."""
    try:
        yield
    except PredictorError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise kind(f"{what} ({type(error).__name__}: {reason})") from error
