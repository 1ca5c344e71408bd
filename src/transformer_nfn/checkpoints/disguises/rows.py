"""Which symmetries has a block? One row each: where it holds, it acts by a random element.

A row takes a site, its tensors in float64 and how to draw, and returns the tensors it changed;
nothing where it does not hold. Sizes of additive moves follow the weights they are added to, so
that a disguise costs no more precision than rounding does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import heads, neurons, norms
from transformer_nfn.checkpoints.disguises.heads import random_scales, random_signs
from transformer_nfn.checkpoints.disguises.sites import Site
from transformer_nfn.functional.description import Attention, Transformer
from transformer_nfn.spaces.actions import Drawing

Weights = dict[str, Tensor]
Row = Callable[[Site, Mapping[str, Tensor], Drawing], Weights]

SHARE = 0.25
"""Root mean square of what is added to a tensor, in units of its own."""
TINY = 1e-3
"""Gains smaller than this, in units of the largest, are not divided by."""


def noise(shape: tuple[int, ...], like: Tensor, how: Drawing, share: float = SHARE) -> Tensor:
    """Random numbers of ``share`` times the size of ``like``."""
    size = float(torch.linalg.vector_norm(like, dtype=torch.float64)) / max(like.numel(), 1) ** 0.5
    drawn: Tensor = torch.randn(shape, generator=how.generator, dtype=torch.float64)
    return drawn * float(size * share)


def new_gains(old: Tensor, how: Drawing) -> Tensor:
    """Random gains of the size of ``old``, spread over a factor of ``how.condition``.

    They are short binary fractions, so that files of any dtype hold them (and them minus one)
    as they are. Gains near zero stay: what they multiplied cannot be told from the rest.
    """
    size = old.double().abs().mean().clamp_min(1e-30).log2().round().exp2()
    steps = (random_scales(len(old), how) * 32).round()
    steps = torch.where(steps == 0, 1.0, steps)
    return torch.where(old.abs() > TINY * old.abs().max(), steps / 32 * size, old.double())


def _attentions(site: Site) -> Iterator[tuple[str, Attention]]:
    yield "", site.block.attention
    if site.block.cross is not None:
        yield "cross.", site.block.cross


def permuted_heads(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Groups, and queries within each; not where blocks share a position bias (see `whole`)."""
    out: Weights = {}
    for part, about in _attentions(site):
        if part or not about.position_bias:
            out |= heads.permute_heads(weights, *heads.draw_heads(about, how), part)
    return out


def queries_and_keys(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """GL(d_k) per group, or what rotary positions leave of it; not under a norm on both."""
    out: Weights = {}
    for part, about in _attentions(site):
        if not about.qk_norm:
            out |= heads.rebase_queries(weights, heads.draw_query_bases(about, how), part)
    return out


def values_and_outputs(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """GL(d_v) per group."""
    out: Weights = {}
    for part, about in _attentions(site):
        out |= heads.rebase_values(weights, heads.draw_value_bases(about, how), part)
    return out


def key_bias(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Any shift, where no rotary position, norm or cap comes between key and score."""
    about = site.block.attention
    free = about.d_k - about.rotary
    if "b_K" not in weights or about.qk_norm or about.softcap is not None or not free:
        return {}
    shift = torch.zeros(about.groups, about.d_k, dtype=torch.float64)
    shift[:, about.rotary :] = noise((about.groups, free), weights["W_K"], how)
    return heads.shift_key_bias(weights, shift)


def value_bias(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Into the output bias, where there is one."""
    if "b_V" not in weights or "b_O" not in weights:
        return {}
    shift = noise(tuple(weights["b_V"].shape), weights["W_V"], how)
    return heads.move_value_bias(weights, shift)


def position_bias(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """A constant per head."""
    if "bias_table" not in weights:
        return {}
    table = weights["bias_table"]
    return heads.shift_position_bias(weights, noise((table.shape[1],), table, how))


def pair_signs(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Under a norm on queries and keys: a sign per pair and group."""
    about = site.block.attention
    if not about.qk_norm:
        return {}
    return heads.sign_queries(weights, heads.draw_pair_signs(about, how))


def query_gains(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Under a norm on queries and keys: its two gains against each other, per pair."""
    about = site.block.attention
    if not about.qk_norm:
        return {}
    return heads.trade_gains(weights, heads.draw_pair_scales(about, how))


def query_turns(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Under a norm on queries and keys: quarter turns of pairs, their gains exchanged."""
    about = site.block.attention
    if not about.qk_norm:
        return {}
    return heads.quarter_turns(weights, heads.draw_quarter_turns(about, how))


def query_signs(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Under a norm on queries and keys: signs of coordinates against the sign of the gain."""
    about = site.block.attention
    if not about.qk_norm:
        return {}
    return heads.sign_against_gains(weights, *(random_signs((2, about.d_k), how)))


def permuted_neurons(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Neurons in any order."""
    order = torch.randperm(site.block.mlp.neurons, generator=how.generator)
    return neurons.permute_neurons(weights, order)


def scaled_neurons(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Up against down of a gated MLP; positive scales of ReLU."""
    kind = neurons.scaling(site.block.mlp)
    if kind is None:
        return {}
    scales = random_scales(site.block.mlp.neurons, how, positive=kind == "positive")
    return neurons.scale_neurons(weights, scales)


def _readings(site: Site, weights: Mapping[str, Tensor]) -> Iterator[norms.Reading]:
    for reading in norms.readings(site.block, weights):
        if f"{reading.norm}.g" in weights:
            yield reading


def gains(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """A norm's gain against its readers, where nothing else reads it."""
    out: Weights = {}
    for reading in _readings(site, weights):
        if reading.residual is None:
            out |= norms.replace_gain(
                weights, reading, new_gains(weights[f"{reading.norm}.g"], how)
            )
    return out


def norm_biases(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """A norm's bias against those of its readers (and of the residual after a post-norm)."""
    own: Weights = dict(weights)
    out: Weights = {}
    for reading in _readings(site, weights):
        if reading.biased(weights):
            shift = noise((site.about.width,), weights[f"{reading.norm}.g"], how, 0.1)
            changed = norms.shift_bias(own, reading, shift)
            own |= changed  # two norms of a block may share the bias that takes the shift back
            out |= changed
    return out


def centred_readers(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """What LayerNorm's centring hides from its readers."""
    out: Weights = {}
    for reading in _readings(site, weights):
        out |= norms.shift_readers(
            weights, reading, reader_shifts(site.about, weights, reading, how)
        )
    return out


def reader_shifts(
    about: Transformer, weights: Mapping[str, Tensor], reading: norms.Reading, how: Drawing
) -> Weights:
    """A ``v`` for each reader of a LayerNorm that can take one, shaped as its bias."""
    gain = weights[f"{reading.norm}.g"].double()
    if about.norm != "layer" or gain.abs().min() <= TINY * gain.abs().max():
        return {}
    unit = (1 / gain).square().mean().sqrt()
    biased = f"{reading.norm}.b" in weights
    return {
        name: noise((*weights[name].shape[:-2], weights[name].shape[-1]), weights[name], how) / unit
        for name in reading.present(weights)
        if not biased or norms.bias_of(name) in weights
    }


def centred_writers(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """What LayerNorm's centring takes away again of all that is written into the stream."""
    if not site.about.hides_mean:
        return {}
    names = (name for name in ("W_O", "b_O", "W_B", "b_B") if name in weights)
    return norms.shift_writers(weights, writer_shifts(weights, names, how))


def writer_shifts(weights: Mapping[str, Tensor], names: Iterator[str], how: Drawing) -> Weights:
    """A ``u`` for each writer, shaped as the writer without the stream."""
    return {name: noise(tuple(weights[name].shape[:-1]), weights[name], how) for name in names}


def branch_constant(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Parallel residual: a constant between the two output biases."""
    if site.block.order != "parallel" or "b_O" not in weights or "b_B" not in weights:
        return {}
    return norms.move_between_branches(weights, noise((site.about.width,), weights["W_O"], how))


def signs_after(site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Weights:
    """Norms after the sublayers: signs of what is written against the sign of the gain."""
    out: Weights = {}
    for norm in ("after_1", "after_2"):
        if f"{norm}.g" in weights:
            signs = random_signs((site.about.width,), how)
            out |= norms.sign_against_gain(weights, norm, signs)
    return out


BLOCK_ROWS: Mapping[str, Row] = {
    "norm gains into readers": gains,
    "norm biases into readers' biases": norm_biases,
    "readers + γ⁻¹vᵀ": centred_readers,
    "writers + u1ᵀ": centred_writers,
    "signs against gains after sublayers": signs_after,
    "heads permuted": permuted_heads,
    "queries and keys re-based": queries_and_keys,
    "signs of query/key pairs": pair_signs,
    "gains of query and key norm": query_gains,
    "quarter turns of query/key pairs": query_turns,
    "signs against gains of query and key norm": query_signs,
    "values and outputs re-based": values_and_outputs,
    "key bias shifted": key_bias,
    "value bias into output bias": value_bias,
    "position bias shifted": position_bias,
    "neurons permuted": permuted_neurons,
    "neurons scaled": scaled_neurons,
    "constant between parallel branches": branch_constant,
}
"""Every symmetry inside a block, in the order in which a disguise applies them."""
