"""One contract for every symmetry on every family: `sites, size, draw, act, fit, reduce`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_families import TINY, network
from transformer_nfn.checkpoints.symmetries import SYMMETRIES, Site, Symmetry
from transformer_nfn.spaces.actions import Drawing

pytest.importorskip("transformers")

Weights = dict[str, Tensor]
HOLDS, BREAKS, STEP = 1e-9, 1e-4, 1e-5
QUICK = ("gpt2-untied", "bert", "vit", "qwen3", "gemma2", "phi", "t5")
"""Between them these have every symmetry."""
FAMILIES = [pytest.param(f, marks=() if f in QUICK else pytest.mark.nightly) for f in TINY]
LOOSE = ("readers + γ⁻¹vᵀ", "writers + u1ᵀ", "key bias shifted", "position bias shifted")
"""Each tensor of these is moved on its own (with the bias that takes it back)."""


def drawing(seed: int = 0) -> Drawing:
    return Drawing(torch.Generator().manual_seed(seed), condition=10.0)


def all_tensors(family: str) -> Weights:
    """The tensors of a tiny network, a tied output matrix under the name of a head."""
    net = network(family)
    return net.weights | ({"head": net.weights["token"].mT} if net.about.tied else {})


def change(family: str, moved: Weights) -> float:
    """How far outputs move; an output matrix that is tied is no tensor of the network's."""
    net = network(family)
    tied = {"head"} if net.about.tied else set()
    return net.change({name: w for name, w in moved.items() if name not in tied})


def first_sites(family: str) -> list[tuple[Symmetry[Any], Site]]:
    """Each symmetry at its first site and its last."""
    out = []
    for symmetry in SYMMETRIES:
        sites = list(symmetry.sites(network(family).about))
        out += [(symmetry, site) for site in {id(s): s for s in (*sites[:1], *sites[-1:])}.values()]
    return out


def distance(a: Weights, b: Weights) -> float:
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp_min(1e-9)) for n in b)


@pytest.mark.parametrize("family", TINY)
def test_an_action_leaves_the_function_unchanged(family: str) -> None:
    for symmetry in SYMMETRIES:
        weights, how = all_tensors(family), drawing()
        changed: Weights = {}
        for site in symmetry.sites(network(family).about):
            own = site.pick(weights)
            changed |= site.put(symmetry.act(site, own, symmetry.draw(site, own, how)))
            weights |= changed
        before = all_tensors(family)
        assert not changed or any(not torch.equal(before[n], w) for n, w in changed.items())
        assert change(family, changed) < HOLDS, symmetry.name


@pytest.mark.parametrize("family", FAMILIES)
def test_half_an_action_changes_the_function(family: str) -> None:
    for symmetry, site in first_sites(family):
        if symmetry.name in LOOSE:
            continue
        own = site.pick(all_tensors(family))
        moved = symmetry.act(site, own, symmetry.draw(site, own, drawing(1)))
        for name in _telling(symmetry, moved):
            half = site.put({n: w for n, w in moved.items() if n != name})
            assert change(family, half) > BREAKS, (symmetry.name, name)


def _telling(symmetry: Symmetry[Any], moved: Weights) -> list[str]:
    """Tensors that cannot be left behind."""
    if symmetry.name == "stream":
        return [name for name in moved if name.endswith(("W_Q", "W_O", "W_A", "W_B"))][:4]
    silent = ("b_K",) if symmetry.name != "quarter turns of query/key pairs" else ()
    return [name for name in moved if name not in silent and len(moved) > 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fit_finds_the_element(family: str) -> None:
    for symmetry, site in first_sites(family):
        if type(symmetry).fit is Symmetry.fit:
            continue
        a = site.pick(all_tensors(family))
        b = a | symmetry.act(site, a, symmetry.draw(site, a, drawing(2)))
        assert distance(a | symmetry.act(site, a, symmetry.fit(site, a, b)), b) < 1e-8, (
            symmetry.name
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reduced_form_is_constant_on_orbits(family: str) -> None:
    for symmetry, site in first_sites(family):
        if type(symmetry).reduce is Symmetry.reduce:
            continue
        a = site.pick(all_tensors(family))
        b = a | symmetry.act(site, a, symmetry.draw(site, a, drawing(3)))
        one, other = (w | symmetry.reduce(site, w) for w in (a, b))
        assert distance(one, other) < 1e-8, symmetry.name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_size_is_the_rank_of_the_action(family: str) -> None:
    """Fits to random small steps are projections onto the orbit: their rank is its dimension."""
    for symmetry, site in first_sites(family):
        size = symmetry.size(site).continuous
        if size > (100 if family in QUICK else 300) or type(symmetry).fit is Symmetry.fit:
            continue
        a = site.pick(all_tensors(family))
        still = symmetry.act(site, a, symmetry.fit(site, a, a))
        generator = torch.Generator().manual_seed(0)
        rows = []
        for _ in range(size + 3):
            b = {n: w + STEP * w.std() * _normal(w, generator) for n, w in a.items()}
            moved = symmetry.act(site, a, symmetry.fit(site, a, b))
            rows.append(torch.cat([(moved[n] - still[n]).flatten() / STEP for n in still]))
        values = torch.linalg.svdvals(torch.stack(rows))
        assert int((values > 1e-3 * max(float(values[0]), 1e-6)).sum()) == size, symmetry.name


def _normal(w: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(w.shape, generator=generator, dtype=w.dtype)
