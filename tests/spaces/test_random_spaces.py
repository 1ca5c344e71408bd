"""Everything derived from a space holds for random spaces.

One drawn space serves all properties: the group law, the action against loops over entries, the
invariants, the fingerprint, the comparison, and the layers. A space or a layer may be refused, in
a sentence; it may not be wrong.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from hypothesis import HealthCheck, assume, event, given, settings
from torch import Tensor, nn

from cases import draw, gen, seeds, trials, worst
from literal_action import act as literal_act
from literal_action import bare, permuted
from random_spaces import build, descriptions
from transformer_nfn import symmetry
from transformer_nfn.errors import SpaceError
from transformer_nfn.nn import Activation, Equivariant, Invariant
from transformer_nfn.spaces import Axis, Weights, WeightSpace, fold, product
from transformer_nfn.testing import assert_equivariant, assert_invariant

COUNT = trials(40, 10_000)
CONDITION = 10.0
T = TypeVar("T")


def test_whatever_follows_from_a_random_space_is_true() -> None:
    accepted = 0

    @settings(max_examples=COUNT, suppress_health_check=list(HealthCheck))
    @given(descriptions(), seeds)
    def check(description, seed) -> None:
        nonlocal accepted
        space = build(description)
        if isinstance(space, str):
            event("refused: " + " ".join(space.split()[:2]))
            assert "\n" not in space.strip()
            assert len(space) > 15
            assume(False)
        assert isinstance(space, WeightSpace)
        event(f"products: {bool(space.products)}, complete: {space.products_separate}")
        check_space(space, seed)
        accepted += 1

    check()
    assert accepted >= COUNT  # a strategy that draws nothing but misfits would prove nothing


def test_a_matrix_that_is_hardly_fixed_is_completed_to_an_invertible_one() -> None:
    axes = [Axis.perm("p", 3), Axis.linear("g", 3, of="p"), Axis.free("f", 3)]
    space = WeightSpace.build("hardly fixed", axes, {"v": "g* p", "W": "p f"})
    for seed in range(trials(10, 30)):
        U = draw(space, seed)  # of the same random numbers as the completion, for one seed
        found = symmetry.compare(space, U, element(space, seed).act(U))
        assert found.same_orbit is True, found.reason


def check_space(space: WeightSpace, seed: int) -> None:
    assert WeightSpace.from_json(space.to_json()) == space
    U = draw(space, seed)
    check_group(space, U, seed)
    check_invariants(space, U, seed)
    check_fingerprint(space, U, seed)
    check_compare(space, U, seed)
    check_layers(space, seed)


def attempt(make: Callable[[], T]) -> T | str:
    """What is made, or the sentence that refuses it."""
    try:
        return make()
    except SpaceError as error:
        return str(error)


def element(space: WeightSpace, seed: int):
    return space.group.random(gen(seed), max_condition=CONDITION)


def check_group(space: WeightSpace, U: Weights, seed: int) -> None:
    g, h = element(space, seed), element(space, seed + 1)
    assert worst(bare(g.act(U)), literal_act(g, bare(U))) < 1e-9
    assert worst((g @ h).act(U), g.act(h.act(U))) < 1e-9
    assert worst(g.inverse().act(g.act(U)), U) < 1e-9
    assert worst((g @ g.inverse()).act(U), U) < 1e-9
    assert worst(space.group.identity().act(U), U) == 0
    many = space.group.random(gen(seed), batch=2, max_condition=CONDITION)
    each = torch.cat([flat(many[i].act(U)) for i in range(2)])
    assert torch.allclose(flat(many.act(U)), each, rtol=1e-9, atol=1e-9)


def flat(weights: Weights) -> Tensor:
    return torch.cat([w.flatten(1) for w in weights.values()], 1)


def check_invariants(space: WeightSpace, U: Weights, seed: int) -> None:
    g = element(space, seed)
    before, after = fold(space, U), fold(space, g.act(U))
    assert worst(after, g.linear_part().act(before)) < 1e-9
    for p in space.products:
        x, y = product(space, bare(before), p), product(space, bare(after), p)
        expected = torch.as_tensor(permuted(space, g, x.numpy(), p.axes))
        assert float((y - expected).norm()) <= 1e-8 * max(float(x.norm()), 1e-3), p.name


def check_fingerprint(space: WeightSpace, U: Weights, seed: int) -> None:
    mine = attempt(lambda: symmetry.fingerprint(space, U))
    if isinstance(mine, str):
        assert "no invariants" in mine
        assert not space.products
        return
    moved = symmetry.fingerprint(space, element(space, seed).act(U))
    assert float((moved - mine).norm() / mine.norm()) < 1e-7
    form = attempt(lambda: symmetry.canonical_form(space, U))
    if isinstance(form, str):
        assert "canonical form needs" in form
        return
    other = symmetry.fingerprint(space, form)
    assert float((other - mine).norm() / mine.norm()) < 1e-6


def check_compare(space: WeightSpace, U: Weights, seed: int) -> None:
    g = element(space, seed)
    V = g.act(U)
    same = symmetry.compare(space, U, V)
    event(f"same orbit found: {same.same_orbit}")
    assert same.same_function is not False, same.reason
    assert same.same_orbit is not False, same.reason
    if same.same_orbit:
        assert same.element is not None
        assert worst(same.element.act(U), V) < 1e-6
    # The norm of an invariant changes, so the networks are different.
    seen = [*space.entry_tensors, *(p.plain for p in space.products if p.plain in space.tensors)]
    if seen:
        name = seen[seed % len(seen)]
        other = g.act({n: w * 1.5 if n == name else w for n, w in U.items()})
        apart = symmetry.compare(space, U, other)
        event(f"different orbit found: {apart.same_orbit}")
        assert apart.same_function is not True, (name, apart.reason)
        assert apart.same_orbit is not True, (name, apart.reason)


def check_layers(space: WeightSpace, seed: int) -> None:
    torch.manual_seed(seed)
    options = {"gated": seed % 2 == 0, "quadratic": seed % 3 == 0}
    fn = torch.tanh if seed % 5 == 0 else torch.relu
    weights = draw(space, seed, batch=2, channels=2)
    g = element(space, seed)
    layer = attempt(lambda: Equivariant(space, 2, 3, **options).double())
    if isinstance(layer, str):
        assert "layers" in layer
        return
    act, last = Activation(space, fn), Invariant(space, 3, 2).double()
    with torch.no_grad():
        deep = nn.Sequential(layer, act)
        assert_equivariant(deep, space, weights, element=g, tolerance=1e-8)
        assert_invariant(nn.Sequential(deep, last), space, weights, element=g, tolerance=1e-7)
