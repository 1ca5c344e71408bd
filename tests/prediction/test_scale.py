"""Predictions are brought to the scale of the truth, and their order stays."""

import numpy as np
import pytest
from scipy.special import expit

from transformer_nfn.prediction.scale import LEAST, fit_scale


def said(count=200, seed=0):
    return np.random.default_rng(seed).normal(1.0, 1.5, count)


@pytest.mark.parametrize(("stretch", "shift"), [(0.2, 1.2), (1.0, 0.0), (2.0, -0.5)])
def test_a_stretched_scale_is_found_again(stretch, shift):
    logits = said()
    found = fit_scale(logits, expit(stretch * logits + shift))
    assert found == pytest.approx((stretch, shift), abs=0.02)


def test_a_few_wild_networks_do_not_move_it():
    logits = said()
    accuracy = expit(0.5 * logits + 0.3)
    accuracy[:6] = 0.1
    assert fit_scale(logits, accuracy) == pytest.approx((0.5, 0.3), abs=0.03)


def test_a_handful_of_networks_hardly_moves_it():
    logits = said(3)
    accuracy = expit(logits) + 0.02 * np.array([1, -1, 1])
    assert fit_scale(logits, accuracy) == pytest.approx((1.0, 0.0), abs=0.15)


def test_order_is_never_turned_around():
    logits = said()
    assert fit_scale(logits, expit(-logits)).stretch >= LEAST


def test_nothing_to_fit_to_leaves_it_as_it_is():
    assert fit_scale(np.empty(0), np.empty(0)) == (1.0, 0.0)
