"""Networks of recipes outside the training set: intervals that hold, and few false warnings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from transformer_nfn.checkpoints import open_model
from transformer_nfn.models import Batch, RowLayout
from transformer_nfn.models.invariants import FEATURES
from transformer_nfn.prediction.data import Dataset
from transformer_nfn.prediction.guard.own import (
    OWN_GUARD_FILE,
    OwnGuard,
    damaged_copies,
    fit_to_features,
)
from transformer_nfn.prediction.recipe_shift import RecipeShift, measure_shift
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.prediction.training_set import TrainingSetDistance
from transformer_nfn.testing import write_example_checkpoint

F = 12


def made_networks(recipe: float, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features and accuracies; a recipe moves one feature, and the accuracy in another way."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, F, generator=draw, dtype=torch.float64)
    x[:, 1] = recipe + 0.3 * x[:, 1]
    return x, torch.sigmoid(0.5 * x[:, 0] - abs(recipe) + 0.1 * x[:, 2])


def made_dataset(recipes: dict[str, float], n: int, seed: int = 0) -> Dataset:
    parts = [made_networks(value, n, seed + i) for i, value in enumerate(recipes.values())]
    columns = {
        "row": np.arange(n * len(recipes)),
        "recipe optimizer": np.repeat(np.array([*recipes], dtype=object), n),
        "recipe label": np.array([f"run-{i}" for i in range(n * len(recipes))], dtype=object),
    }
    features = torch.cat([x for x, _ in parts])
    network = Batch.of_rows(torch.empty(len(features), 0), RowLayout({})).plus(FEATURES, features)
    accuracy = torch.cat([y for _, y in parts]).float()
    return Dataset(None, network, accuracy, columns)


def test_intervals_widen_with_novelty_up_to_the_whole_range() -> None:
    shift = RecipeShift(usual=0.2, unusual=0.4, factor=3.0)
    mean, novelty = torch.full((4,), 0.5).double(), torch.tensor([0.1, 0.3, 0.5, 1.1])
    low, high = shift.interval(mean, 0.1, novelty)
    assert (high - low).tolist() == pytest.approx([0.2, 0.4, 0.6, 1.0])
    assert (float(low[3]), float(high[3])) == (0.0, 1.0)
    low, high = RecipeShift().interval(mean, 0.1, novelty)
    assert (high - low).tolist() == pytest.approx([0.2, 0.2, 0.2, 1.0])


def test_the_factor_is_measured_by_leaving_out_recipes() -> None:
    data = made_dataset({"sgd": -2.0, "adam": 0.0, "lion": 2.0}, 40)
    order = np.random.default_rng(0).permutation(len(data))
    mixed = {**data.columns, "recipe optimizer": data.columns["recipe optimizer"][order]}
    distance = TrainingSetDistance.of([data])
    wide, narrow = (
        measure_shift(distance, [replace(data, columns=columns)])
        for columns in (data.columns, mixed)
    )
    assert wide.factor > 1.1 * narrow.factor >= 1
    assert 0 < wide.usual < wide.unusual < 1


def test_own_guard_warns_of_damage_and_seldom_of_healthy_networks(tmp_path: Path) -> None:
    train = made_dataset({"sgd": -1.0, "adam": 1.0}, 60)
    healthy = train.network.computed[FEATURES]
    damage = torch.zeros(F, dtype=torch.float64)
    damage[3:6] = 4.0
    draw = torch.Generator().manual_seed(9)
    noise = torch.randn(len(healthy), 3, F, generator=draw, dtype=torch.float64)
    guard = fit_to_features(train, healthy[:, None] + damage + 0.3 * noise, floor=0.3)
    other, _ = made_networks(0.0, 200, seed=7)
    high, low = torch.ones(200).double(), torch.zeros(200).double()
    assert float((guard.outlier_score(other, high) > 1).double().mean()) <= 0.05
    assert float((guard.outlier_score(other + damage, high) > 1).double().mean()) >= 0.95
    # Below the floor the interval holds what damage could do.
    assert bool((guard.outlier_score(other + damage, low) <= 1).all())
    guard.save(tmp_path)
    again = OwnGuard.load(tmp_path)
    assert again is not None
    assert torch.equal(again.outlier_score(other, high), guard.outlier_score(other, high))


def test_a_malformed_own_guard_is_rejected(tmp_path: Path) -> None:
    assert OwnGuard.load(tmp_path) is None
    (tmp_path / OWN_GUARD_FILE).write_bytes(b"nothing")
    with pytest.raises(RunError, match="not readable"):
        OwnGuard.load(tmp_path)


def test_damaged_copies_are_networks_of_the_same_entries(tmp_path: Path) -> None:
    with open_model(write_example_checkpoint(tmp_path / "model")) as model:
        copies = damaged_copies(model, "0")
        names = [name for name, shape in model.names.items() if len(shape) > 1]
        for name in names:
            original = model[name].float()
            shuffled, pruned = (copies[kind][name].float() for kind in ("shuffled", "pruned"))
            assert torch.equal(shuffled.flatten().sort().values, original.flatten().sort().values)
            assert not torch.equal(shuffled, original)
            assert float((pruned == 0).double().mean()) == pytest.approx(0.8, abs=0.01)
        block = {n for n in names if not torch.equal(copies["block"][n], model[n])}
        assert 0 < len(block) < len(names)
        assert len({name.split(".")[0] for name in block}) == 1
        again = damaged_copies(model, "0")
        assert all(torch.equal(again["noise"][n], copies["noise"][n]) for n in names)
