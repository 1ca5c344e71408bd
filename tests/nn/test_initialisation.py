"""Outputs keep unit scale from the first to the fourth layer."""

from __future__ import annotations

import pytest
import torch
from layer_cases import SPACES

from transformer_nfn import spaces
from transformer_nfn.nn import Activation, Equivariant, Invariant

WIDE = {
    "paper": spaces.attention_block(32, 2, 16, 16, 64),
    "residual": spaces.residual_stack(2, 16, 2, 8, 8, 32, d_in=16, d_out=4),
    **SPACES,
}


@pytest.mark.parametrize("active", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("name", WIDE)
def test_unit_weights_give_unit_outputs(name: str, active: bool) -> None:
    space = WIDE[name]
    channels = 4 if name == "paper" else 8
    squares = torch.zeros(4)
    draws = 3
    for seed in range(draws):
        torch.manual_seed(seed)
        weights = space.randn(8, 1)
        for depth in range(4):
            layer = Equivariant(space, channels if depth else 1, channels)
            with torch.no_grad():
                weights = layer(weights)
                total = torch.cat([x.flatten() for x in weights.values()])
                squares[depth] += total.square().mean() / draws
                if active:
                    weights = Activation(space)(weights)
    assert (squares.sqrt() > 0.3).all(), squares
    assert (squares.sqrt() < 3).all(), squares


def test_invariants_have_unit_scale() -> None:
    torch.manual_seed(0)
    space = WIDE["paper"]
    out = Invariant(space, 4, 64)(space.randn(64, 4))
    assert 0.5 < out.std() < 2


def test_same_seed_same_layer() -> None:
    space = SPACES["attention_block"]
    torch.manual_seed(3)
    first = Equivariant(space, 1, 2)
    torch.manual_seed(3)
    second = Equivariant(space, 1, 2)
    for x, y in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(x, y)
