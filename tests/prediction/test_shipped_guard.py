"""The shipped predictors with a guard are not fooled by networks without function."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from transformer_nfn.prediction.predict import Prediction, predict
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import damages
from transformer_nfn.zoo.training import damage as damaged_zoo

CHANCE, NEAR = 0.1, 0.1


GUARDED = ["mnist-boosting", "mnist-whole", "mnist-nfn"]


@pytest.fixture(scope="module")
def broken_zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """All of mnist-sample, shuffled and untrained.

    Theirs is chance, so no test data are needed to know it.
    """
    out: Path = tmp_path_factory.mktemp("broken") / "mnist"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(damaged_zoo, "_load_task", lambda *_: SimpleNamespace(to=lambda _: None))
        at_chance = lambda _, w, __: (torch.full((len(w),), 2.3), torch.full((len(w),), CHANCE))  # noqa: E731
        patch.setattr(damaged_zoo, "measure", at_chance)
        damaged_zoo.damage_zoo(
            "mnist-sample", out, damaged_zoo.DamageOptions(kinds="shuffled:1,untrained")
        )
    return Zoo.open(out)


@pytest.fixture(scope="module", params=GUARDED)
def broken(
    request: pytest.FixtureRequest, broken_zoo: Zoo
) -> tuple[str, dict[str, list[Prediction]]]:
    """What a predictor says of them, by kind."""
    found: dict[str, list[Prediction]] = {"shuffled": [], "untrained": []}
    said = predict(request.param, broken_zoo)
    for prediction, damage in zip(said, damages(broken_zoo), strict=True):
        found[damage.kind].append(prediction)
    return request.param, found


@pytest.mark.parametrize("kind", ["shuffled", "untrained"])
def test_networks_without_function_are_warned_of_or_told_as_such(
    broken: tuple[str, dict[str, list[Prediction]]], kind: str
) -> None:
    _, found = broken
    assert len(found[kind]) == 160
    warned = np.array([p.warning is not None for p in found[kind]])
    near = np.array([abs(p.accuracy - CHANCE) <= NEAR for p in found[kind]])
    held = np.array([p.low <= CHANCE <= p.high for p in found[kind]])
    assert float((warned | near).mean()) >= 0.99
    assert float((warned | held).mean()) >= 0.99


@pytest.mark.parametrize("name", GUARDED)
def test_few_healthy_networks_are_warned_of_and_the_rest_keep_their_intervals(name: str) -> None:
    found = predict(name, "mnist-sample")
    warned = np.array([p.warning is not None for p in found])
    truth = np.array([p.recorded["test_accuracy"] for p in found if p.recorded is not None])
    held = np.array([p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    assert float(warned.mean()) <= 0.05
    assert float(held.mean()) >= 0.95
