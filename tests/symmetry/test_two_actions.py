"""Tensors on which two matrices act: their products are derived to the end, or left out."""

import pytest
import torch

from cases import draw, gen, perturbed, trials, worst
from transformer_nfn.errors import SpaceError
from transformer_nfn.nn import Equivariant
from transformer_nfn.spaces import Axis, Shift, WeightSpace, products
from transformer_nfn.symmetry import canonical_form, compare, fingerprint

NORMED = WeightSpace.build(
    "attention behind an affine norm",
    [
        Axis.perm("stream", 5),
        Axis.scale("gain", 1, of="stream"),
        Axis.perm("head", 2),
        Axis.linear("qk", 3, of="head"),
        Axis.linear("vo", 2, of="head"),
        Axis.free("out", 4),
    ],
    {
        "g": "stream gain",
        "W_Q": "head stream gain* qk",
        "W_K": "head stream gain* qk*",
        "W_V": "head stream gain* vo",
        "W_O": "head vo* out",
    },
)
CHAIN = WeightSpace.build(
    "two linear axes",
    [
        Axis.free("in", 3),
        Axis.perm("one", 1),
        Axis.linear("a", 2, of="one"),
        Axis.linear("b", 3, of="one"),
        Axis.free("out", 4),
    ],
    {"X": "one in a", "Y": "one a* b", "Z": "one b* out"},
)
TURNED = WeightSpace.build(
    "a stream that orthogonal matrices turn",
    [
        Axis.free("token", 6),
        Axis.orthogonal("stream", 4),
        Axis.perm("head", 2),
        Axis.linear("qk", 3, of="head"),
        Axis.linear("vo", 2, of="head"),
        Axis.free("logit", 5),
    ],
    {
        "W_E": "token stream",
        "W_Q": "head stream qk",
        "W_K": "head stream qk*",
        "W_V": "head stream vo",
        "W_O": "head vo* stream",
        "W_C": "stream logit",
    },
)
SPACES = {space.name: space for space in (NORMED, CHAIN, TURNED)}
every_space = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)


@every_space
def test_fingerprints_do_not_move_along_an_orbit(space):
    for seed in range(trials(4, 20)):
        U, g = draw(space, seed), space.group.random(gen(seed), max_condition=100)
        before, after = fingerprint(space, U), fingerprint(space, g.act(U))
        assert float((after - before).norm() / before.norm()) < 1e-8
        apart = fingerprint(space, perturbed(U, 0.1, seed))
        assert float((apart - before).norm() / before.norm()) > 1e-3


@every_space
def test_orbits_are_recognised_and_strangers_are_not(space):
    for seed in range(trials(2, 10)):
        U, g = draw(space, seed), space.group.random(gen(seed), max_condition=100)
        found = compare(space, U, g.act(U))
        assert (found.same_function, found.same_orbit) == (True, True)
        assert worst(found.element.act(U), g.act(U)) < 1e-9
        other = compare(space, U, g.act(perturbed(U, 1e-2, seed)))
        assert other.same_orbit is False


def test_the_products_of_an_affine_norm_hold_its_gain():
    U = draw(NORMED, 3)
    found = products(NORMED, U)
    assert list(found) == ["(g·W_Q)·(g·W_K)", "(g·W_V)·W_O"]
    w = {name: x[0, 0] for name, x in U.items()}
    g, Q, K = w["g"][:, 0], w["W_Q"][:, :, 0], w["W_K"][:, :, 0]
    expected = torch.einsum("s,hsk,htk,t->hst", g, Q, K, g)
    assert torch.allclose(found["(g·W_Q)·(g·W_K)"][0, 0], expected, atol=1e-12)
    assert NORMED.products_separate


def test_a_chain_is_multiplied_to_its_end():
    U = draw(CHAIN, 4)
    (found,) = products(CHAIN, U).values()
    w = {name: x[0, 0, 0] for name, x in U.items()}
    assert torch.allclose(found[0, 0, 0], w["X"] @ w["Y"] @ w["Z"], atol=1e-12)


def test_what_has_no_end_is_left_out_and_said_so():
    names = {p.name for p in TURNED.products}
    assert {"W_E·W_E", "W_E·W_C", "(W_E·W_Q)·(W_E·W_K)", "(W_E·W_V)·(W_E·W_O)"} <= names
    assert ("W_Q", "W_K") in TURNED.derivation.left_out
    assert not TURNED.products_separate


@every_space
def test_layers_and_canonical_forms_say_that_they_need_one(space):
    with pytest.raises(SpaceError, match="layers need tensors with at most one linear axis"):
        Equivariant(space, 1, 1)
    with pytest.raises(SpaceError, match="canonical form needs tensors with at most one axis"):
        canonical_form(space, draw(space))


def relu_mlp():
    return WeightSpace.build(
        "relu neurons",
        [
            Axis.free("in", 3),
            Axis.perm("neuron", 4),
            Axis.positive("gain", 1, of="neuron"),
            Axis.free("out", 2),
        ],
        {"W_A": "in neuron gain", "b_A": "neuron gain", "W_B": "neuron gain* out"},
    )


def test_a_sign_that_products_do_not_see_is_not_called_the_same():
    space = relu_mlp()
    U = draw(space, 5)
    V = space.group.random(gen(5)).act(U)
    assert compare(space, U, V).same_orbit is True
    flipped = {name: -w for name, w in V.items()}
    assert torch.allclose(fingerprint(space, flipped), fingerprint(space, U))
    found = compare(space, U, flipped)
    assert (found.same_function, found.same_orbit) == (None, None)
    assert "do not tell all functions apart" in found.reason


def space_of(tensors, shifts=()):
    axes = [
        Axis.free("in", 2),
        Axis.perm("group", 2),
        Axis.perm("query", 2, of="group"),
        Axis.linear("qk", 2, of="group"),
        Axis.linear("rope", 4, of="group", form="complex"),
        Axis.linear("turn", 4, of="group", form="complex"),
    ]
    return WeightSpace.build("s", axes, tensors, shifts=shifts)


REFUSED = {
    "owned axis twice": (
        lambda: space_of({"X": "group query qk", "Y": "group query qk*"}),
        "would see 'X': the product X·Y would carry axis 'query', which belongs to another, twice",
    ),
    "pieces carried on": (
        lambda: space_of({"X": "group rope turn", "A": "group rope*", "B": "group turn*"}),
        "X·A along 'rope', on which 2 complex scales act, could still change along 'turn'",
    ),
    "a circle": (
        lambda: space_of({"X": "group qk rope*", "Y": "group qk* rope"}),
        "would see 'X': the product X·Y could still change along 'rope', which it carries twice",
    ),
    "axis three times": (
        lambda: space_of({"X": "group group group in"}),
        "carries perm axis 'group' three times",
    ),
    "shift along a plain axis": (
        lambda: space_of({"c": "group qk", "X": "group qk in", "b": "in"}, [Shift("c", "X", "b")]),
        "could still change along 'qk': one of the two must carry it plain",
    ),
    "shift into other axes": (
        lambda: space_of(
            {"c": "group qk", "X": "group qk* in", "b": "group"}, [Shift("c", "X", "b")]
        ),
        "to carry every axis of 'b' as it does, found 'group'",
    ),
    "shift over another matrix": (
        lambda: space_of(
            {"c": "group qk", "X": "group qk* rope in", "b": "in"}, [Shift("c", "X", "b")]
        ),
        "would sum over 'rope', on which matrices act",
    ),
    "shift of a shift": (
        lambda: space_of(
            {"c": "group qk", "X": "group qk* in", "b": "in"}, [Shift("c", "X", "b"), Shift("b")]
        ),
        "uses a tensor that another shift changes",
    ),
    "shifted twice": (lambda: space_of({"c": "in"}, [Shift("c"), Shift("c")]), "shifted twice"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_space_whose_invariants_could_change_is_refused(make, message):
    with pytest.raises(SpaceError, match=message):
        make()
