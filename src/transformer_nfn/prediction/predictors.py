"""Predictors of a run: loading them, and what their seeds say together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models.own_code import Code
from transformer_nfn.models.own_module import reopened
from transformer_nfn.models.predictor import Predictor, find
from transformer_nfn.prediction.data import Dataset
from transformer_nfn.prediction.runs import RUN_FILE, RunError, RunRecord
from transformer_nfn.prediction.target import Target

SMALLEST_SHARE = 1e-6
"""Of a class, so that shares that are all 0 are equal probabilities."""


def prepared(predictor: Predictor, data: Dataset) -> Dataset:
    """Networks with what every seed would have to compute of them."""
    return replace(data, network=predictor.prepared(data.network))


def predictor_builder(
    name: str, data: Dataset | Sequence[Dataset], options: Mapping[str, Any]
) -> Callable[[], Any]:
    """A function that builds a fresh predictor of a name, for networks like these."""
    each = [data] if isinstance(data, Dataset) else data
    cls = find(name, each[0].kind)

    def build() -> Any:
        try:
            return cls.of_all(each, **options)
        except (TypeError, ValueError, OverflowError) as error:
            if not options:
                raise
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise RunError(f"'{name}' does not take the options {given[:200]} ({error})") from error

    return build


def load_predictors(
    run: Path, record: RunRecord, *, trust: bool = False, model: str | None = None
) -> list[Predictor]:
    """Load the predictor of every seed of a run.

    Args:
        run: its folder.
        record: of it.
        trust: whether code of a user may be imported, if it is what the run was trained with.
        model: a reference to a user's class that is taken whatever its code is.
    """
    name = record.model
    if record.code is not None:
        name = reopened(Code(**record.code), trust=trust, model=model)
    elif model is not None:
        raise RunError(f"'{run}' was trained with {name}: --model is for classes of users")
    try:
        cls = find(name, record.kind)
    except RunError as error:
        raise RunError(f"'{run / RUN_FILE}': {error}") from error
    folders = [run / f"seed-{row['seed']}" for row in record.seeds]
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"the run keeps no predictor: there is no folder '{folder}'")
    return [cls.load(folder) for folder in folders]


def seed_predictions(predictors: Sequence[Predictor], data: Dataset) -> Tensor:
    """Prediction of each seed of a run, ``[seeds, n]`` in float64."""
    if not len(data):
        return torch.empty(len(predictors), 0, dtype=torch.float64)
    network = prepared(predictors[0], data).network
    return torch.stack([p.predict(network) for p in predictors]).double()


def class_folders(run: Path, target: Target) -> list[Path]:
    """Folder of the run of each class that has predictors; none unless classes are predicted."""
    return [run / f"class-{target.classes.index(name)}" for name in target.outputs]


def class_probabilities(predictors: Sequence[Sequence[Predictor]], data: Dataset) -> np.ndarray:
    """Probability of each class by each seed, ``[seeds, classes, n]``.

    Args:
        predictors: for each class one per seed; of two classes for the second only.
        data: the networks.
    """
    belongs = np.stack([seed_predictions(each, data).numpy() for each in predictors], 1)
    if belongs.shape[1] == 1:
        return np.concatenate([1 - belongs, belongs], 1)
    belongs = np.maximum(belongs, SMALLEST_SHARE)
    return np.asarray(belongs / belongs.sum(1, keepdims=True))


def mean_prediction(predictors: Sequence[Predictor], data: Dataset) -> Tensor:
    """Mean prediction over seeds, ``[n]`` in float64."""
    return seed_predictions(predictors, data).mean(0)
