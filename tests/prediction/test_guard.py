"""A guard: what it is fitted to, what it stores, and that damaged networks do not fool it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from transformer_nfn.models import network_of
from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.data import DamagedNetworks, Dataset, Parts
from transformer_nfn.prediction.guard import GUARD_FILE, Guard
from transformer_nfn.prediction.guard.fit import (
    fit_guard,
)
from transformer_nfn.prediction.guard.guard import CHANCE_RAMP
from transformer_nfn.prediction.guard.responses import responses
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import NetworkSizes

SIZES = NetworkSizes(16, 10, 4)


def network(n: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Random weights of digits networks."""
    draw = torch.Generator().manual_seed(seed)
    shapes = SIZES.space.shapes
    return {k: torch.randn(n, *shape, generator=draw) for k, shape in shapes.items()}


def test_tensor_features_are_invariant() -> None:
    """Neurons in another order and scale, heads in another basis, B and b_B in another scale."""
    before = {k: w.double() for k, w in network().items()}
    after = dict(before)
    order, scale = torch.randperm(64), torch.rand(64, dtype=torch.float64) + 0.5
    after["blocks.0.W_A"] = (before["blocks.0.W_A"] * scale)[..., order]
    after["blocks.0.b_A"] = (before["blocks.0.b_A"] * scale)[..., order]
    after["blocks.0.W_B"] = (before["blocks.0.W_B"] / scale[:, None])[:, order]
    basis = torch.randn(16, 16, dtype=torch.float64)
    after["blocks.1.W_Q"] = before["blocks.1.W_Q"] @ basis
    after["blocks.1.W_K"] = before["blocks.1.W_K"] @ torch.linalg.inv(basis).mT
    for name in ("blocks.0.W_B", "blocks.0.b_B"):
        after[name] = 3 * after[name]
    first, second = (coupling_features(network_of(named)) for named in (before, after))
    assert torch.allclose(first, second, atol=1e-6)
    coupled = {**network(), "classifier.W_2": network()["classifier.W_1"].mT[..., :10].contiguous()}
    apart = coupling_features(network_of(coupled)) - coupling_features(network_of(network()))
    assert bool((apart.abs().amax(1) > 0.3).all())


def random_networks(n: int, seed: int, size: float = 1.0) -> Dataset:
    """Networks of random weights, with accuracies that their last layer decides."""
    named = {k: size * w for k, w in network(n, seed).items()}
    accuracy = torch.linspace(0.3, 0.9, n)
    named["classifier.W_2"] = named["classifier.W_2"] * accuracy[:, None, None]
    columns = {"run": np.array([f"{seed}-{i}" for i in range(n)], dtype=object)}
    return Dataset(SIZES.block_space, network_of(named), accuracy, columns)


@pytest.fixture(scope="module")
def fitted() -> tuple[Guard, Dataset]:
    """A guard of random networks, and the healthy ones that calibrated it."""
    train, val = random_networks(40, 1), random_networks(40, 2)
    broken = [replace(random_networks(30, s, 0.1), accuracy=torch.full((30,), 0.1)) for s in (3, 4)]
    kinds = np.array(["noise", "pruned"] * 15)
    damaged = DamagedNetworks(*broken, torch.full((30,), 0.5), kinds, kinds)
    predicted = val.accuracy + 0.05 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    on_damaged = torch.full((30,), 0.6)
    parts = Parts(train, val, val)
    return fit_guard(parts, damaged, SIZES, predicted, (on_damaged, on_damaged), steps=3), val


def test_a_stored_guard_gives_the_same_and_seldom_warns_of_healthy_networks(
    fitted: tuple[Guard, Dataset], tmp_path: Path
) -> None:
    guard, val = fitted
    guard.save(tmp_path)
    again = Guard.load(tmp_path)
    assert again is not None
    first, second = (g.assess(val, SIZES, val.accuracy.double()) for g in (guard, again))
    for name in ("accuracy", "low", "high", "outlier_score"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert float((first.outlier_score > 1).double().mean()) <= 0.05
    assert float(first.contains(val.accuracy.double()).double().mean()) >= 0.95


def test_a_network_without_a_warning_keeps_its_prediction(fitted: tuple[Guard, Dataset]) -> None:
    """Bit for bit; a damaged network with a high prediction triggers a warning."""
    guard, _ = fitted
    draw = torch.Generator().manual_seed(0)
    networks = [random_networks(40, seed, size) for seed, size in ((6, 1.0), (7, 0.5), (8, 0.1))]
    warned = []
    for data in networks:
        values = torch.linspace(0, 1, 40, dtype=torch.float64)
        predicted = values[torch.randperm(40, generator=draw)]
        assessed = guard.assess(data, SIZES, predicted)
        quiet = assessed.outlier_score <= 1
        estimate = guard.estimator(responses(data, SIZES, guard.inputs))
        kept = quiet & (estimate > guard.chance_threshold + CHANCE_RAMP)
        assert torch.equal(assessed.accuracy[kept], predicted[kept])
        assert bool((assessed.low <= assessed.accuracy).all())
        assert bool((assessed.accuracy <= assessed.high).all())
        warned.append(~quiet)
    # Above the floor a damaged network is detected; below it there are no warnings.
    high = guard.assess(networks[2], SIZES, torch.full((40,), 0.9).double())
    assert float((high.outlier_score > 1).double().mean()) > 0.9
    low = guard.assess(networks[2], SIZES, torch.full((40,), 0.1).double())
    assert bool((low.outlier_score <= 1).all())
    assert 0 < int(torch.cat(warned).sum()) < 120


def test_a_malformed_guard_is_rejected(fitted: tuple[Guard, Dataset], tmp_path: Path) -> None:
    assert Guard.load(tmp_path) is None
    (tmp_path / GUARD_FILE).write_bytes(b"nothing")
    with pytest.raises(RunError, match="not readable"):
        Guard.load(tmp_path)
    guard, _ = fitted
    for change, message in (
        ({"width": 0 * guard.width}, "'width' expected numbers above 0"),
        ({"floor": guard.floor / 0}, "'floor' holds values that are not finite"),
        (
            {"lower": guard.width[:2].clone()},
            "'lower' expected [] in float64, found [2] in torch.float64",
        ),
    ):
        replace(guard, **change).save(tmp_path)
        with pytest.raises(RunError, match=re.escape(message)):
            Guard.load(tmp_path)
