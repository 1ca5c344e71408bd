"""Scores, conformal intervals and output scales, against their definitions."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import expit
from scipy.stats import kendalltau

from cases import trials
from transformer_nfn.models.whole_network.curve import fit_curve
from transformer_nfn.models.whole_network.model import piecewise_linear
from transformer_nfn.paper.numbers import examples_text
from transformer_nfn.prediction.metrics import (
    BOOTSTRAP_SAMPLES,
    bootstrap_interval,
    conformal_radius,
    coverage,
    kendall_tau,
    r_squared,
    scores,
    standard_error,
    worth_in_examples,
)


def test_scores_are_what_they_are_defined_to_be():
    source = np.random.default_rng(0)
    for _ in range(20):
        x, y = source.normal(size=(2, 12))
        signs = [
            np.sign((x[i] - x[j]) * (y[i] - y[j])) for i, j in itertools.combinations(range(12), 2)
        ]
        assert kendall_tau(x, y) == pytest.approx(sum(signs) / len(signs))
    assert kendall_tau(x, np.zeros(12)) == 0
    truth, predicted = np.array([0.1, 0.5, 0.9]), np.array([0.2, 0.5, 0.8])
    assert r_squared(truth, predicted) == pytest.approx(1 - 0.02 / 0.32)
    found = scores(truth, predicted)
    assert (found["mae"], found["tau"]) == (pytest.approx(0.2 / 3), pytest.approx(1))
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert standard_error([1.0]) is None
    assert r_squared(np.ones(2), predicted[:2]) is None


@pytest.mark.parametrize("n", [3, 29, 300])
def test_the_bootstrap_interval_is_that_of_resampled_networks(n):
    x = np.random.default_rng(n).normal(size=(2, n)).round(1)  # with ties
    y = x[0] + x[1]
    source = np.random.default_rng(7)
    picks = [source.integers(0, n, n) for _ in range(BOOTSTRAP_SAMPLES)]
    expected = np.quantile([kendall_tau(x[0][pick], y[pick]) for pick in picks], [0.05, 0.95])
    assert bootstrap_interval(x[0], y, seed=7) == pytest.approx(tuple(expected), abs=1e-12)


def test_the_bootstrap_interval_has_its_nominal_coverage():
    source = np.random.default_rng(1)
    true = 2 / math.pi * math.asin(0.8)
    covered, count = 0, trials(20, 60)
    for trial in range(count):
        x = source.normal(size=60)
        y = 0.8 * x + 0.6 * source.normal(size=60)
        low, high = bootstrap_interval(x, y, seed=trial)
        covered += low <= true <= high
    assert covered >= 0.75 * count


def test_a_conformal_radius_is_an_interpolated_rank():
    assert conformal_radius(np.arange(1, 10) / 10) == pytest.approx(0.9)
    assert conformal_radius(np.arange(1, 15) / 100) == pytest.approx(0.135), "rank 13.5 of 14"
    assert conformal_radius(np.full(8, 0.1)) == 1.0, "eight residuals have no 90 % quantile"


@pytest.mark.parametrize("n", [9, 14, 39, 200])
@pytest.mark.parametrize("level", [0.8, 0.9])
def test_conformal_intervals_have_their_nominal_coverage(n, level):
    """On average over many sets of residuals of known distribution."""
    source = np.random.default_rng(n)
    laws = {
        "even": (source.uniform(size=(8000, n)), lambda r: min(r, 1.0)),
        "normal": (source.normal(size=(8000, n)), lambda r: math.erf(r / math.sqrt(2))),
        "exponential": (source.exponential(size=(8000, n)), lambda r: 1 - math.exp(-r)),
    }
    for name, (draws, covered) in laws.items():
        mean = np.mean([covered(conformal_radius(draw, level)) for draw in draws])
        # Between the two largest of few residuals the tail is long: the safe side, below rank 14.
        slack = 0.015 if (n, level) == (14, 0.9) and name != "even" else 0.005
        assert level - 0.005 <= mean <= level + slack, name


def test_coverage_is_measured_on_test_networks():
    source = np.random.default_rng(4)
    found = [coverage(*source.standard_t(3, size=(2, 38)), seed=seed) for seed in range(30)]
    assert np.mean(found) == pytest.approx(0.9, abs=0.01)
    val, test = source.normal(size=(2, 300))
    assert coverage(0.5 * val, test) < 0.85, "the epoch was chosen to fit the validation part"
    assert coverage(val, 0.5 * test) > 0.95


def bent(logits, accuracy, at):
    """Logits ``at`` along the curve that was fitted."""
    curve = fit_curve(logits, accuracy)
    assert (np.diff(curve) > 0).all(), "the order is kept"
    return piecewise_linear(torch.from_numpy(at), torch.from_numpy(curve)).numpy()


@pytest.mark.parametrize(("stretch", "shift"), [(0.2, 1.2), (1.0, 0.0), (2.0, -0.5)])
def test_an_output_scale_is_recovered_and_robust(stretch, shift):
    logits = np.random.default_rng(0).normal(1.0, 1.5, 200)
    at = np.linspace(-1.0, 3.0, 20)
    truth = expit(stretch * at + shift)
    accuracy = expit(stretch * logits + shift)
    assert expit(bent(logits, accuracy, at)) == pytest.approx(truth, abs=0.005)
    accuracy[:6] = 0.1
    assert expit(bent(logits, accuracy, at)) == pytest.approx(truth, abs=0.02)


def test_a_scale_that_differs_by_accuracy_is_recovered():
    logits = np.random.default_rng(0).normal(0.0, 2.0, 300)
    at = np.linspace(-4.0, 4.0, 20)
    found = bent(logits, expit(np.where(logits > 0, 0.3, 2.0) * logits), at)
    assert expit(found) == pytest.approx(expit(np.where(at > 0, 0.3, 2.0) * at), abs=0.05)


def test_probabilities_of_a_class_are_calibrated():
    source = np.random.default_rng(1)
    logits = source.normal(0.0, 2.0, 4000)
    belongs = (source.random(4000) < expit(0.5 * logits - 1.0)).astype(float)
    at = np.linspace(-4.0, 4.0, 9)
    assert expit(bent(logits, belongs, at)) == pytest.approx(expit(0.5 * at - 1.0), abs=0.04)


def test_an_output_scale_keeps_the_order_and_needs_networks():
    logits = np.random.default_rng(0).normal(1.0, 1.5, 200)
    at = np.linspace(-3.0, 5.0, 9)
    bent(logits, expit(-logits), at)
    few = expit(logits[:3]) + 0.02 * np.array([1, -1, 1])
    assert expit(bent(logits[:3], few, at)) == pytest.approx(expit(at), abs=0.1)
    assert bent(np.empty(0), np.empty(0), at) == pytest.approx(at)
    assert bent(np.ones(5), np.full(5, 0.5), np.ones(1)) == pytest.approx(0, abs=0.05)


def test_labelled_examples_that_rank_as_well_as_a_prediction():
    """At the number found, accuracies measured anew have the τ; more examples have more."""
    draw = np.random.default_rng(7)
    for networks in (60, 400):
        accuracy = np.round(draw.beta(4, 2, networks), 4)
        found = worth_in_examples(accuracy, [0.5, 0.7, 0.85])
        for tau, count in zip((0.5, 0.7, 0.85), found, strict=True):
            taus = [
                kendalltau(accuracy, draw.binomial(count, accuracy) / count).statistic
                for _ in range(300)
            ]
            assert np.mean(taus) == pytest.approx(tau, abs=0.03), (networks, count)
        assert found == sorted(found)
        assert worth_in_examples(accuracy, [-0.5, 0.0, 1.0]) == [0, 0, None]


def test_the_number_of_examples_is_said_to_two_digits():
    found = [examples_text(count) for count in (0, 7, 976, 1526, 131072, None)]
    assert found == ["0", "7", "980", "1,500", "130,000", "> 131,072"]
