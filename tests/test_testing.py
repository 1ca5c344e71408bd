"""The public checks pass what is right and fail what is not."""

import pytest
import torch

from cases import ALL, SIX, draw, gen
from transformer_nfn import symmetry
from transformer_nfn.errors import SpaceError
from transformer_nfn.testing import assert_equivariant, assert_invariant, assert_same_function

BLOCK = SIX["attention_block"]
every_space = pytest.mark.parametrize("space", ALL.values(), ids=ALL)


@every_space
def test_right_maps_pass(space):
    U = draw(space, batch=2)
    assert_equivariant(lambda w: {n: 2 * t for n, t in symmetry.fold(space, w).items()}, space, U)
    assert_invariant(lambda w: symmetry.fingerprint(space, w), space, U)
    assert_same_function(space, U, space.group.random(gen(1)).act(U))


def test_wrong_maps_fail_and_say_where():
    U = draw(BLOCK, batch=2)
    with pytest.raises(AssertionError, match=r"not equivariant: 'W_Q' .* differ by"):
        assert_equivariant(lambda w: {**w, "W_Q": w["W_Q"].relu()}, BLOCK, U)
    with pytest.raises(AssertionError, match="not invariant"):
        assert_invariant(lambda w: w["W_A"].sum(-1), BLOCK, U)
    with pytest.raises(AssertionError, match="not the same function: on 1 tokens"):
        assert_same_function(BLOCK, U, {n: 1.001 * w for n, w in draw(BLOCK, 1, batch=2).items()})


def test_nan_never_passes():
    U = draw(BLOCK)
    with pytest.raises(AssertionError):
        assert_invariant(lambda w: w["W_A"].sum() * float("nan"), BLOCK, U)


def test_tolerance_follows_the_dtype():
    U = BLOCK.randn(2, generator=gen(0))
    noisy = torch.Generator().manual_seed(0)

    def fn(w):
        total = w["W_B"].sum()
        return total * (1 + 1e-5 * torch.rand((), generator=noisy))

    assert_invariant(fn, BLOCK, U)
    with pytest.raises(AssertionError):
        assert_invariant(fn, BLOCK, {n: w.double() for n, w in U.items()})
    with pytest.raises(AssertionError):
        assert_invariant(fn, BLOCK, U, tolerance=1e-12)


def test_weights_of_another_space_are_refused():
    with pytest.raises(SpaceError):
        assert_same_function(BLOCK, draw(SIX["rope_block"]), draw(BLOCK))
