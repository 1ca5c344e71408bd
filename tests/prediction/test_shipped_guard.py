"""The shipped predictors with a guard are not fooled by networks without function."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from transformer_nfn.prediction.predict import Prediction, predict
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage_record import damages
from transformer_nfn.zoo.training import damaged_zoo

CHANCE, NEAR = 0.1, 0.1


@pytest.fixture(scope="module", params=["mnist-boosting", "mnist-whole"])
def broken(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Zoo, list[Prediction]]:
    """All of mnist-sample, shuffled and untrained, and what a predictor says of them.

    Theirs is chance, so no test data are needed to know it.
    """
    out: Path = tmp_path_factory.mktemp("broken") / "mnist"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(damaged_zoo, "_load_task", lambda *_: SimpleNamespace(to=lambda _: None))
        at_chance = lambda _, w, __: (torch.full((len(w),), 2.3), torch.full((len(w),), CHANCE))  # noqa: E731
        patch.setattr(damaged_zoo, "measure", at_chance)
        damaged_zoo.damage_zoo("mnist-sample", out, kinds="shuffled:1,untrained")
    zoo = Zoo.open(out)
    return zoo, predict(request.param, zoo)


@pytest.mark.parametrize("kind", ["shuffled", "untrained"])
def test_networks_without_function_are_warned_of_or_told_as_such(
    broken: tuple[Zoo, list[Prediction]], kind: str
) -> None:
    zoo, found = broken
    of_kind = [p for p, d in zip(found, damages(zoo), strict=True) if d.kind == kind]
    seen_through = [p.warning is not None or abs(p.accuracy - CHANCE) <= NEAR for p in of_kind]
    assert len(of_kind) == 160
    assert float(np.mean(seen_through)) >= 0.99


@pytest.mark.parametrize("name", ["mnist-boosting", "mnist-whole"])
def test_few_healthy_networks_are_warned_of_and_the_rest_keep_their_intervals(name: str) -> None:
    found = predict(name, "mnist-sample")
    warned = np.array([p.warning is not None for p in found])
    truth = np.array([p.recorded["test_accuracy"] for p in found if p.recorded is not None])
    held = np.array([p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    assert float(warned.mean()) <= 0.05
    assert float(held.mean()) >= 0.95
