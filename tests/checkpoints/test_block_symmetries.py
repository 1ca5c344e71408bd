"""Every symmetry inside a block, family by family: it holds, and what is nearly it does not.

A row of a table below is one symmetry: families, what acts (outputs move by 1e-10 at most), and
its control (outputs move by 1e-2 at least). Where a family has a control only, the symmetry is one
that it does not have.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from family_rows import (
    ALL,
    BREAKS,
    GATED,
    GROUPED,
    HOLDS,
    LEARNED,
    PARTIAL,
    POST,
    PRE_BIASED,
    ROTARY,
    T5,
    Act,
    Weights,
    acted,
    drawing,
    row,
)
from torch import Tensor

from tiny_families import network
from transformer_nfn.checkpoints.disguises import BLOCK_ROWS, heads, neurons, norms
from transformer_nfn.checkpoints.disguises.sites import Site, sites
from transformer_nfn.spaces.actions import ComplexScale, Drawing

pytest.importorskip("transformers")


def half(act: Act, *kept: str) -> Act:
    """A symmetry that forgets some of the tensors it should move."""

    def forgetful(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
        return {k: w for k, w in act(site, weights, how).items() if k.split(".")[-1] not in kept}

    return forgetful


def queries_across_groups(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    order = torch.arange(site.block.attention.heads).roll(1)
    return {name: weights[name][order] for name in ("W_Q", "b_Q", "W_O") if name in weights}


def heads_per_block(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    return heads.permute_heads(weights, *heads.draw_heads(site.block.attention, how))


def shared_heads(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    return heads_per_block(site, weights, drawing(len(site.stack.prefix)))


def shared_by_both_stacks_shifted(
    site: Site, weights: Mapping[str, Tensor], how: Drawing
) -> Weights:
    return {k: w for k, w in shared_heads(site, weights, how).items() if k != "bias_table"}


def general_on_queries(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    about = site.block.attention
    return heads.rebase_queries(weights, heads.draw_bases(about.groups, about.d_k, how))


def neighbouring_pairs(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    about = site.block.attention
    G = ComplexScale("neighbours").draw(about.d_k, (about.groups,), how)
    return heads.rebase_queries(weights, G)


def complex_scales(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    about = site.block.attention
    return heads.rebase_queries(weights, heads.draw_query_bases(about, how))


def single_signs(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    about = site.block.attention
    return heads.sign_queries(weights, heads.random_signs((about.groups, about.d_k), how))


def single_scales(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    scales = heads.random_scales(site.block.attention.d_k, how, positive=True)
    return heads.trade_gains(weights, scales)


def shifted(name: str, part: slice) -> Act:
    """A bias of queries or keys moved in some of its coordinates."""

    def shift(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
        bias = weights[name].clone()
        bias[:, part] += torch.randn(bias[:, part].shape, generator=how.generator).double()
        return {name: bias}

    return shift


def value_bias_alone(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    return {"b_V": weights["b_V"] + 0.5}


def bias_per_bucket(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    if "bias_table" not in weights:
        return {}
    table = weights["bias_table"]
    return {"bias_table": table + torch.randn(len(table), 1, generator=how.generator).double()}


def scaled(sign: float, *, gate: bool = False) -> Act:
    """Neurons scaled up to a sign, at ``W_A`` or at the gate."""

    def scale(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
        s = heads.random_scales(site.block.mlp.neurons, how, positive=True) * sign
        if not gate:
            return neurons.scale_neurons(weights, s)
        return {"W_G": weights["W_G"] * s, "W_B": weights["W_B"] / s.unsqueeze(-1)}

    return scale


def gains_of_post_norms(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """As if nothing but the readers saw the norm."""
    out: Weights = {}
    for reading in norms.readings(site.block, weights):
        gain = weights[f"{reading.norm}.g"] * heads.random_scales(site.about.width, how)
        out |= norms.replace_gain(weights, reading, gain)
    return out


def readers_shifted(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """As if every norm took the mean away."""
    out: Weights = {}
    for reading in norms.readings(site.block, weights):
        shifts = {}
        for name in reading.present(weights):
            *sites_before, _, n = weights[name].shape
            shifts[name] = 0.1 * torch.randn((*sites_before, n), generator=how.generator).double()
        out |= norms.shift_readers(weights, reading, shifts)
    return out


def signs_without_gain(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    moved = BLOCK_ROWS["signs against gains after sublayers"](site, weights, how)
    return {k: w for k, w in moved.items() if not k.endswith(".g")}


def constant_moved(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    constant = torch.randn(site.about.width, generator=how.generator, dtype=torch.float64)
    return norms.move_between_branches(weights, constant)


def constant_added(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    return {name: weights[name] + 0.5 * torch.arange(site.about.width) for name in ("b_O", "b_B")}


Rows = dict[str, tuple[tuple[str, ...], Act | None, Act | None]]
ROWS: Rows = {
    "heads": ((*LEARNED, *PARTIAL), row("heads permuted"), half(row("heads permuted"), "W_O")),
    "heads in groups": (GROUPED, row("heads permuted"), queries_across_groups),
    "heads that share a position bias": (T5, shared_heads, heads_per_block),
    "heads with their position bias": (T5, shared_heads, shared_by_both_stacks_shifted),
    "heads of cross-attention": (T5, row("heads permuted"), half(row("heads permuted"), "W_O")),
    "QK: GL": (
        (*LEARNED, *T5), row("queries and keys re-based"),
        half(row("queries and keys re-based"), "W_K"),
    ),
    "QK: biases move along": (
        (*LEARNED, "qwen2"), row("queries and keys re-based"),
        half(row("queries and keys re-based"), "b_Q"),
    ),
    "QK: complex scales, not GL": (ROTARY, row("queries and keys re-based"), general_on_queries),
    "QK: pairs are halves": (ROTARY, row("queries and keys re-based"), neighbouring_pairs),
    "QK: partly rotary": (PARTIAL, row("queries and keys re-based"), general_on_queries),
    "QK under a norm: no complex scales": (("qwen3",), None, complex_scales),
    "QK under a norm: signs of pairs": (("qwen3",), row("signs of query/key pairs"), single_signs),
    "QK under a norm: gains": (("qwen3",), row("gains of query and key norm"), single_scales),
    "QK under a norm: quarter turns": (
        ("qwen3",), row("quarter turns of query/key pairs"),
        half(row("quarter turns of query/key pairs"), "g"),
    ),
    "QK under a norm: signs against gains": (
        ("qwen3",), row("signs against gains of query and key norm"),
        half(row("signs against gains of query and key norm"), "g"),
    ),
    "VO": (
        ALL, row("values and outputs re-based"), half(row("values and outputs re-based"), "W_O"),
    ),
    "key bias": (LEARNED, row("key bias shifted"), shifted("b_Q", slice(None))),
    "key bias under rotary positions": (("qwen2",), None, shifted("b_K", slice(None))),
    "key bias, partly rotary": (PARTIAL, row("key bias shifted"), shifted("b_K", slice(0, 4))),
    "value bias": (
        (*LEARNED, *PARTIAL), row("value bias into output bias"),
        half(row("value bias into output bias"), "b_O"),
    ),
    "value bias without an output bias": (("qwen2",), None, value_bias_alone),
    "position bias": (T5, row("position bias shifted"), bias_per_bucket),
    "neurons": (ALL, row("neurons permuted"), half(row("neurons permuted"), "W_B")),
    "scales of GELU": (
        ("gpt2", "bert", "roberta", "distilbert", "vit", "deit", *PARTIAL), None, scaled(1.0),
    ),
    "scales of ReLU": (("opt", "t5"), row("neurons scaled"), scaled(-1.0)),
    "up against down": (GATED, row("neurons scaled"), scaled(1.0, gate=True)),
    "gains": (
        (*PRE_BIASED, *GROUPED, *T5), row("norm gains into readers"),
        half(row("norm gains into readers"), "W_V", "W_A"),
    ),
    "gains of post-norms": (POST, None, gains_of_post_norms),
    "norm biases": (
        (*PRE_BIASED, *POST), row("norm biases into readers' biases"),
        half(row("norm biases into readers' biases"), "b_V", "b_A"),
    ),
    "norm biases and the residual": (
        POST, row("norm biases into readers' biases"),
        half(row("norm biases into readers' biases"), "b_O"),
    ),
    "readers and centring": (
        (*PRE_BIASED, *POST), row("readers + γ⁻¹vᵀ"), half(row("readers + γ⁻¹vᵀ"), "b_V", "b_A"),
    ),
    "readers under RMS norm": ((*GROUPED, *T5), None, readers_shifted),
    "constant between branches": (
        PARTIAL, row("constant between parallel branches"), constant_added,
    ),
    "constant between branches in a row": (("gpt2", "opt", "vit"), None, constant_moved),
    "signs after the sublayers": (
        ("gemma2",), row("signs against gains after sublayers"), signs_without_gain,
    ),
}  # fmt: skip
CASES = [
    pytest.param(family, *acts, id=f"{name}: {family}")
    for name, (families, *acts) in ROWS.items()
    for family in families
]


@pytest.mark.parametrize(("family", "holds", "breaks"), CASES)
def test_row(family: str, holds: Act | None, breaks: Act | None) -> None:
    net = network(family)
    if holds is not None:
        moved = acted(net, holds)
        assert any(not torch.equal(moved[name], w) for name, w in net.weights.items())
        assert net.change(moved) < HOLDS
    if breaks is not None:
        assert net.change(acted(net, breaks)) > BREAKS


@pytest.mark.parametrize("family", [*ALL, "gpt2-untied", "gpt2-base", "bert-base", "llama-tied"])
def test_rows_act_only_where_they_hold(family: str) -> None:
    net = network(family)
    for act in BLOCK_ROWS.values():
        assert net.change(acted(net, act)) < HOLDS


@pytest.mark.parametrize(("family", "name"), [
    ("llama", "key bias shifted"), ("llama", "value bias into output bias"),
    ("llama", "readers + γ⁻¹vᵀ"), ("llama", "writers + u1ᵀ"), ("qwen2", "key bias shifted"),
    ("qwen2", "value bias into output bias"), ("qwen3", "queries and keys re-based"),
    ("gpt2", "neurons scaled"), ("gpt2", "constant between parallel branches"),
    ("bert", "norm gains into readers"),
])  # fmt: skip
def test_a_row_that_does_not_hold_does_nothing(family: str, name: str) -> None:
    net = network(family)
    assert not any(
        BLOCK_ROWS[name](site, {s: net.weights[n] for s, n in site.names.items()}, drawing())
        for site in sites(net.about)
    )
