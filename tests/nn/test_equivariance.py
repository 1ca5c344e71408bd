"""E(gU) = g E(U) and I(gU) = I(U), for every space, two layers with activation."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_cases import BLOCK, KINDS, SPACES, invariant_options
from torch import nn

from transformer_nfn import spaces
from transformer_nfn.nn import Activation, Equivariant, Invariant
from transformer_nfn.spaces import Axis, WeightSpace
from transformer_nfn.testing import assert_equivariant, assert_invariant


def network(space: WeightSpace, layers: int, **options: object) -> nn.Sequential:
    channels = [2, 3, 2, 3][: layers + 1]
    modules: list[nn.Module] = []
    for d, e in pairwise(channels):
        modules += [Equivariant(space, d, e, **options), Activation(space)]  # type: ignore[arg-type]
    return nn.Sequential(*modules)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPACES)
def test_layers_commute_with_the_group(name: str, kind: str) -> None:
    space, options = SPACES[name], KINDS[kind]
    torch.manual_seed(0)
    deep = network(space, 2, **options).double()
    whole = nn.Sequential(deep, Invariant(space, 2, 4, **invariant_options(options)).double())
    weights = space.randn(3, 2, dtype=torch.float64)
    with torch.no_grad():
        assert_equivariant(deep, space, weights, tolerance=1e-9)
        assert_invariant(whole, space, weights, tolerance=1e-9)


@pytest.mark.parametrize("name", SPACES)
def test_single_precision_holds_to_a_thousandth(name: str) -> None:
    space = SPACES[name]
    torch.manual_seed(0)
    deep, last = network(space, 2), Invariant(space, 2, 4)
    weights = space.randn(3, 2)
    with torch.no_grad():
        assert_equivariant(deep, space, weights, tolerance=1e-3)
        assert_invariant(lambda w: last(deep(w)), space, weights, tolerance=1e-3)


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 1000),
)
def test_any_size_of_the_papers_block(
    D: int, h: int, Dk: int, Dv: int, DA: int, d: int, e: int, seed: int
) -> None:
    space = spaces.attention_block(D, h, Dk, Dv, DA)
    torch.manual_seed(seed)
    layer, last = Equivariant(space, d, e).double(), Invariant(space, e, 2).double()
    weights = space.randn(2, d, dtype=torch.float64)
    with torch.no_grad():
        assert_equivariant(layer, space, weights, tolerance=1e-9, seed=seed)
        assert_invariant(lambda w: last(layer(w)), space, weights, tolerance=1e-9, seed=seed)


@pytest.mark.parametrize("name", SPACES)
def test_groups_are_layers_side_by_side(name: str) -> None:
    space = SPACES[name]
    for options in ({}, {"gated": True, "quadratic": True}):
        torch.manual_seed(0)
        both = Equivariant(space, 4, 6, groups=2, **options).double()  # type: ignore[arg-type]
        last = Invariant(space, 6, 8, groups=2).double()
        apart = [Equivariant(space, 2, 3, **options).double() for _ in range(2)]  # type: ignore[arg-type]
        lasts = [Invariant(space, 3, 4).double() for _ in range(2)]
        with torch.no_grad():
            for i in range(2):
                for whole, part in ((both, apart[i]), (last, lasts[i])):
                    for x, y in zip(whole.blocks(), part.blocks(), strict=True):
                        # Groups come after frequencies.
                        y.weight.copy_(x.weight.select(1 if x.term.source.private else 0, i))
            for x, y in zip(both.parameters(), apart[0].parameters(), strict=True):
                assert x.numel() == 2 * y.numel()
        weights = space.randn(3, 4, dtype=torch.float64)
        halves = [{n: x[:, 2 * i : 2 * i + 2] for n, x in weights.items()} for i in range(2)]
        for context in (torch.enable_grad(), torch.no_grad()):
            with context:
                out = both(weights)
                pieces = [layer(w) for layer, w in zip(apart, halves, strict=True)]
                for n, x in out.items():
                    torch.testing.assert_close(x, torch.cat([p[n] for p in pieces], 1))
                expected = torch.cat([i(p) for i, p in zip(lasts, pieces, strict=True)], 1)
                torch.testing.assert_close(last(out), expected)


def test_shifts_leave_outputs_exactly_alone() -> None:
    space = SPACES["biased_block"]
    layer = Equivariant(space, 1, 2).double()
    weights = space.randn(2, 1, dtype=torch.float64)
    shift = torch.randn_like(weights["b_V"])
    moved = weights | {
        "b_K": torch.randn_like(weights["b_K"]),
        "b_V": weights["b_V"] + shift,
        "b_O": weights["b_O"] - torch.einsum("bchv,bchvf->bcf", shift, weights["W_O"]),
    }
    for name, expected in layer(weights).items():
        torch.testing.assert_close(layer(moved)[name], expected, rtol=1e-12, atol=1e-12)


def test_activation_leaves_tensors_with_a_linear_axis_alone() -> None:
    weights = BLOCK.randn(2, 3)
    out = Activation(BLOCK)(weights)
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        assert out[name] is weights[name]
    for name in ("W_A", "W_B", "b_A", "b_B"):
        torch.testing.assert_close(out[name], weights[name].clamp(min=0))


def test_a_free_axis_that_stands_twice_is_read_and_written_in_both_places() -> None:
    space = WeightSpace.build(
        "twice", [Axis.free("x", 3), Axis.perm("p", 4)], {"W": "p x x", "b": "p"}
    )
    torch.manual_seed(0)
    layer = Equivariant(space, 1, 1).double()
    U = space.randn(1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        out = layer(U)["W"]
    assert (out[..., 0] - out[..., 1]).abs().min() > 0
    assert (out[..., 0, :] - out[..., 1, :]).abs().min() > 0
    # Every linear map of the nine numbers at an index of p: on their own, and on their sum.
    weights = sum(p.numel() for p in layer.parameters())
    assert weights >= 2 * 9 * 9
