"""Scores, conformal intervals and output scales, against their definitions."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import expit

from cases import trials
from transformer_nfn.prediction.metrics import (
    BOOTSTRAP_SAMPLES,
    bootstrap_interval,
    conformal_radius,
    coverage,
    kendall_tau,
    r_squared,
    scores,
    standard_error,
)
from transformer_nfn.prediction.strategies import MIN_STRETCH, fit_scale


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
    assert math.isnan(standard_error([1.0]))


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
    found = [coverage(*source.standard_t(3, size=(2, 38)), seed=seed) for seed in range(60)]
    assert np.mean(found) == pytest.approx(0.9, abs=0.01)
    val, test = source.normal(size=(2, 300))
    assert coverage(0.5 * val, test) < 0.85, "the epoch was chosen to fit the validation part"
    assert coverage(val, 0.5 * test) > 0.95


@pytest.mark.parametrize(("stretch", "shift"), [(0.2, 1.2), (1.0, 0.0), (2.0, -0.5)])
def test_an_output_scale_is_recovered_and_robust(stretch, shift):
    logits = np.random.default_rng(0).normal(1.0, 1.5, 200)
    accuracy = expit(stretch * logits + shift)
    assert fit_scale(logits, accuracy) == pytest.approx((stretch, shift), abs=0.02)
    accuracy[:6] = 0.1
    assert fit_scale(logits, accuracy) == pytest.approx((stretch, shift), abs=0.1)


def test_probabilities_of_a_class_are_calibrated():
    source = np.random.default_rng(1)
    logits = source.normal(0.0, 2.0, 4000)
    belongs = (source.random(4000) < expit(0.5 * logits - 1.0)).astype(float)
    assert fit_scale(logits, belongs) == pytest.approx((0.5, -1.0), abs=0.06)


def test_an_output_scale_keeps_the_order_and_needs_networks():
    logits = np.random.default_rng(0).normal(1.0, 1.5, 200)
    assert fit_scale(logits, expit(-logits)).stretch >= MIN_STRETCH
    few = expit(logits[:3]) + 0.02 * np.array([1, -1, 1])
    assert fit_scale(logits[:3], few) == pytest.approx((1.0, 0.0), abs=0.15)
    assert fit_scale(np.empty(0), np.empty(0)) == (1.0, 0.0)
