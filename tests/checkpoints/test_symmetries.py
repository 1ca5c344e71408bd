"""One contract for every symmetry on every family.

An action leaves the function unchanged in float64, and half of an action does not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_families import TINY, network
from transformer_nfn.checkpoints.symmetries import SYMMETRIES, Symmetry
from transformer_nfn.spaces.actions import Drawing

pytest.importorskip("transformers")

Weights = dict[str, Tensor]
HOLDS, BREAKS = 1e-9, 1e-4
LOOSE = ("readers + γ⁻¹vᵀ", "writers + u1ᵀ", "key bias shifted", "position bias shifted")
"""Each tensor of these is moved on its own (with the bias that takes it back)."""


def drawing(seed: int = 0) -> Drawing:
    return Drawing(torch.Generator().manual_seed(seed), condition=10.0)


def whole(name: str) -> Weights:
    """All tensors of a tiny network, a tied output matrix under the name of a head."""
    net = network(name)
    return net.weights | ({"head": net.weights["token"].mT} if net.about.tied else {})


@pytest.mark.parametrize("family", TINY)
def test_an_action_leaves_the_function_unchanged(family: str) -> None:
    net = network(family)
    for symmetry in SYMMETRIES:
        weights, how = whole(family), drawing()
        changed: Weights = {}
        for site in symmetry.sites(net.about):
            own = site.pick(weights)
            moved = symmetry.act(site, own, symmetry.draw(site, own, how))
            changed |= site.put(moved)
            weights |= site.put(moved)
        if changed:
            assert any(
                not torch.equal(changed[n], w) for n, w in whole(family).items() if n in changed
            )
            if net.about.tied:
                changed.pop("head", None)
            assert net.change(changed) < HOLDS, symmetry.name


@pytest.mark.parametrize("family", TINY)
def test_half_an_action_changes_the_function(family: str) -> None:
    net = network(family)
    for symmetry in SYMMETRIES:
        if symmetry.name in LOOSE:
            continue
        for site in list(symmetry.sites(net.about))[:1]:
            own = site.pick(whole(family))
            moved = symmetry.act(site, own, symmetry.draw(site, own, drawing(1)))
            for name in _telling(symmetry, moved):
                half = site.put({n: w for n, w in moved.items() if n != name})
                assert net.change(half) > BREAKS, (symmetry.name, name)


def _telling(symmetry: Symmetry[Any], moved: Weights) -> list[str]:
    """Tensors that cannot be left behind."""
    if symmetry.name == "stream":
        return [name for name in moved if name.endswith(("W_Q", "W_O", "W_A", "W_B"))][:4]
    silent = ("b_K",) if symmetry.name != "quarter turns of query/key pairs" else ()
    return [name for name in moved if name not in silent and len(moved) > 1]
