"""Networks of a space that names no architecture: compared by invariants, or by a given forward."""

import pytest
import torch

from cases import draw, gen
from transformer_nfn import functional, spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import Vectors
from transformer_nfn.spaces import Axis, WeightSpace
from transformer_nfn.symmetry import compare
from transformer_nfn.testing import assert_same_function

MLP = WeightSpace.build(
    "two layers",
    [Axis.free("in", 4), Axis.perm("neuron", 6), Axis.free("out", 3)],
    {"W": "in neuron", "b": "neuron", "V": "neuron out"},
)


def forward(w, X):
    return torch.tanh(X @ w["W"] + w["b"].unsqueeze(-2)) @ w["V"]


def pair(change):
    U = draw(MLP, 0)
    V = MLP.group.random(gen(1)).act(U)
    return U, {name: w * (1 + change) if name == "W" else w for name, w in V.items()}


def test_without_a_forward_the_invariants_answer():
    same = compare(MLP, *pair(0.0))
    assert (same.same_function, same.same_orbit) == (True, True)
    apart = compare(MLP, *pair(0.1))
    assert (apart.same_function, apart.same_orbit) == (None, False)
    assert apart.witness is None
    assert apart.residuals["W"] == pytest.approx(0.1 / 1.1)
    assert apart.residuals["V"] < 1e-12


def test_a_given_forward_finds_the_witness():
    found = compare(MLP, *pair(0.1), forward=forward, inputs=Vectors(width=4))
    assert (found.same_function, found.same_orbit) == (False, False)
    U, V = ({n: w[0, 0] for n, w in side.items()} for side in pair(0.1))
    again = [forward(side, found.witness.X) for side in (U, V)]
    assert torch.allclose(again[0], found.witness.out_U)
    assert torch.allclose(again[1], found.witness.out_V)
    same = compare(MLP, *pair(0.0), forward=forward, inputs=Vectors(width=4))
    assert same.same_function is True


def test_a_given_forward_takes_the_place_of_the_reference():
    space = spaces.attention_block(8, 2, 3, 4, 10)
    U = draw(space, 2)
    V = {name: 2.0 * w if name == "b_B" else w for name, w in U.items()}
    assert compare(space, U, V).same_function is False
    found = compare(space, U, V, forward=lambda w, X: functional.multi_head(X, w))
    assert found.same_function is not False  # attention alone does not read b_B
    assert_same_function(space, U, V, forward=lambda w, X: functional.multi_head(X, w))
    with pytest.raises(AssertionError, match="not the same function"):
        assert_same_function(space, U, V)


def test_half_of_what_can_be_run_is_refused():
    for half in ({"forward": forward}, {"inputs": Vectors(width=4)}):
        with pytest.raises(SpaceError, match="'two layers' names no architecture, so a forward"):
            compare(MLP, *pair(0.1), **half)
    with pytest.raises(SpaceError, match="has no reference forward"):
        assert_same_function(MLP, *pair(0.0))
