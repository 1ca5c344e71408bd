"""An architecture says what its weights compute; what claims too much is caught."""

import pickle
from dataclasses import replace

import pytest
import torch

from cases import ALL, SIX, draw, gen, perturbed, worst
from transformer_nfn import functional, spaces, symmetry
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import (
    Architecture,
    Ids,
    Rescaling,
    Vectors,
    architecture_of,
    find_architecture,
)
from transformer_nfn.spaces import Axis, WeightSpace
from transformer_nfn.testing import assert_same_function

every_space = pytest.mark.parametrize("space", ALL.values(), ids=ALL)
PRE_NORM = architecture_of(spaces.residual_stack(1, 8, 2, 3, 4, 10, d_in=5, d_out=3))


@every_space
def test_the_forward_of_every_ready_space_is_invariant(space):
    architecture_of(space).check_invariance()


def test_a_gain_scaled_and_undone_in_its_readers_is_recognised():
    U = draw(PRE_NORM.space, 1)
    V = {name: w.clone() for name, w in U.items()}
    s = torch.tensor([2.0, -0.5, 3.0, 1.5, -1.0, 0.7, 1.1, 4.0], dtype=torch.float64)
    for name in ("0.g_1", "0.b_1"):
        V[name] *= s
    for name in ("0.W_Q", "0.W_K", "0.W_V"):
        V[name] /= s[:, None]
    assert_same_function(PRE_NORM, U, V)
    found = symmetry.compare(PRE_NORM, U, V)
    assert (found.same_function, found.same_orbit, found.group) == (True, True, "enlarged")
    gains = found.element.linears["0.gain_1"].flatten()
    assert torch.allclose(gains, s, atol=1e-9)
    assert symmetry.compare(PRE_NORM.space, U, V).same_function is True
    prints = [symmetry.fingerprint(PRE_NORM, w) for w in (U, V)]
    assert float((prints[0] - prints[1]).norm() / prints[0].norm()) < 1e-8
    V["0.W_Q"] *= 1 + 0.01 * torch.randn(V["0.W_Q"].shape, generator=gen(2), dtype=torch.float64)
    found = symmetry.compare(PRE_NORM, U, V)
    assert (found.same_function, found.same_orbit) == (False, False)
    assert found.witness.difference > 1e-4
    moved = symmetry.fingerprint(PRE_NORM, V)
    assert float((moved - prints[0]).norm() / prints[0].norm()) > 1e-6


def test_gains_and_biases_of_every_norm_at_once():
    for seed in range(3):
        U = draw(PRE_NORM.space, seed)
        V = PRE_NORM.disguise(U, gen(seed))
        assert_same_function(PRE_NORM, U, V)
        found = symmetry.compare(PRE_NORM, U, V, group="enlarged")
        assert (found.same_function, found.same_orbit, found.group) == (True, True, "enlarged")
        moved = found.element.act(PRE_NORM.in_enlarged(U))
        assert worst(PRE_NORM.from_enlarged(moved), V) < 1e-9
        assert symmetry.compare(PRE_NORM, U, perturbed(V, 1e-4)).same_function is False


def test_the_literal_scales_are_those_of_the_group():
    """One random element of the enlarged group, written out tensor by tensor."""
    U, V = draw(PRE_NORM.space, 4), None
    larger = PRE_NORM.enlarged
    s = torch.randn(8, generator=gen(4), dtype=torch.float64)
    one, gain = larger.group.identity(), {"0.gain_2": s.reshape(8, 1, 1)}
    back = {"0.gain_2": 1 / gain["0.gain_2"]}
    g = replace(one, linears={**one.linears, **gain}, inverses={**one.inverses, **back})
    V = PRE_NORM.from_enlarged(g.act(PRE_NORM.in_enlarged(U)))
    assert torch.allclose(V["0.g_2"], U["0.g_2"] * s)
    assert torch.allclose(V["0.b_2"], U["0.b_2"] * s)
    assert torch.allclose(V["0.W_A"], U["0.W_A"] / s[:, None])
    changed = {"0.g_2", "0.b_2", "0.W_A"}
    assert all(torch.equal(V[name], U[name]) for name in U if name not in changed)


def test_a_gain_that_one_reader_does_not_undo_is_caught():
    wrong = Rescaling("0.gain_1", "stream", ("0.g_1", "0.b_1"), ("0.W_Q", "0.W_K"))
    claim = Architecture(PRE_NORM.space, PRE_NORM.forward, PRE_NORM.inputs, freedoms=(wrong,))
    with pytest.raises(AssertionError, match="'residual_stack, enlarged' changes its function"):
        claim.check_invariance()


def test_names_of_axes_and_tensors_decide_nothing():
    """The paper's attention under names of one's own, with a forward that says what they are."""
    space = WeightSpace.build(
        "renamed",
        [
            Axis.free("left", 6),
            Axis.perm("place", 2),
            Axis.linear("a", 3, of="place"),
            Axis.linear("b", 2, of="place"),
            Axis.free("right", 6),
        ],
        {"x": "place left a", "y": "place left a*", "z": "place left b", "u": "place b* right"},
    )

    def forward(w, X):
        names = {"W_Q": "x", "W_K": "y", "W_V": "z", "W_O": "u"}
        return functional.multi_head(X, {ours: w[theirs] for ours, theirs in names.items()})

    mine = Architecture(space, forward, Vectors(width=6))
    mine.check_invariance()
    U = draw(space, 5)
    assert symmetry.compare(mine, U, mine.disguise(U, gen(5))).same_orbit is True
    V = mine.disguise(perturbed(U, 0.01), gen(6))
    found = symmetry.compare(mine, U, V)
    assert (found.same_function, found.same_orbit) == (False, False)
    assert symmetry.compare(space, U, V).same_function is None  # no forward, so no witness
    assert symmetry.canonical_form(mine, U).keys() == U.keys()


@every_space
def test_architectures_go_to_other_processes(space):
    architecture = architecture_of(space)
    back = pickle.loads(pickle.dumps(architecture))
    assert back.space == space
    U = {name: w[0, 0] for name, w in draw(space, 1).items()}
    (X,) = architecture.inputs.draw(1, 4, generator=gen(1))
    assert torch.equal(back.forward(U, X), architecture.forward(U, X))


def test_a_space_that_does_not_have_what_its_architecture_needs_is_refused():
    for architecture in ("attention_block", "stack", "small_transformer"):
        wrong = WeightSpace.build("s", [Axis.free("x", 2)], {"w": "x"}, architecture=architecture)
        with pytest.raises(SpaceError, match=f"names the architecture '{architecture}', which ne"):
            find_architecture(wrong)


def test_token_ids_are_inputs_too():
    space = WeightSpace.build(
        "bag of words",
        [Axis.free("token", 9), Axis.perm("neuron", 5), Axis.free("logit", 3)],
        {"W_E": "token neuron", "W_C": "neuron logit"},
    )

    def forward(w, ids):
        return torch.relu(w["W_E"][..., ids, :]).sum(-2, keepdim=True) @ w["W_C"]

    bag = Architecture(space, forward, Ids(vocabulary=9))
    bag.check_invariance()
    U = draw(space, 6)
    assert_same_function(bag, U, bag.disguise(U, gen(6)))
    assert symmetry.compare(bag, U, bag.disguise(U, gen(7))).same_function is True
    found = symmetry.compare(bag, U, perturbed(U, 0.01))
    assert found.same_function is False
    assert found.witness.X.dtype == torch.long
    with pytest.raises(AssertionError, match="not the same function: on 1 tokens"):
        assert_same_function(bag, U, perturbed(U, 0.01))


def test_a_space_without_a_known_name_has_no_architecture():
    unknown = WeightSpace.build("mine", [Axis.free("x", 2)], {"w": "x"}, architecture="nothing")
    assert find_architecture(unknown) is None
    with pytest.raises(SpaceError, match="space 'mine' has no reference forward"):
        architecture_of(unknown)
    with pytest.raises(SpaceError, match="acts on 'W_X', which must be a tensor of"):
        _ = Architecture(
            SIX["attention_block"],
            lambda w, x: x,
            Vectors(width=8),
            freedoms=(Rescaling("s", "neuron", ("W_X",), ()),),
        ).enlarged
