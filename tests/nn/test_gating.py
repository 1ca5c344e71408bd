"""Depth adds nothing on Q, K, V without gates, and something with them."""

from __future__ import annotations

import torch
from layer_cases import BLOCK

from transformer_nfn.nn import Activation, Equivariant, Invariant
from transformer_nfn.nn.levels import invariant_sources


def test_stacked_layers_collapse_on_queries_unless_gated() -> None:
    for gated in (False, True):
        torch.manual_seed(0)
        first = Equivariant(BLOCK, 1, 3, gated=gated).double()
        second = Equivariant(BLOCK, 3, 1, gated=gated).double()
        act = Activation(BLOCK)
        u = BLOCK.randn(64, 1, dtype=torch.float64)
        out = second(act(first(u)))["W_Q"]
        # The best single map W_Q -> W_Q of the paper's form, one D × D matrix for all.
        x = u["W_Q"].movedim(-2, -1).reshape(-1, 4)
        y = out.movedim(-2, -1).reshape(-1, 4)
        rest = y - x @ torch.linalg.lstsq(x, y).solution
        collapsed = bool(rest.norm() / y.norm() < 1e-10)
        assert collapsed is not gated


def test_further_quadratic_invariants_are_the_compositions() -> None:
    found = {s.name for s in invariant_sources(BLOCK, quadratic=True)}
    found -= {s.name for s in invariant_sources(BLOCK, quadratic=False)}
    assert found == {"W_A∘W_B", "b_A∘W_B", "W_O∘W_A"}


def test_quadratic_invariants_tell_apart_what_the_paper_cannot() -> None:
    # Neurons of W_A and b_A reversed against those of W_B: every sum is as before, W_A W_B is not.
    torch.manual_seed(0)
    u = BLOCK.randn(1, 1, dtype=torch.float64)
    v = u | {"W_A": u["W_A"].flip(-1), "b_A": u["b_A"].flip(-1)}
    plain = Invariant(BLOCK, 1, 5).double()
    more = Invariant(BLOCK, 1, 5, quadratic=True).double()
    assert (plain(u) - plain(v)).abs().max() < 1e-12
    assert (more(u) - more(v)).abs().max() > 1e-3
