"""Canonical forms and fingerprints: shared by an orbit, different between orbits."""

import statistics

import pytest
import torch

from cases import ALL, draw, gen, trials, worst
from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.symmetry import canonical_form, compare, fingerprint
from transformer_nfn.testing import assert_same_function

every_space = pytest.mark.parametrize("space", ALL.values(), ids=ALL)
ZOO = spaces.attention_block(32, 2, 16, 16, 64)


@every_space
def test_canonical_form_is_shared_by_the_orbit(space):
    for seed in range(trials(1, 4)):
        U = draw(space, seed)
        form = canonical_form(space, U)
        moved = canonical_form(space, space.group.random(gen(seed)).act(U))
        assert worst(moved, form) < 1e-9
        assert worst(canonical_form(space, form), form) < 1e-9
        assert_same_function(space, U, form)
        assert compare(space, U, form).same_orbit is True


@every_space
def test_canonical_form_of_a_batch_is_that_of_each(space):
    U = draw(space, 5, batch=3)
    form = canonical_form(space, U)
    for i in range(3):
        alone = canonical_form(space, {name: w[i, 0] for name, w in U.items()})
        assert worst(alone, {name: w[i, 0] for name, w in form.items()}) < 1e-12


def test_canonical_form_keeps_the_function_of_deficient_heads():
    space = spaces.attention_block(6, 2, 8, 3, 5)  # D_k larger than D: rank 6 of 8
    U = draw(space, 6)
    form = canonical_form(space, U)
    assert_same_function(space, U, form)
    moved = space.group.random(gen(6)).act(U)
    assert worst(canonical_form(space, moved), form) < 1e-8


@every_space
def test_fingerprint_is_shared_by_the_orbit(space):
    U = draw(space, 7, batch=8)
    print_U = fingerprint(space, U)
    moved = fingerprint(space, space.group.random(gen(7), batch=8).act(U))
    assert print_U.shape == (8, 64)
    assert print_U.dtype == torch.float64
    error = (moved - print_U).norm(dim=1) / print_U.norm(dim=1)
    assert error.max() < 1e-8


def test_fingerprints_of_many_networks_differ_pairwise():
    prints = fingerprint(ZOO, draw(ZOO, 8, batch=trials(200, 1000)))
    apart = torch.cdist(prints, prints) / prints.norm(dim=1).mean()
    apart.fill_diagonal_(1)
    assert apart.min() > 0.05


@every_space
def test_fingerprint_moves_little_when_the_weights_do(space):
    ratios = []
    for seed in range(trials(15, 60)):
        U = draw(space, seed)
        source = gen(seed + 1)
        step = {
            n: 1e-4 * torch.randn(w.shape, generator=source, dtype=w.dtype) for n, w in U.items()
        }
        size = torch.cat([w.flatten() for w in U.values()]).norm()
        change = torch.cat([w.flatten() for w in step.values()]).norm()
        before = fingerprint(space, U)
        after = fingerprint(space, {n: w + step[n] for n, w in U.items()})
        ratios.append(float((after - before).norm() / before.norm() / (change / size)))
    assert statistics.median(ratios) <= 2


def test_fingerprint_sees_what_only_the_alignment_of_features_tells():
    """Columns of each row of VO shuffled differently: sorted entries agree, functions do not."""
    space = spaces.attention_block(6, 1, 3, 3, 5)
    U = draw(space, 9)
    V = {name: w.clone() for name, w in U.items()}
    V["W_O"][0, 0, 0, 0] = V["W_O"][0, 0, 0, 0].roll(1)
    assert (fingerprint(space, U) - fingerprint(space, V)).norm() > 1e-3


def test_fingerprint_is_the_same_on_every_machine():
    ones = {name: torch.ones(1, 1, *shape) for name, shape in ZOO.shapes.items()}
    found = fingerprint(ZOO, ones, size=3)[0]
    expected = torch.tensor(EXPECTED, dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-9)


EXPECTED = [-136.06718387671535, -89.29559428207898, 96.93715739528804]


def test_bad_input_is_explained():
    U = draw(ZOO, batch=2, channels=3)
    with pytest.raises(SpaceError, match="one channel, found 3"):
        fingerprint(ZOO, U)
    with pytest.raises(SpaceError, match="must be from 1 to 1,048,576, found 0"):
        fingerprint(ZOO, draw(ZOO), size=0)
    for function in (fingerprint, canonical_form):
        with pytest.raises(SpaceError, match="'W_Q' holds"):
            function(ZOO, {**draw(ZOO), "W_Q": draw(ZOO)["W_Q"] * float("inf")})
    empty = canonical_form(ZOO, draw(ZOO, batch=0))
    assert empty["W_Q"].shape == (0, 1, 2, 32, 16)
    assert fingerprint(ZOO, draw(ZOO, batch=0)).shape == (0, 64)
