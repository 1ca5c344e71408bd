"""A guard: what it is fitted to, what it stores, and that damaged networks do not fool it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from transformer_nfn.models import Batch
from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.data import DamagedNetworks, Dataset, Parts
from transformer_nfn.prediction.guard import GUARD_FILE, Guard
from transformer_nfn.prediction.guard.estimators import (
    KNOTS,
    AccuracyEstimator,
    Curve,
    DamageClassifier,
    HealthyDistance,
    Standardizer,
    smoothed_by_others,
)
from transformer_nfn.prediction.guard.features import (
    DamagedFeatures,
    Features,
    Recipes,
    TrainingFeatures,
)
from transformer_nfn.prediction.guard.fit import (
    CHANCE_MARGIN,
    LOWER_SLACK,
    MAX_LOWER,
    MIN_LOWER,
    Calibration,
    chance_threshold,
    fit_features,
    fit_guard,
    lower_factor,
    near_chance,
)
from transformer_nfn.prediction.guard.guard import CHANCE_RAMP, NO_THRESHOLD
from transformer_nfn.prediction.guard.responses import COUNT, responses
from transformer_nfn.prediction.metrics import rank_quantile
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import NetworkSizes

SIZES = NetworkSizes(16, 10, 4)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


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
    first, second = (coupling_features(Batch.of(named)) for named in (before, after))
    assert torch.allclose(first, second, atol=1e-6)
    coupled = {**network(), "classifier.W_2": network()["classifier.W_1"].mT[..., :10].contiguous()}
    apart = coupling_features(Batch.of(coupled)) - coupling_features(Batch.of(network()))
    assert bool((apart.abs().amax(1) > 0.3).all())


def test_estimator_and_classifier_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=draw, dtype=torch.float64)
    truth = torch.sigmoid(x[:, 0] * x[:, 1])
    estimate = AccuracyEstimator.of(x[:200], truth[:200], torch.ones(200).double())(x[200:])
    assert float((estimate - truth[200:]).abs().mean()) < 0.06
    damage = DamageClassifier.of(x[x[:, 2] < 0], x[x[:, 2] > 0])
    assert float(((damage(x) > 0) == (x[:, 2] > 0)).double().mean()) > 0.97


def test_curves_smooth_and_leave_one_out() -> None:
    accuracy = torch.linspace(0, 1, 200, dtype=torch.float64)
    curve = Curve.of(accuracy, 2 * accuracy)
    middle = torch.tensor([0.3, 0.5, 0.66], dtype=torch.float64)
    assert torch.allclose(curve(middle), 2 * middle, atol=0.02)
    alone = torch.tensor([0.2, 0.2, 0.2, 0.9], dtype=torch.float64)
    others = smoothed_by_others(alone, torch.tensor([1.0, 2.0, 3.0, 50.0], dtype=torch.float64))
    assert others[0].item() == pytest.approx(2.5, abs=0.01)
    assert others[3].item() == pytest.approx(2.0)


def random_networks(n: int, seed: int, size: float = 1.0) -> Dataset:
    """Networks of random weights, with accuracies that their last layer decides."""
    named = {k: size * w for k, w in network(n, seed).items()}
    accuracy = torch.linspace(0.3, 0.9, n)
    named["classifier.W_2"] = named["classifier.W_2"] * accuracy[:, None, None]
    columns = {"run": np.array([f"{seed}-{i}" for i in range(n)], dtype=object)}
    return Dataset(SIZES.block_space, Batch.of(named), accuracy, columns)


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


def made_guard(estimate: float = 0.0, couplings: int = 2, **scalars: float) -> Guard:
    """A guard with a constant estimate, zero scores of damage, and errors of 0.1."""
    products = COUNT + COUNT * (COUNT + 1) // 2
    frame = lambda n: Standardizer(zeros(n), zeros(n))  # noqa: E731
    coef = zeros(products + 1)
    coef[-1] = estimate
    curve = lambda: Curve(torch.full((KNOTS,), 0.1, dtype=torch.float64))  # noqa: E731
    values = {
        "floor": 0.2, "radius": 0.05, "upper": 1.0, "lower": 2.0, "near_chance": 0.0,
        "outlier": 1.0, "chance_threshold": NO_THRESHOLD, **scalars,
    }  # fmt: skip
    return Guard(
        inputs=zeros(5, 16, 4),
        estimator=AccuracyEstimator(frame(COUNT), frame(products), coef),
        damage=DamageClassifier(frame(COUNT), zeros(COUNT + 1)),
        distance=HealthyDistance(frame(couplings), zeros(couplings, couplings)),
        gap_mean=Curve(zeros(KNOTS)),
        gap_std=curve(),
        error=curve(),
        estimate_error=curve(),
        centre=zeros(3),
        width=torch.full((3,), 10.0).double(),
        **{name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()},
    )


def test_two_scores_beyond_their_limits_move_the_value_to_the_estimate() -> None:
    outputs, couplings = zeros(1, COUNT), zeros(1, 2)

    def assess(damage: float, predicted: float):  # type: ignore[no-untyped-def]
        centre = torch.tensor([-damage, 0, 0]).double()
        guard = replace(made_guard(), width=torch.ones(3).double(), centre=centre)
        return guard.assess_features(outputs, couplings, torch.tensor([predicted]).double())

    # The estimate is 0, so the gap score is 10 times the prediction.
    quiet, warned, outlier, half = (
        assess(0.5, 0.05), assess(0.5, 0.8), assess(3.0, 0.8), assess(1.4, 0.8),
    )  # fmt: skip
    assert float(quiet.outlier_score) <= 1
    assert float(quiet.accuracy) == pytest.approx(0.05)
    assert float(warned.outlier_score) == pytest.approx(8)
    assert float(warned.accuracy) == pytest.approx(0.8)
    # Up by one error, which a score at the limit doubles.
    assert (float(warned.low), float(warned.high)) == (0.0, pytest.approx(1.0))
    assert float(outlier.accuracy) == pytest.approx(0.0)
    assert float(outlier.high) == pytest.approx(0.1)
    assert float(half.accuracy) == pytest.approx(0.4)


def test_intervals_extend_from_prediction_and_estimate_by_at_least_the_radius() -> None:
    def ends(estimate: float, **scalars: float) -> tuple[float, float]:
        guard = made_guard(estimate, **{"floor": 1.0, **scalars})
        # Scores far below their limits do not widen intervals.
        guard = replace(guard, centre=torch.full((3,), 1e6).double())
        predicted = torch.tensor([0.6], dtype=torch.float64)
        assessed = guard.assess_features(zeros(1, COUNT), zeros(1, 2), predicted)
        return float(assessed.low), float(assessed.high)

    assert ends(0.6, lower=3.0) == (pytest.approx(0.3), pytest.approx(0.7))
    assert ends(0.7, lower=3.0) == (pytest.approx(0.3), pytest.approx(0.8))
    assert ends(0.6, lower=3.0, upper=0.1) == (pytest.approx(0.3), pytest.approx(0.65))
    # Below the floor there are no warnings: the interval holds what was seen there.
    assert ends(0.6, lower=3.0, near_chance=0.9) == (pytest.approx(0.3), pytest.approx(0.9))
    assert ends(0.6, lower=3.0, chance_threshold=0.1) == (0.0, pytest.approx(0.7))
    above = ends(0.6, lower=3.0, floor=0.5, near_chance=0.9, chance_threshold=0.1)
    assert above == (pytest.approx(0.3), pytest.approx(0.7))


def test_random_outputs_mean_chance_accuracy() -> None:
    """Regardless of the weights; a warning only if the prediction was far above."""
    outputs, couplings = zeros(3, COUNT), zeros(3, 2)
    predicted = torch.tensor([0.12, 0.5, 0.95], dtype=torch.float64)

    def assess(estimate: float, threshold: float = 0.15) -> tuple[list[float], ...]:
        guard = made_guard(estimate, floor=0.17, chance_threshold=threshold, near_chance=0.3)
        found = guard.assess_features(outputs, couplings, predicted)
        assert bool((found.low <= found.accuracy).all())
        assert bool((found.accuracy <= found.high).all())
        return tuple(x.tolist() for x in (found.accuracy, found.low, found.high))

    accuracy, low, high = assess(0.1)
    assert accuracy == pytest.approx([0.12, 0.1, 0.1])  # below the floor predictions stay
    assert low == [0, 0, 0]
    assert high == pytest.approx([0.3, 0.3, 0.3])
    assert assess(0.15 + CHANCE_RAMP / 2)[0] == pytest.approx([0.12, 0.3375, 0.5625])
    for kept in (assess(0.15 + CHANCE_RAMP), assess(0.1, NO_THRESHOLD), assess(0.6)):
        assert kept[0] == predicted.tolist()
    # Gaps are 0.2, 4 and 8.5 standard deviations: with a limit of 5 the last is a warning.
    guard = made_guard(0.1, floor=0.17, chance_threshold=0.15)
    narrow = replace(
        guard,
        width=torch.tensor([1e-3, 1e-3, 5.0]).double(),
        centre=torch.tensor([-1.0, -1e9, 0.0]).double(),
    )
    warned = narrow.assess_features(outputs, couplings, predicted).outlier_score > 1
    assert warned.tolist() == [False, False, True]


def test_the_threshold_of_random_outputs_needs_a_reliable_estimate() -> None:
    estimate, none = torch.full((100,), 0.1).double(), zeros(100)
    some = none + 0.12
    some[:2] = 0.5
    assert chance_threshold(0.1, estimate, some) == pytest.approx(0.1 + CHANCE_MARGIN)
    some[2] = 0.5  # 3 of 100 are far better than estimated
    assert chance_threshold(0.1, estimate, some) == NO_THRESHOLD
    assert chance_threshold(0.1, estimate[:19], none[:19]) == NO_THRESHOLD  # too few
    assert chance_threshold(0.1, estimate + 0.2, some) == NO_THRESHOLD


def test_near_chance_is_the_best_damaged_network_at_the_floor() -> None:
    accuracy = torch.linspace(0, 1, 101).double()
    features = Features(zeros(101, COUNT), zeros(101, 1), accuracy)
    damaged = DamagedFeatures(features, np.array(["noise"] * 101), accuracy / 2)
    at = lambda floor, **scalars: made_guard(0.1, floor=floor, **scalars)  # noqa: E731
    assert near_chance(at(0.203), 0.1, damaged) == pytest.approx(0.1 + LOWER_SLACK * 0.3)
    better = replace(damaged, features=replace(features, accuracy=accuracy + 1))
    assert near_chance(at(0.203), 0.1, damaged, better) > 1
    assert near_chance(at(0.203), 0.5, damaged) == 0.5
    assert near_chance(at(-1.0), 0.1, damaged) == 0.1
    # Networks with random outputs are at the floor, whatever was predicted.
    found = near_chance(at(0.203, chance_threshold=0.15), 0.1, damaged)
    assert found == pytest.approx(0.1 + LOWER_SLACK * 0.9)


def test_the_lower_end_follows_undetected_damage_within_bounds() -> None:
    shortfall = torch.linspace(-2.3, 2.3, 100).double()
    needed = rank_quantile(shortfall.clamp(min=0).numpy(), 0.975)
    assert MIN_LOWER < needed < MAX_LOWER
    assert lower_factor(shortfall, 1.0) == pytest.approx(needed)
    assert lower_factor(shortfall / 2, 1.0) == MIN_LOWER
    assert lower_factor(shortfall * 2, 1.0) == MAX_LOWER
    assert lower_factor(torch.empty(0).double(), 1.0) == MIN_LOWER
    assert lower_factor(torch.tensor([0.0, 2.25]).double(), 1.0) == 2.25  # too few: the maximum
    assert lower_factor(None, 1.0) == MAX_LOWER
    assert lower_factor(None, 7.0) == lower_factor(shortfall, 7.0) == 7.0


def made_features(outputs: Tensor, accuracy: Tensor, seed: int) -> Features:
    """Networks with these first two output features; the rest is noise."""
    draw = torch.Generator().manual_seed(seed)
    numbers = 0.01 * torch.randn(len(outputs), COUNT, generator=draw, dtype=torch.float64)
    numbers[:, :2] += outputs
    couplings = torch.randn(len(outputs), 3, generator=draw, dtype=torch.float64)
    return Features(numbers, couplings, accuracy)


def healthy_features(n: int, seed: int) -> tuple[Features, Tensor]:
    """Networks whose outputs show their accuracy, and predictions."""
    draw = torch.Generator().manual_seed(seed)
    truth = torch.rand(n, generator=draw).double() * 0.6 + 0.3
    predicted = truth + 0.03 * torch.randn(n, generator=draw).double()
    return made_features(torch.stack([truth, 0 * truth], 1), truth, seed), predicted


def damaged_features(n: int, seed: int, hidden: float) -> DamagedFeatures:
    """Two kinds of damage show in the outputs; the third does not, and costs ``hidden``."""
    looks = torch.rand(3 * n, generator=torch.Generator().manual_seed(seed)).double() * 0.6 + 0.3
    shown = torch.arange(3 * n) < 2 * n
    truth = torch.where(shown, 0.1, looks - hidden)
    outputs = torch.stack([torch.where(shown, 0.1, looks), torch.where(shown, 5.0, 0.0)], 1)
    kinds = np.repeat(["noise", "tensor", "pruned"], n)
    return DamagedFeatures(made_features(outputs, truth, seed), kinds, looks)


def fitted_lower(hidden: float, kinds: tuple[str, ...]) -> float:
    """Lower end of a guard fitted to some kinds of damage, without its margin."""
    train, val = (
        damaged.take(torch.from_numpy(np.isin(damaged.kinds, kinds)))
        for damaged in (damaged_features(40, 3, hidden), damaged_features(20, 4, hidden))
    )
    recipes = [Recipes(*(torch.arange(n) % 5 for n in (200, len(train.features), 100)))]
    drop = train.predicted - train.features.accuracy
    guard = fit_features(
        zeros(5, 16, 4),
        TrainingFeatures(healthy_features(200, 1)[0], train.features, drop, 0.1, recipes),
        train,
        Calibration(*healthy_features(100, 2), val),
    )
    return float(guard.lower) / LOWER_SLACK


def test_undetected_kinds_of_damage_lower_the_lower_end() -> None:
    every = ("noise", "tensor", "pruned")
    assert fitted_lower(0.0, every) == pytest.approx(MIN_LOWER)
    assert MIN_LOWER + 0.2 < fitted_lower(0.09, every) <= MAX_LOWER
    # Damage that shows is detected also by a guard that never saw its kind.
    assert fitted_lower(0.09, ("noise", "tensor")) == pytest.approx(MIN_LOWER)
    # One kind says nothing of others.
    assert fitted_lower(0.09, ("noise",)) == pytest.approx(MAX_LOWER)


def test_limits_hold_for_recipes_that_are_left_out() -> None:
    """Healthy networks of a new recipe stay below them; recipes show in the tensors."""
    shift = torch.tensor([0, 0, 0, 0, 1, -1]).double()  # the last is new

    def of_recipes(n: int, seed: int, recipe: Tensor) -> tuple[Features, Tensor]:
        features, predicted = healthy_features(n, seed)
        features.couplings[:, 0] += 8 * shift[recipe]
        return features, predicted

    train_recipe, val_recipe = torch.arange(300) % 5, torch.arange(150) % 5
    broken, broken_val = damaged_features(40, 3, 0.0), damaged_features(20, 4, 0.0)
    drop = broken.predicted - broken.features.accuracy
    healthy, val = of_recipes(300, 1, train_recipe)[0], of_recipes(150, 2, val_recipe)

    def warned(recipes: Recipes, recipe: int) -> float:
        training = TrainingFeatures(healthy, broken.features, drop, 0.1, [recipes])
        guard = fit_features(zeros(5, 16, 4), training, broken, Calibration(*val, broken_val))
        new, predicted = of_recipes(200, 5, torch.full((200,), recipe))
        found = guard.assess_features(new.outputs, new.couplings, predicted)
        return float((found.outlier_score > 1).double().mean())

    copies = torch.arange(len(broken.features)) % 5
    known = Recipes(train_recipe, copies, val_recipe)
    at_random = Recipes(*(torch.arange(n) // 5 % 5 for n in (300, len(copies), 150)))
    assert warned(known, 5) <= 0.05 < 0.3 < warned(at_random, 5)


def test_damaged_networks_of_two_zoos_are_joined_in_order() -> None:
    first, second = (
        DamagedNetworks(
            random_networks(2, seed), random_networks(1, seed + 1), torch.full((2,), seed / 10),
            np.array([f"kind {seed}"] * 2), np.array([f"kind {seed}"]),
        )
        for seed in (1, 5)
    )  # fmt: skip
    both = first.joined(second)
    assert both.counts == {"train": 4, "val": 2}
    assert both.train.runs == ["1-0", "1-1", "5-0", "5-1"]
    assert both.val_kinds.tolist() == ["kind 1", "kind 5"]
    assert both.train_drop.tolist() == pytest.approx([0.1, 0.1, 0.5, 0.5])


def test_a_malformed_guard_is_rejected(tmp_path: Path) -> None:
    assert Guard.load(tmp_path) is None
    (tmp_path / GUARD_FILE).write_bytes(b"nothing")
    with pytest.raises(RunError, match="not readable"):
        Guard.load(tmp_path)
    guard = made_guard(couplings=5)
    guard.save(tmp_path)
    assert Guard.load(tmp_path) is not None
    for change, message in (
        ({"error": Curve(zeros(3))}, f"'error.values' expected [{KNOTS}] in float64, found [3]"),
        ({"width": zeros(3)}, "'width' expected numbers above 0"),
        ({"gap_std": Curve(zeros(KNOTS))}, "'gap_std.values' expected numbers above 0"),
        ({"floor": torch.tensor(torch.nan).double()}, "'floor' holds values that are not finite"),
        ({"lower": zeros(2)}, "'lower' expected [] in float64, found [2] in float64"),
    ):
        replace(guard, **change).save(tmp_path)
        with pytest.raises(RunError, match=re.escape(message)):
            Guard.load(tmp_path)
