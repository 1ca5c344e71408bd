"""Numbers that judge predictions, against what they are defined to be."""

import itertools
import math

import numpy as np
import pytest

from transformer_nfn.prediction.intervals import coverage, radius
from transformer_nfn.prediction.metrics import (
    bootstrap_interval,
    kendall_tau,
    r_squared,
    scores,
    standard_error,
)


def test_kendall_tau_counts_pairs():
    source = np.random.default_rng(0)
    for _ in range(20):
        x, y = source.normal(size=(2, 12))
        signs = [
            np.sign((x[i] - x[j]) * (y[i] - y[j])) for i, j in itertools.combinations(range(12), 2)
        ]
        assert kendall_tau(x, y) == pytest.approx(sum(signs) / len(signs))
    assert kendall_tau(x, np.zeros(12)) == 0


def test_other_scores():
    truth, predicted = np.array([0.1, 0.5, 0.9]), np.array([0.2, 0.5, 0.8])
    assert r_squared(truth, predicted) == pytest.approx(1 - 0.02 / 0.32)
    found = scores(truth, predicted)
    assert found["mae"] == pytest.approx(0.2 / 3)
    assert found["tau"] == pytest.approx(1)
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(standard_error([1.0]))


def test_the_bootstrap_interval_holds_the_true_tau_about_as_often_as_it_says():
    source = np.random.default_rng(1)
    true = 2 / math.pi * math.asin(0.8)
    held = 0
    for trial in range(60):
        x = source.normal(size=60)
        y = 0.8 * x + 0.6 * source.normal(size=60)
        low, high = bootstrap_interval(x, y, seed=trial)
        held += low <= true <= high
    assert 45 <= held <= 60


def test_conformal_intervals_hold():
    source = np.random.default_rng(2)
    residuals = source.standard_t(3, size=300)
    assert coverage(residuals[:150], residuals[150:]) == pytest.approx(0.9, abs=0.03)
    assert radius(np.arange(1, 10) / 10) == pytest.approx(0.9)
    assert radius(np.arange(1, 15) / 100) == pytest.approx(0.135), "rank 13.5 of 14"
    assert radius(np.full(8, 0.1)) == 1.0, "eight residuals cannot say what nine in ten do"
    fresh = source.standard_t(3, size=20_000)
    assert (np.abs(fresh) <= radius(residuals)).mean() > 0.86


@pytest.mark.parametrize("n", [9, 14, 38, 39, 77, 200])
@pytest.mark.parametrize("level", [0.8, 0.9])
def test_conformal_intervals_hold_exactly_as_often_as_they_say_on_average(n, level):
    """Over many sets of residuals; how often one holds is known, as the residuals' law is."""
    source = np.random.default_rng(n)
    laws = {
        "even": (source.uniform(size=(8000, n)), lambda r: min(r, 1.0)),
        "normal": (source.normal(size=(8000, n)), lambda r: math.erf(r / math.sqrt(2))),
        "exponential": (source.exponential(size=(8000, n)), lambda r: 1 - math.exp(-r)),
    }
    for name, (draws, holds) in laws.items():
        mean = np.mean([holds(radius(draw, level)) for draw in draws])
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
