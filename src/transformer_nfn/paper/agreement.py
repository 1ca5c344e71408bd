"""Does a predictor say the same of U and of gU, the same function in other weights?"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from transformer_nfn.models import map_network
from transformer_nfn.paper.augmentation import MAX_CONDITION, TEST_PART, disguised
from transformer_nfn.prediction.data import Dataset
from transformer_nfn.prediction.predictors import NEURAL, Predictor


def agreement(
    predictors: Sequence[Predictor], test: Dataset, bound: float, seed: int = 0
) -> dict[str, Any]:
    """The largest difference between predictions for gU and U, over networks and predictors.

    In float32 as augmented networks are stored, so the rounding of gU counts. In float64 the
    weights are cast before the same group elements act, so the number is about the model alone;
    None for predictors that compute in float32 whatever they are given.

    Args:
        predictors: fitted, in main memory.
        test: the test part that `augmented` made: every network, then each in disguise.
        bound, seed: as `augmented` was called with.
    """
    test = test.to("cpu")
    half = len(test) // 2
    plain, moved = (test.take(torch.arange(half) + start) for start in (0, half))
    wide = replace(plain, network=map_network(plain.network, lambda w: w.double()))
    wide_moved = disguised(wide, bound, seed + TEST_PART)
    largest: dict[str, float | None] = {"float32": 0.0, "float64": 0.0}
    for predictor in predictors:
        _raise(largest, "float32", predictor, plain, moved)
        if predictor.name in NEURAL:
            exact = Predictor(predictor.name, copy.deepcopy(predictor.inner).double())
            _raise(largest, "float64", exact, wide, wide_moved)
        else:
            largest["float64"] = None
    return {**largest, "networks": half, "max_condition": MAX_CONDITION}


def _raise(
    largest: dict[str, float | None], key: str, predictor: Predictor, U: Dataset, gU: Dataset
) -> None:
    apart = float((predictor.predict(gU) - predictor.predict(U)).abs().max())
    largest[key] = max(largest[key] or 0.0, apart)
