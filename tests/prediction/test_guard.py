"""A guard beside a predictor: what it learns, what it keeps, and that it is not fooled."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_nfn.io.tensor_files import write_tensors
from transformer_nfn.models import network_of
from transformer_nfn.models.coupling import coupling_features
from transformer_nfn.prediction.damaged import Damaged
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.guard import DEAD_RAMP, GUARD_FILE, NEVER_DEAD, OLD_WIDEN, Guard
from transformer_nfn.prediction.guard_curves import KNOTS, Curve, smoothed_by_others
from transformer_nfn.prediction.guard_fit import Calibration, fit_guard, fit_read
from transformer_nfn.prediction.guard_learn import Harmed, Learned, Read
from transformer_nfn.prediction.guard_parts import Harm, Opinion, tensors_of
from transformer_nfn.prediction.guard_reach import (
    DEAD,
    LEAST_DOWN,
    MOST_DOWN,
    SLACK_DOWN,
    dead_limit,
    near_chance,
    reach_below,
)
from transformer_nfn.prediction.intervals import rank_quantile
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.responses import COUNT, _agreement, responses
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
    first, second = (coupling_features(network_of(named)) for named in (before, after))
    assert torch.allclose(first, second, atol=1e-6)


def test_fit_sees_tensors_that_know_each_other() -> None:
    strangers = network()
    friends = dict(strangers)
    friends["classifier.W_2"] = strangers["classifier.W_1"].mT[..., :10].contiguous()
    apart = coupling_features(network_of(friends)) - coupling_features(network_of(strangers))
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


@pytest.fixture(scope="module")
def fitted() -> tuple[Guard, Dataset]:
    """A guard of random networks, and the healthy ones that calibrated it."""
    train, val = random_networks(40, 1), random_networks(40, 2)
    broken = [replace(random_networks(30, s, 0.1), accuracy=torch.full((30,), 0.1)) for s in (3, 4)]
    kinds = np.array(["noise", "pruned"] * 15)
    damaged = Damaged(*broken, torch.full((30,), 0.5), kinds, kinds)
    predicted = val.accuracy + 0.05 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    parts = Parts(train, val, val)
    said = torch.full((30,), 0.6)
    return fit_guard(parts, damaged, ARCH, predicted, (said, said), steps=3), val


def test_what_is_kept_judges_alike_and_seldom_warns_of_healthy_networks(
    fitted: tuple[Guard, Dataset], tmp_path: Path
) -> None:
    guard, val = fitted
    guard.save(tmp_path)
    again = Guard.load(tmp_path)
    assert again is not None
    first, second = (g.judge(val, ARCH, val.accuracy.double()) for g in (guard, again))
    for name in ("accuracy", "low", "high", "strangeness"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert float((first.strangeness > 1).double().mean()) <= 0.05
    assert float(first.holds(val.accuracy.double()).double().mean()) >= 0.95


def test_a_network_that_is_not_strange_keeps_what_the_predictor_says(
    fitted: tuple[Guard, Dataset],
) -> None:
    """Bit for bit, whatever is said; a broken one of which much is said is warned of."""
    guard, _ = fitted
    draw = torch.Generator().manual_seed(0)
    networks = [random_networks(40, seed, size) for seed, size in ((6, 1.0), (7, 0.5), (8, 0.1))]
    warned = []
    for data in networks:
        said = torch.linspace(0, 1, 40, dtype=torch.float64)[torch.randperm(40, generator=draw)]
        judged = guard.judge(data, ARCH, said)
        quiet = judged.strangeness <= 1
        alive = guard.opinion(responses(data, ARCH, guard.agreed)) > guard.dead + DEAD_RAMP
        assert torch.equal(judged.accuracy[quiet & alive], said[quiet & alive])
        assert bool((judged.low <= judged.accuracy).all())
        assert bool((judged.accuracy <= judged.high).all())
        warned.append(~quiet)
    # Above the floor a broken network is told from a healthy one; below it nobody is warned.
    broken = guard.judge(networks[2], ARCH, torch.full((40,), 0.9).double())
    assert float((broken.strangeness > 1).double().mean()) > 0.9
    unheard = guard.judge(networks[2], ARCH, torch.full((40,), 0.1).double())
    assert bool((unheard.strangeness <= 1).all())
    assert 0 < int(torch.cat(warned).sum()) < 120


def test_the_number_leans_on_the_opinion_where_two_signs_are_beyond_their_limits() -> None:
    """Signs that are given: one far beyond is a warning, two move the number."""
    one = torch.ones((), dtype=torch.float64)
    blank = Guard.blank((5, 16, 4), 2)
    curve = Curve(torch.full((KNOTS,), 0.1, dtype=torch.float64))
    guard = replace(
        blank, width=torch.ones(3).double(), gap_spread=curve, error=curve, opinion_error=curve,
        radius=0.05 * one, reach=one, reach_down=2 * one, strange_reach=one, floor=0.2 * one,
        widen=0.5 * one, dead=NEVER_DEAD * one,
        harm=replace(blank.harm, coef=torch.full_like(blank.harm.coef, 1.0)),
    )  # fmt: skip
    # An opinion of 0 and tensors that fit: signs are the logit 1, log(1e-8), and 10 x predicted.
    answers, fit = torch.zeros(1, COUNT, dtype=torch.float64), torch.zeros(1, 2).double()
    judge = lambda harm, said: replace(  # noqa: E731
        guard, centre=torch.tensor([1.0 - harm, 0, 0]).double()
    ).judge_read(answers, fit, torch.tensor([said], dtype=torch.float64))
    quiet, warned, strange = judge(0.5, 0.05), judge(0.5, 0.8), judge(3.0, 0.8)
    assert float(quiet.strangeness) <= 1
    assert float(quiet.accuracy) == 0.05
    assert float(warned.strangeness) == pytest.approx(8)
    assert float(warned.accuracy) == 0.8
    assert (float(warned.low), float(warned.high)) == (0.0, pytest.approx(0.95))
    assert float(strange.accuracy) == pytest.approx(0.0)
    assert float(strange.high) == pytest.approx(0.1)
    half = judge(1.4, 0.8)
    assert float(half.accuracy) == pytest.approx(0.4)


def given_opinion(said: float, floor: float, dead: float) -> Guard:
    """A guard that says the same of all networks, with signs of a tenth of its width."""
    one = torch.ones((), dtype=torch.float64)
    blank = Guard.blank((5, 16, 4), 2)
    # Of a regression that knows nothing the opinion is its constant.
    coef = blank.opinion.coef.clone()
    coef[-1] = said
    curve = Curve(torch.full((KNOTS,), 0.1, dtype=torch.float64))
    return replace(
        blank, width=torch.full((3,), 10.0).double(), gap_spread=curve, error=curve,
        opinion_error=curve, radius=0.05 * one, reach=one, reach_down=2 * one, floor=floor * one,
        dead=dead * one, opinion=replace(blank.opinion, coef=coef), near_chance=0.3 * one,
        strange_reach=one,
    )  # fmt: skip


def test_intervals_reach_down_and_up_apart_and_no_less_than_the_radius() -> None:
    one = torch.ones((), dtype=torch.float64)
    answers, fit = torch.zeros(1, COUNT, dtype=torch.float64), torch.zeros(1, 2).double()

    def ends(
        said: float, up: float, floor: float = 1.0, near_chance: float = 0.0, dead: float = -1.0,
        below: float = 0.0,
    ) -> tuple[float, float]:  # fmt: skip
        guard = replace(
            given_opinion(said, floor, dead), reach=up * one, reach_down=3 * one,
            reach_below=below * one, near_chance=near_chance * one,
        )  # fmt: skip
        judged = guard.judge_read(answers, fit, torch.tensor([0.6], dtype=torch.float64))
        return float(judged.low), float(judged.high)

    assert ends(said=0.6, up=1.0) == (pytest.approx(0.3), pytest.approx(0.7))
    assert ends(said=0.7, up=1.0) == (pytest.approx(0.3), pytest.approx(0.8))
    assert ends(said=0.6, up=0.1) == (pytest.approx(0.3), pytest.approx(0.65))
    # What older guards reach down and what newer ones do add up; a guard has one of them.
    assert ends(said=0.6, up=1.0, below=1.0) == (pytest.approx(0.2), pytest.approx(0.7))
    # Below the floor nobody is warned: what was seen there may be.
    assert ends(said=0.6, up=1.0, near_chance=0.9) == (pytest.approx(0.3), pytest.approx(0.9))
    assert ends(said=0.6, up=1.0, near_chance=0.6) == (pytest.approx(0.3), pytest.approx(0.7))
    assert ends(said=0.6, up=1.0, dead=0.1) == (0.0, pytest.approx(0.7))
    above = ends(said=0.6, up=1.0, floor=0.5, near_chance=0.9, dead=0.1)
    assert above == (pytest.approx(0.3), pytest.approx(0.7))


def test_near_chance_is_what_damaged_networks_predicted_there_have() -> None:
    accuracy = torch.linspace(0, 1, 101).double()
    blank = torch.zeros(101, 1).double()
    harmed = Harmed(Read(blank, blank, accuracy), np.array(["noise"] * 101), accuracy / 2)
    at = lambda floor, dead=NEVER_DEAD: given_opinion(0.1, floor, dead)  # noqa: E731
    assert near_chance(at(0.203), 0.1, harmed) == pytest.approx(0.1 + SLACK_DOWN * 0.3)
    better = Harmed(Read(blank, blank, accuracy + 1), harmed.kinds, accuracy)
    assert near_chance(at(0.203), 0.1, harmed, better) > 1  # all that are given count
    assert near_chance(at(0.203), 0.5, harmed) == 0.5  # chance is within reach
    assert near_chance(at(-1.0), 0.1, harmed) == 0.1
    # Networks that answer as if they guessed are told to be there, whatever was predicted.
    assert near_chance(at(0.203, dead=0.15), 0.1, harmed) == pytest.approx(0.1 + SLACK_DOWN * 0.9)


def test_a_network_that_answers_as_if_it_guessed_is_told_to_be_at_chance() -> None:
    """Whatever its weights look like; a warning only where these look far better."""
    answers, fit = torch.zeros(3, COUNT, dtype=torch.float64), torch.zeros(3, 2).double()
    predicted = torch.tensor([0.12, 0.5, 0.95], dtype=torch.float64)

    def judged(said: float, dead: float = 0.15) -> tuple[list[float], ...]:
        found = given_opinion(said, floor=0.17, dead=dead).judge_read(answers, fit, predicted)
        assert bool((found.low <= found.accuracy).all())
        assert bool((found.accuracy <= found.high).all())
        return tuple(x.tolist() for x in (found.accuracy, found.low, found.high))

    number, low, high = judged(0.1)
    assert number == pytest.approx([0.12, 0.1, 0.1])  # at the floor the predictor keeps its word
    assert low == [0, 0, 0]
    assert high == pytest.approx([0.3, 0.3, 0.3])  # the best that was seen there
    # Beyond the limit the opinion has less and less to say, and then nothing.
    assert judged(0.15 + DEAD_RAMP / 2)[0] == pytest.approx([0.12, 0.3375, 0.5625])
    assert judged(0.15 + DEAD_RAMP)[0] == predicted.tolist()
    assert judged(0.1, dead=NEVER_DEAD)[0] == predicted.tolist()
    assert judged(0.1, dead=NEVER_DEAD)[1][0] == 0.0  # 0.1 less 2 x 0.1, which is below 0 anyway
    assert judged(0.6)[0] == predicted.tolist()
    # Gaps are 0.02, 4 and 8.5 spreads: with a limit of 5 the last is told, the others are not.
    guard = given_opinion(0.1, floor=0.17, dead=0.15)
    narrow = replace(guard, width=torch.tensor([1e-3, 1e-3, 5.0]).double())
    centred = replace(narrow, centre=torch.tensor([-1.0, -1e9, 0.0]).double())
    assert (centred.judge_read(answers, fit, predicted).strangeness > 1).tolist() == [0, 0, 1]
    # How strange a network is that nobody is warned of is told too.
    usual = guard.judge_read(answers, fit, predicted).strangeness
    assert usual.tolist() == pytest.approx([0.02, 0.4, 0.85], abs=1e-6)


def test_answers_are_trusted_to_tell_who_guesses_where_they_do() -> None:
    said, none = torch.full((100,), 0.1).double(), torch.zeros(100).double()
    assert dead_limit(0.1, said, none + 0.12) == pytest.approx(0.1 + DEAD)
    some = none + 0.12
    some[:2] = 0.5
    assert dead_limit(0.1, said, some) == pytest.approx(0.1 + DEAD)
    some[2] = 0.5  # 3 of 100 are far better than was said
    assert dead_limit(0.1, said, some) == NEVER_DEAD
    assert dead_limit(0.1, said[:19], none[:19]) == NEVER_DEAD  # too few to tell
    assert dead_limit(0.1, said + 0.2, some) == NEVER_DEAD


def test_reach_below_is_what_unnoticed_damage_of_unseen_kinds_needs_within_bounds() -> None:
    short = torch.linspace(-2.3, 2.3, 100).double()
    needed = rank_quantile(short.clamp(min=0).numpy(), 0.975)
    assert LEAST_DOWN < needed < MOST_DOWN
    assert reach_below(short, 1.0) == pytest.approx(needed)
    assert reach_below(short / 2, 1.0) == LEAST_DOWN
    assert reach_below(short * 2, 1.0) == MOST_DOWN
    assert reach_below(torch.empty(0).double(), 1.0) == LEAST_DOWN
    # Of too few the farthest counts; where nobody knows, as far as may be; never less than
    # healthy networks need.
    assert reach_below(torch.tensor([0.0, 2.25]).double(), 1.0) == 2.25
    assert reach_below(None, 1.0) == MOST_DOWN
    assert reach_below(None, 7.0) == reach_below(short, 7.0) == 7.0


def read_networks(answers: torch.Tensor, accuracy: torch.Tensor, seed: int) -> Read:
    """Networks with these answers in the first two of their numbers; the rest is noise."""
    draw = torch.Generator().manual_seed(seed)
    numbers = 0.01 * torch.randn(len(answers), COUNT, generator=draw, dtype=torch.float64)
    numbers[:, :2] += answers
    fit = torch.randn(len(answers), 3, generator=draw, dtype=torch.float64)
    return Read(numbers, fit, accuracy)


def healthy_networks(n: int, seed: int) -> tuple[Read, torch.Tensor]:
    """Networks whose answers tell their accuracy, and what a predictor says of them."""
    draw = torch.Generator().manual_seed(seed)
    truth = torch.rand(n, generator=draw).double() * 0.6 + 0.3
    said = truth + 0.03 * torch.randn(n, generator=draw).double()
    return read_networks(torch.stack([truth, 0 * truth], 1), truth, seed), said


def harmed_networks(n: int, seed: int, hidden: float) -> Harmed:
    """Two kinds show in the answers. The third does not, and is worse than it looks by little."""
    looks = torch.rand(3 * n, generator=torch.Generator().manual_seed(seed)).double() * 0.6 + 0.3
    shown = torch.arange(3 * n) < 2 * n
    truth = torch.where(shown, 0.1, looks - hidden)
    answers = torch.stack([torch.where(shown, 0.1, looks), torch.where(shown, 5.0, 0.0)], 1)
    kinds = np.repeat(["noise", "tensor", "pruned"], n)
    return Harmed(read_networks(answers, truth, seed), kinds, looks)


def fitted_reach(hidden: float, kinds: tuple[str, ...]) -> float:
    """How far down a guard reaches that learned from some kinds, but for the slack."""
    learned, calibrating = (
        harmed.take(torch.from_numpy(np.isin(harmed.kinds, kinds)))
        for harmed in (harmed_networks(40, 3, hidden), harmed_networks(20, 4, hidden))
    )
    count = len(learned.read)
    folds = (torch.arange(200) % 5, torch.arange(count) % 5)
    drop = learned.predicted - learned.read.accuracy
    guard = fit_read(
        torch.zeros(5, 16, 4).double(),
        Learned(healthy_networks(200, 1)[0], learned.read, drop, 0.1, folds),
        learned,
        Calibration(*healthy_networks(100, 2), calibrating),
    )
    assert float(guard.reach_down) == 0
    return float(guard.reach_below) / SLACK_DOWN


def test_kinds_that_hide_from_a_guard_of_the_others_make_intervals_reach_farther_down() -> None:
    every = ("noise", "tensor", "pruned")
    assert fitted_reach(0.0, every) == pytest.approx(LEAST_DOWN)
    assert LEAST_DOWN + 0.2 < fitted_reach(0.09, every) <= MOST_DOWN
    # What does not hide is warned of, also by those who never saw its kind.
    assert fitted_reach(0.09, ("noise", "tensor")) == pytest.approx(LEAST_DOWN)
    # From one kind nobody learns how far others fall.
    assert fitted_reach(0.09, ("noise",)) == pytest.approx(MOST_DOWN)


def test_damaged_networks_of_two_zoos_are_joined_in_order() -> None:
    first, second = (
        Damaged(
            random_networks(2, seed), random_networks(1, seed + 1), torch.full((2,), seed / 10),
            np.array([f"kind {seed}"] * 2), np.array([f"kind {seed}"]),
        )
        for seed in (1, 5)
    )  # fmt: skip
    both = first.with_more(second)
    assert both.counts == {"train": 4, "val": 2}
    assert both.train.columns["run"].tolist() == ["1-0", "1-1", "5-0", "5-1"]
    assert both.train_kinds.tolist() == ["kind 1"] * 2 + ["kind 5"] * 2
    assert both.val_kinds.tolist() == ["kind 1", "kind 5"]
    assert both.train_drop.tolist() == pytest.approx([0.1, 0.1, 0.5, 0.5])


def test_curves_follow_what_is_usual_and_others_do_not_hear_oneself() -> None:
    accuracy = torch.linspace(0, 1, 200, dtype=torch.float64)
    curve = Curve.of(accuracy, 2 * accuracy)
    middle = torch.tensor([0.3, 0.5, 0.66], dtype=torch.float64)
    assert torch.allclose(curve(middle), 2 * middle, atol=0.02)
    alone = torch.tensor([0.2, 0.2, 0.2, 0.9], dtype=torch.float64)
    heard = smoothed_by_others(alone, torch.tensor([1.0, 2.0, 3.0, 50.0], dtype=torch.float64))
    assert heard[0].item() == pytest.approx(2.5, abs=0.01)
    assert heard[3].item() == pytest.approx(2.0)


def test_a_guard_of_an_older_version_reaches_as_far_down_as_up(
    fitted: tuple[Guard, Dataset], tmp_path: Path
) -> None:
    guard, _ = fitted
    kept = tensors_of(guard)
    for name in ("reach_down", "reach_below", "near_chance", "widen", "dead"):
        del kept[name]
    write_tensors(tmp_path / GUARD_FILE, kept)
    old = Guard.load(tmp_path)
    assert old is not None
    assert torch.equal(old.reach_down, old.reach)
    assert float(old.near_chance) == float(old.reach_below) == 0
    assert float(old.widen) == OLD_WIDEN
    assert float(old.dead) == NEVER_DEAD
    del kept["reach"]
    write_tensors(tmp_path / GUARD_FILE, kept)
    with pytest.raises(RunError, match=re.escape("'reach' expected [] in float64, found None")):
        Guard.load(tmp_path)


def test_a_run_without_a_guard_has_none_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert Guard.load(tmp_path) is None
    (tmp_path / GUARD_FILE).write_bytes(b"nothing")
    with pytest.raises(RunError, match="not readable"):
        Guard.load(tmp_path)


def test_tensors_that_are_no_guards_are_named(tmp_path: Path) -> None:
    one = torch.ones((), dtype=torch.float64)
    blank = replace(
        Guard.blank((7, 16, 4), 5), width=one.expand(3), gap_spread=Curve(one.expand(KNOTS))
    )
    blank.save(tmp_path)
    assert Guard.load(tmp_path) is not None
    for change, words in (
        (
            {"error": Curve(torch.zeros(3).double())},
            f"'error.values' expected [{KNOTS}] in float64, found [3]",
        ),
        ({"width": torch.zeros(3).double()}, "'width' expected numbers above 0"),
        ({"gap_spread": Curve.blank()}, "'gap_spread.values' expected numbers above 0"),
        ({"floor": torch.tensor(torch.nan).double()}, "'floor' holds values that are not finite"),
        (
            {"reach_down": torch.zeros(2).double()},
            "'reach_down' expected [] in float64, found [2] in torch.float64",
        ),
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
