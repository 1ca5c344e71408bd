"""A guard beside a predictor: what it learns, what it keeps, and that it is not fooled."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_nfn.models import network_of
from transformer_nfn.models.tensor_fit import tensor_fit
from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.guard import GUARD_FILE, Guard
from transformer_nfn.prediction.guard_fit import fit_guard
from transformer_nfn.prediction.guard_parts import Harm, Opinion
from transformer_nfn.prediction.intervals import rank_quantile
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import _agreement
from transformer_nfn.zoo import NetworkSizes

ARCH = NetworkSizes(16, 10, 4)


def network(n: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of digits networks."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ARCH.space.shapes
    return {k: torch.randn(n, *shape, generator=draw) for k, shape in shapes.items()}


def test_fit_does_not_see_what_changes_no_function() -> None:
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
    first, second = (tensor_fit(network_of(named)) for named in (before, after))
    assert torch.allclose(first, second, atol=1e-6)


def test_fit_sees_tensors_that_know_each_other() -> None:
    strangers = network()
    friends = dict(strangers)
    friends["classifier.W_2"] = strangers["classifier.W_1"].mT[..., :10].contiguous()
    apart = tensor_fit(network_of(friends)) - tensor_fit(network_of(strangers))
    assert bool((apart.abs().amax(1) > 0.3).all())


def test_opinion_and_harm_learn_what_there_is_to_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=draw, dtype=torch.float64)
    truth = torch.sigmoid(x[:, 0] * x[:, 1])
    said = Opinion.of(x[:200], truth[:200], torch.ones(200).double())(x[200:])
    assert float((said - truth[200:]).abs().mean()) < 0.06
    harm = Harm.of(x[x[:, 2] < 0], x[x[:, 2] > 0])
    assert float(((harm(x) > 0) == (x[:, 2] > 0)).double().mean()) > 0.97


def test_agreement_is_how_often_networks_give_the_label() -> None:
    labels = torch.arange(20) % 10
    right = 5 * torch.nn.functional.one_hot(labels, 10).double()
    half = right.clone()
    half[:10] = half[:10].roll(1, -1)
    uneven = right.clone()
    uneven[labels < 5] = right[labels < 5].roll(1, -1)
    found = _agreement(torch.stack([right, half, uneven]))
    assert found[:, 0].tolist() == [1.0, 0.5, 0.5]
    assert float(found[0, 1]) > 0.9 > float(found[1, 1])
    assert found[:2, 5].tolist() == [0.0, 0.0]
    assert float(found[2, 5]) > 0.5
    assert float(found[0, 4]) > 0 > float(found[1, 4]) - 1e-9


def random_networks(n: int, seed: int, size: float = 1.0) -> Dataset:
    """Networks of random weights, with accuracies that their last layer decides."""
    named = {k: size * w for k, w in network(n, seed).items()}
    accuracy = torch.linspace(0.3, 0.9, n)
    named["classifier.W_2"] = named["classifier.W_2"] * accuracy[:, None, None]
    columns = {"run": np.array([f"{seed}-{i}" for i in range(n)], dtype=object)}
    return Dataset(ARCH.block_space, network_of(named), accuracy, columns)


def test_what_is_kept_judges_alike_and_seldom_warns_of_healthy_networks(tmp_path: Path) -> None:
    train, val = random_networks(40, 1), random_networks(40, 2)
    broken = [replace(random_networks(30, s, 0.1), accuracy=torch.full((30,), 0.1)) for s in (3, 4)]
    damaged = Damaged(*broken, torch.full((30,), 0.5))
    parts = Parts(train, val, val)
    guard = fit_guard(parts, damaged, ARCH, val.accuracy, torch.full((30,), 0.6), steps=3)
    guard.save(tmp_path)
    again = Guard.load(tmp_path)
    assert again is not None
    first, second = (g.judge(val, ARCH, val.accuracy.double()) for g in (guard, again))
    assert torch.allclose(first.accuracy, second.accuracy)
    assert torch.allclose(first.radius, second.radius)
    assert float((first.strangeness > 1).double().mean()) <= 0.04
    other = random_networks(20, 5, 0.1)
    fooled = again.judge(other, ARCH, torch.full((20,), 0.9).double())
    held = (fooled.accuracy - 0.1).abs() <= fooled.radius
    assert bool((held | (fooled.strangeness > 1)).all())


def test_a_run_without_a_guard_has_none_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert Guard.load(tmp_path) is None
    (tmp_path / GUARD_FILE).write_bytes(b"nothing")
    with pytest.raises(RunError, match="not readable"):
        Guard.load(tmp_path)


def test_tensors_that_are_no_guards_are_named(tmp_path: Path) -> None:
    one = torch.ones((), dtype=torch.float64)
    blank = replace(Guard.blank((16, 4), 5), width=one.expand(3), limit=one)
    blank.save(tmp_path)
    assert Guard.load(tmp_path) is not None
    for change, words in (
        ({"error": torch.zeros(3).double()}, "'error' expected [2] in float64, found [3]"),
        ({"limit": torch.zeros(()).double()}, "'limit' expected numbers above 0"),
        ({"floor": torch.tensor(torch.nan).double()}, "'floor' holds values that are not finite"),
    ):
        replace(blank, **change).save(tmp_path)
        with pytest.raises(RunError, match=re.escape(words)):
            Guard.load(tmp_path)
    blank.save(tmp_path)
    loaded = Guard.load(tmp_path)
    assert loaded is not None
    with pytest.raises(RunError, match="is of other networks"):
        loaded.judge(random_networks(3, 0), ARCH, torch.zeros(3))


def test_too_few_sizes_exclude_nothing() -> None:
    assert rank_quantile(np.arange(5.0), 0.9) == np.inf
    assert rank_quantile(np.arange(9.0), 0.9) == 8.0
