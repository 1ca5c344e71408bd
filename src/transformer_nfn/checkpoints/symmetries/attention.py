"""Symmetries of an attention: order and bases of its heads, and what softmax does not see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    Site,
    Symmetry,
    Weights,
    all_there,
    block_parts,
    chosen,
    noise,
    random_scales,
    random_signs,
)
from transformer_nfn.functional.description import Attention, Transformer, axes_of
from transformer_nfn.spaces.actions import ComplexScale, Drawing, Permutation, Size
from transformer_nfn.spaces.actions.base import LOG10_2
from transformer_nfn.spaces.actions.matrix import orthogonal

CROSS = "cross."
TENSORS = (
    "W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O", "b_O", "q_norm.g", "k_norm.g", "bias_table",
)  # fmt: skip


def attention_sites(model: Transformer) -> Iterator[Site]:
    """Every attention of a network, those to an encoder too; its description is the detail."""
    for part in block_parts(model):
        assert part.block is not None
        yield Site(model, chosen(part.names, TENSORS), part.block.attention)
        if part.block.cross is not None:
            names = {n.removeprefix(CROSS): c for n, c in part.names.items() if CROSS in n}
            yield Site(model, chosen(names, TENSORS), part.block.cross)


class HeadOrder(NamedTuple):
    """Which old head each new one is, ``[h]``, and likewise for groups of keys, ``[g]``."""

    queries: Tensor
    groups: Tensor


class HeadPermutation(Symmetry[HeadOrder]):
    """Groups in another order, and the queries within each group.

    Blocks that share a position bias have one order, and are one site.
    """

    name = "heads permuted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every attention, or every stack whose blocks share a position bias."""
        for stack in model.stacks:
            if stack.blocks and stack.blocks[0].attention.position_bias:
                names = {
                    name: name
                    for part in block_parts(model)
                    if part.stack is stack
                    for short, name in part.names.items()
                    if short in TENSORS
                }
                yield Site(model, names, stack.blocks[0].attention)
        for site in attention_sites(model):
            if not site.detail.position_bias:
                yield site

    def label(self, site: Site) -> str:
        """Tells apart orders that blocks share."""
        return f"{self.name}, all blocks alike" if site.detail.position_bias else self.name

    def size(self, site: Site) -> Size:
        """Orders of groups times orders within each."""
        about: Attention = site.detail
        groups, share = about.groups, about.heads // about.groups
        return Permutation().size(groups) + groups * Permutation().size(share)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> HeadOrder:
        """A random order."""
        groups, share = site.detail.groups, site.detail.heads // site.detail.groups
        order = torch.randperm(groups, generator=how.generator)
        within = torch.stack(
            [torch.randperm(share, generator=how.generator) for _ in range(groups)]
        )
        return HeadOrder((order.unsqueeze(-1) * share + within).flatten(), order)

    def act(self, site: Site, weights: Mapping[str, Tensor], g: HeadOrder) -> Weights:
        """Reorders every axis of heads and of groups."""
        out = {}
        for name, w in weights.items():
            for dim, axis in enumerate(axes_of(site.names[name])):
                if axis in ("head", "group"):
                    order = g.queries if axis == "head" else g.groups
                    out[name] = w.index_select(dim, order)
        return out


class QueryKeyBasis(Symmetry[Tensor]):
    """``Q → Q G`` and ``K → K G⁻ᵀ`` in every group, ``G [g, d_k, d_k]``.

    On coordinates that rotary positions turn, G is a complex scale for each pair; else any
    invertible matrix. A norm on queries and keys leaves neither.
    """

    name = "queries and keys re-based"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions without a norm on queries and keys."""
        return (site for site in attention_sites(model) if not site.detail.qk_norm)

    def size(self, site: Site) -> Size:
        """Two numbers for each pair, and GL of the rest."""
        plain = site.detail.d_k - site.detail.rotary
        return Size(site.detail.groups * (site.detail.rotary + plain**2))

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """Matrices of condition ``how.condition``."""
        about: Attention = site.detail
        turned, plain = about.rotary, about.d_k - about.rotary
        G = torch.zeros(about.groups, about.d_k, about.d_k, dtype=torch.float64)
        if turned:
            scales = _spread((about.groups, turned // 2), how)
            turns = torch.rand(scales.shape, generator=how.generator, dtype=torch.float64)
            pairs = torch.polar(scales, 2 * torch.pi * turns)
            G[:, :turned, :turned] = ComplexScale("halves").matrix(pairs)
        if plain:
            G[:, turned:, turned:] = _random_bases(about.groups, plain, how)
        return G

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Multiplies queries and keys with their biases."""
        return rebase_queries(weights, g)


class ValueOutputBasis(Symmetry[Tensor]):
    """``V → V G`` and ``O → G⁻¹ O`` in every group, ``G [g, d_v, d_v]`` invertible."""

    name = "values and outputs re-based"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every attention."""
        return attention_sites(model)

    def size(self, site: Site) -> Size:
        """GL(d_v) in each group."""
        return Size(site.detail.groups * site.detail.d_v**2)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """Matrices of condition ``how.condition``."""
        return _random_bases(site.detail.groups, site.detail.d_v, how)

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Multiplies values with their bias, and outputs."""
        W_O = weights["W_O"]
        inverse = torch.linalg.inv(g.double()).repeat_interleave(len(W_O) // len(g), dim=0)
        return _rebased(weights, g, "V") | {"W_O": inverse.to(W_O) @ W_O}


class QueryKeySigns(Symmetry[Tensor]):
    """Signs of pairs of query and key coordinates ``[g, d_k]``, which a norm does not see."""

    name = "signs of query/key pairs"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with a norm on queries and keys."""
        return _normed_sites(model)

    def size(self, site: Site) -> Size:
        """A sign for each pair and group."""
        return Size(0, site.detail.groups * _pairs(site.detail) * LOG10_2)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """Random signs."""
        about: Attention = site.detail
        signs = random_signs((about.groups, about.rotary // 2), how)
        rest = random_signs((about.groups, about.d_k - about.rotary), how)
        return torch.cat([signs, signs, rest], dim=-1)

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Multiplies queries and keys."""
        return rebase_queries(weights, torch.diag_embed(g))


class QueryKeyGains(Symmetry[Tensor]):
    """The gain of the norm on queries times ``s [d_k]``, that on keys divided by it."""

    name = "gains of query and key norm"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with a norm on queries and keys."""
        return _normed_sites(model)

    def size(self, site: Site) -> Size:
        """A nonzero scale for each pair."""
        return Size(_pairs(site.detail), _pairs(site.detail) * LOG10_2)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """Scales over a factor of ``how.condition``, equal within a pair."""
        scales = random_scales(site.detail.rotary // 2, how)
        rest = random_scales(site.detail.d_k - site.detail.rotary, how)
        return torch.cat([scales, scales, rest])

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Scales both gains."""
        g = g.to(weights["q_norm.g"])
        return {"q_norm.g": weights["q_norm.g"] * g, "k_norm.g": weights["k_norm.g"] / g}


class QuarterTurns(Symmetry[Tensor]):
    """Pairs ``(a, b)`` of queries and keys become ``(−b, a)``, and their gains change places.

    An element says which pairs turn, ``[rotary / 2]``, the same in all heads.
    """

    name = "quarter turns of query/key pairs"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with a norm on queries and keys."""
        return _normed_sites(model)

    def size(self, site: Site) -> Size:
        """To turn or not, for each pair."""
        return Size(0, site.detail.rotary // 2 * LOG10_2)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """A random choice."""
        return random_signs((site.detail.rotary // 2,), how) < 0

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Turns queries, keys and gains."""
        half, d_k = len(g), weights["q_norm.g"].shape[-1]
        order, signs = torch.arange(d_k), torch.ones(d_k, dtype=torch.float64)
        first = g.nonzero().squeeze(-1)
        order[first], order[first + half] = first + half, first.clone()
        signs[first] = -1
        G = torch.eye(d_k, dtype=torch.float64)[:, order] * signs
        turned = rebase_queries(weights, G.expand(len(weights["W_K"]), d_k, d_k))
        return turned | {name: weights[name][order] for name in ("q_norm.g", "k_norm.g")}


class QueryKeyNormSigns(Symmetry[Tensor]):
    """Signs of single coordinates of all queries, or all keys, against those of the norm's gain.

    An element is ``[2, d_k]``, for queries and for keys.
    """

    name = "signs against gains of query and key norm"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with a norm on queries and keys."""
        return _normed_sites(model)

    def size(self, site: Site) -> Size:
        """Two signs for each coordinate."""
        return Size(0, 2 * site.detail.d_k * LOG10_2)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """Random signs."""
        return random_signs((2, site.detail.d_k), how)

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Multiplies queries, keys and gains."""
        tensors = (("W_Q", "b_Q", "q_norm.g"), ("W_K", "b_K", "k_norm.g"))
        return {
            name: weights[name] * signs.to(weights[name])
            for names, signs in zip(tensors, g, strict=True)
            for name in names
            if name in weights
        }


class KeyBias(Symmetry[Tensor]):
    """``b_K → b_K + s``, ``[g, d_k]``: it adds one number to all scores of a query."""

    name = "key bias shifted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Where no rotary position, norm or cap comes between some coordinate and the score."""
        for site in attention_sites(model):
            about: Attention = site.detail
            seen = about.qk_norm or about.softcap is not None or about.rotary == about.d_k
            if "b_K" in site.names and not seen:
                yield site

    def size(self, site: Site) -> Size:
        """Every coordinate that is not turned."""
        return Size(site.detail.groups * (site.detail.d_k - site.detail.rotary))

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """A random shift."""
        about: Attention = site.detail
        shift = torch.zeros(about.groups, about.d_k, dtype=torch.float64)
        free = (about.groups, about.d_k - about.rotary)
        shift[:, about.rotary :] = noise(free, weights["W_K"], how)
        return shift

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Adds the shift."""
        return {"b_K": weights["b_K"] + g.to(weights["b_K"])}


class ValueBias(Symmetry[Tensor]):
    """``b_V → b_V + s``, ``[g, d_v]``, taken back in ``b_O``: attention's rows sum to one."""

    name = "value bias into output bias"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with both biases."""
        return (site for site in attention_sites(model) if all_there(site.names, "b_V", "b_O"))

    def size(self, site: Site) -> Size:
        """Every coordinate of a value."""
        return Size(site.detail.groups * site.detail.d_v)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """A random shift."""
        return noise(tuple(weights["b_V"].shape), weights["W_V"], how)

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Adds the shift, and takes it from ``b_O`` as the heads write it."""
        W_O, g = weights["W_O"], g.to(weights["b_V"])
        per_head = g.repeat_interleave(len(W_O) // len(g), dim=0)
        written = torch.einsum("hv,hvd->d", per_head, W_O)
        return {"b_V": weights["b_V"] + g, "b_O": weights["b_O"] - written}


class PositionBias(Symmetry[Tensor]):
    """A constant per head on a table of position biases ``[h]``: all its scores move alike."""

    name = "position bias shifted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions that hold a table."""
        return (site for site in attention_sites(model) if "bias_table" in site.names)

    def size(self, site: Site) -> Size:
        """A number for each head."""
        return Size(site.detail.heads)

    def draw(self, site: Site, weights: Mapping[str, Tensor], how: Drawing) -> Tensor:
        """A random shift."""
        return noise((site.detail.heads,), weights["bias_table"], how)

    def act(self, site: Site, weights: Mapping[str, Tensor], g: Tensor) -> Weights:
        """Adds the shift."""
        return {"bias_table": weights["bias_table"] + g.to(weights["bias_table"])}


def _normed_sites(model: Transformer) -> Iterator[Site]:
    return (site for site in attention_sites(model) if site.detail.qk_norm)


def _pairs(about: Attention) -> int:
    """Pairs that rotary positions turn, and coordinates that they do not."""
    return about.rotary // 2 + about.d_k - about.rotary


def rebase_queries(weights: Mapping[str, Tensor], G: Tensor) -> Weights:
    """``Q → Q G`` and ``K → K G⁻ᵀ`` in every group, with their biases."""
    inverse = torch.linalg.inv(G.double()).mT
    return _rebased(weights, G, "Q") | _rebased(weights, inverse, "K")


def _rebased(weights: Mapping[str, Tensor], G: Tensor, tensor: str) -> Weights:
    """``W G`` and ``b G`` head by head; heads of one group share its G."""
    W, b = weights[f"W_{tensor}"], weights.get(f"b_{tensor}")
    G = G.repeat_interleave(len(W) // len(G), dim=0).to(W)
    out = {f"W_{tensor}": W @ G}
    if b is not None:
        out[f"b_{tensor}"] = (b.unsqueeze(-2) @ G).squeeze(-2)
    return out


def _random_bases(count: int, size: int, how: Drawing) -> Tensor:
    """``X diag(s) Y`` with random orthogonal X and Y, of condition ``how.condition``."""
    left, right = orthogonal(count, size, how), orthogonal(count, size, how)
    return left * _spread((count, size), how).unsqueeze(-2) @ right


def _spread(shape: tuple[int, int], how: Drawing) -> Tensor:
    """Positive numbers with largest over smallest ``how.condition`` exactly, in random order.

    Most are near one: what a re-basing costs in precision is the root mean square of its
    singular values times that of their inverses, 1.4 at condition 10 (evenly spaced: 2.1).
    """
    count, size = shape
    steps = torch.linspace(-1, 1, size, dtype=torch.float64) if size > 1 else torch.zeros(1)
    values = torch.exp(0.5 * math.log(how.condition or 1.0) * steps**3)
    order = torch.rand((count, size), generator=how.generator).argsort(-1)
    return values[order].double()
