"""Symmetries of an attention: order and bases of its heads, and what softmax does not see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.base import (
    Additive,
    Noise,
    Site,
    Symmetry,
    Tensors,
    Weights,
    block_parts,
    chosen,
    noise,
)
from transformer_nfn.functional.description import Attention, Transformer, axes_of
from transformer_nfn.spaces.actions import ComplexScale, Drawing, Permutation, Size
from transformer_nfn.spaces.actions.matrix import orthogonal
from transformer_nfn.spaces.actions.permutation import assign_in_groups
from transformer_nfn.spaces.actions.solvers import (
    Pair,
    least_squares_matrix,
    least_squares_scales,
    nearest_complex,
    nearest_matrix,
)

CROSS = "cross."
HALVES = ComplexScale("halves")
TENSORS = (
    "W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O", "b_O", "q_norm.g", "k_norm.g", "bias_table",
    "contact",
)  # fmt: skip


def attention_sites(model: Transformer) -> Iterator[Site]:
    """Every attention of a network, those to an encoder too; its description is the detail."""
    for part in block_parts(model):
        yield Site(model, chosen(part.names, TENSORS), part.block.attention)
        if part.block.cross is not None:
            names = {n.removeprefix(CROSS): c for n, c in part.names.items() if CROSS in n}
            yield Site(model, chosen(names, TENSORS), part.block.cross)


class HeadOrder(NamedTuple):
    """Old head that each new one is, ``[h]``, and likewise for groups of keys, ``[g]``."""

    queries: Tensor
    groups: Tensor


class HeadPermutation(Symmetry[HeadOrder]):
    """Groups in another order, and the queries within each group.

    Blocks that share a position bias have one order, and are one site.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, Attention(4, 2, 8, 8, 1.0))
        >>> round(10 ** HeadPermutation().size(site).finite)  # 2! orders of groups, 2! in each
        8
    """

    name = "heads permuted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every attention, or every stack whose blocks share a position bias.

        Slopes that are fixed for each head leave none.
        """
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
            if not (site.detail.position_bias or site.detail.alibi):
                yield site

    def label(self, site: Site) -> str:
        """Tells apart orders that blocks share."""
        return f"{self.name}, all blocks alike" if site.detail.position_bias else self.name

    def size(self, site: Site) -> Size:
        """Orders of groups times orders within each."""
        attention: Attention = site.detail
        groups, share = attention.groups, attention.heads // attention.groups
        return Permutation().size(groups) + groups * Permutation().size(share)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> HeadOrder:
        """A random order."""
        groups, share = site.detail.groups, site.detail.heads // site.detail.groups
        order = torch.randperm(groups, generator=how.generator)
        within = torch.stack(
            [torch.randperm(share, generator=how.generator) for _ in range(groups)]
        )
        return HeadOrder((order.unsqueeze(-1) * share + within).flatten(), order)

    def act(self, site: Site, weights: Tensors, g: HeadOrder) -> Weights:
        """Reorders every axis of heads and of groups."""
        out = {}
        for name, w in weights.items():
            for dim, axis in enumerate(axes_of(site.names[name], w.ndim)):
                if axis in ("head", "group"):
                    order = g.queries if axis == "head" else g.groups
                    out[name] = w.index_select(dim, order)
        return out

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> HeadOrder:
        """Assignment by the similarity of the heads, groups staying together."""
        return self.assign(site, self.similarity(site, a, b))

    def similarity(self, site: Site, a: Tensors, b: Tensors) -> Tensor:
        """Similarity of head i of ``b`` and head j of ``a`` ``[h, h]``, summed over blocks."""
        config: Attention = site.detail
        total = torch.zeros(config.heads, config.heads, dtype=torch.float64)
        for prefix in [name.removesuffix("W_Q") for name in a if name.endswith("W_Q")]:
            x, y = (
                {n.removeprefix(prefix): z for n, z in w.items() if n.startswith(prefix)}
                for w in (a, b)
            )
            total += head_similarity(config, x, y)
        return total

    def assign(self, site: Site, similarity: Tensor) -> HeadOrder:
        """The order with the largest similarity."""
        return HeadOrder(*assign_in_groups(similarity, site.detail.groups))


class QueryKeyBasis(Symmetry[Tensor]):
    """``Q → Q G`` and ``K → K G⁻ᵀ`` in every group, ``G [g, d_k, d_k]``.

    On coordinates that rotary positions turn, G is a complex scale for each pair; else any
    invertible matrix. A norm on queries and keys leaves neither.

    Example:
        >>> config = Attention(4, 2, 8, 8, 1.0, rotary=6)
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> QueryKeyBasis().size(site).continuous  # 3 complex scales and GL(2) in both groups
        20
    """

    name = "queries and keys re-based"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions without a norm on queries and keys."""
        return (site for site in attention_sites(model) if not site.detail.qk_norm)

    def size(self, site: Site) -> Size:
        """Two numbers for each pair, and GL of the rest."""
        plain = site.detail.d_k - site.detail.rotary
        return Size(site.detail.groups * (site.detail.rotary + plain**2))

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Matrices of condition ``how.condition``."""
        attention: Attention = site.detail
        turned, plain = attention.rotary, attention.d_k - attention.rotary
        G = torch.zeros(attention.groups, attention.d_k, attention.d_k, dtype=torch.float64)
        if turned:
            scales = _spread((attention.groups, turned // 2), how)
            turns = torch.rand(scales.shape, generator=how.generator, dtype=torch.float64)
            pairs = torch.polar(scales, 2 * torch.pi * turns)
            G[:, :turned, :turned] = HALVES.matrix(pairs)
        if plain:
            G[:, turned:, turned:] = _random_bases(attention.groups, plain, how)
        return G

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies queries and keys with their biases."""
        return rebase_queries(weights, g)

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Complex scales of rotary pairs, and matrices on the rest.

        ``noise`` has ``W_Q`` and ``W_K``, ``[g]``: infinite for a tensor that is not to be used.
        """
        config: Attention = site.detail
        g, rotary = config.groups, config.rotary
        Q, K = query_key_rows(config, a, b)
        G = torch.zeros(g, config.d_k, config.d_k, dtype=torch.float64)
        if rotary:
            cut = slice(0, rotary)
            plain, dual = (complex_rows(x[..., cut], y[..., cut]) for x, y in (Q, K))
            if noise is None:
                z = nearest_complex(plain, dual)
            else:
                w_1, w_2 = _weights(noise, "W_Q", "W_K")
                z = least_squares_scales(plain, dual, (w_1.unsqueeze(-1), w_2.unsqueeze(-1)))
            G[:, cut, cut] = HALVES.matrix(z)
        if rotary < config.d_k:
            cut = slice(rotary, config.d_k)
            plain, dual = ((x[..., cut], y[..., cut]) for x, y in (Q, K))
            if noise is None:
                G[:, cut, cut] = nearest_matrix(plain, dual)
            else:
                weights = _weights(noise, "W_Q", "W_K")
                G[:, cut, cut] = least_squares_matrix(plain, dual, weights)
        return G


class ValueOutputBasis(Symmetry[Tensor]):
    """``V → V G`` and ``O → G⁻¹ O`` in every group, ``G [g, d_v, d_v]`` invertible.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, Attention(4, 2, 8, 8, 1.0))
        >>> ValueOutputBasis().size(site).continuous
        128
    """

    name = "values and outputs re-based"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Every attention."""
        return attention_sites(model)

    def size(self, site: Site) -> Size:
        """GL(d_v) in each group."""
        return Size(site.detail.groups * site.detail.d_v**2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Matrices of condition ``how.condition``."""
        return _random_bases(site.detail.groups, site.detail.d_v, how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies values with their bias, and outputs."""
        W_O = weights["W_O"]
        inverse = torch.linalg.inv(g.double()).repeat_interleave(len(W_O) // len(g), dim=0)
        return _rebased(weights, g, "V") | {"W_O": inverse.to(W_O) @ W_O}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Matrices by group.

        ``noise`` has ``W_V`` and ``W_O``, ``[g]``: infinite for a tensor that is not to be used.
        """
        groups = site.detail.groups
        plain = (grouped(_with_bias(a, "V"), groups), grouped(_with_bias(b, "V"), groups))
        dual = (grouped(a["W_O"].mT, groups), grouped(b["W_O"].mT, groups))
        if noise is None:
            return nearest_matrix(plain, dual)
        return least_squares_matrix(plain, dual, _weights(noise, "W_V", "W_O"))


class KeyBias(Additive[Tensor]):
    """``b_K → b_K + s``, ``[g, d_k]``: it adds one number to all scores of a query.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, Attention(1, 1, 2, 2, 1.0))
        >>> KeyBias().reduce(site, {"b_K": torch.ones(1, 2)})["b_K"].tolist()
        [[0.0, 0.0]]
    """

    name = "key bias shifted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions without rotary position, norm or cap between some coordinate and the score."""
        for site in attention_sites(model):
            attention: Attention = site.detail
            seen = (
                attention.qk_norm
                or attention.softcap is not None
                or attention.rotary == attention.d_k
            )
            if "b_K" in site.names and not seen:
                yield site

    def size(self, site: Site) -> Size:
        """Every coordinate that is not turned."""
        return Size(site.detail.groups * (site.detail.d_k - site.detail.rotary))

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random shift."""
        attention: Attention = site.detail
        shift = torch.zeros(attention.groups, attention.d_k, dtype=torch.float64)
        free = (attention.groups, attention.d_k - attention.rotary)
        shift[:, attention.rotary :] = noise(free, weights["W_K"], how)
        return shift

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Adds the shift."""
        return {"b_K": weights["b_K"] + g.to(weights["b_K"])}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """The difference of the biases on coordinates that are not rotated."""
        shift = b["b_K"] - a["b_K"]
        shift[..., : site.detail.rotary] = 0
        return shift


class ValueBias(Additive[Tensor]):
    """``b_V → b_V + s``, ``[g, d_v]``, taken back in ``b_O``: attention's rows sum to one.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, Attention(1, 1, 1, 1, 1.0))
        >>> weights = {"b_V": torch.ones(1, 1), "W_O": torch.ones(1, 1, 2), "b_O": torch.zeros(2)}
        >>> ValueBias().reduce(site, weights)["b_O"].tolist()
        [1.0, 1.0]
    """

    name = "value bias into output bias"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with both biases."""
        return (site for site in attention_sites(model) if {"b_V", "b_O"} <= site.names.keys())

    def size(self, site: Site) -> Size:
        """Every coordinate of a value."""
        return Size(site.detail.groups * site.detail.d_v)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random shift."""
        return noise(tuple(weights["b_V"].shape), weights["W_V"], how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Adds the shift, and takes it from ``b_O`` as the heads write it."""
        W_O, g = weights["W_O"], g.to(weights["b_V"])
        per_head = g.repeat_interleave(len(W_O) // len(g), dim=0)
        written = torch.einsum("hv,hvd->d", per_head, W_O)
        return {"b_V": weights["b_V"] + g, "b_O": weights["b_O"] - written}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """The difference of the biases."""
        return b["b_V"] - a["b_V"]


class PositionBias(Additive[Tensor]):
    """A constant per head on a table of position biases ``[h]``: all its scores move alike.

    Example:
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, Attention(1, 1, 2, 2, 1.0))
        >>> PositionBias().reduce(site, {"bias_table": torch.tensor([[1.0], [3.0]])})
        {'bias_table': tensor([[-1.],
                                [ 1.]])}
    """

    name = "position bias shifted"

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions that hold a table."""
        return (site for site in attention_sites(model) if "bias_table" in site.names)

    def size(self, site: Site) -> Size:
        """A number for each head."""
        return Size(site.detail.heads)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random shift."""
        return noise((site.detail.heads,), weights["bias_table"], how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Adds the shift."""
        return {"bias_table": weights["bias_table"] + g.to(weights["bias_table"])}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """The mean difference of each head."""
        return (b["bias_table"] - a["bias_table"]).mean(0)


def head_similarity(
    config: Attention,
    a: Tensors,
    b: Tensors,
    *,
    outputs_known: bool = True,
) -> Tensor:
    """Similarity of head i of ``b`` and head j of ``a``, ``[h, h]``.

    The sum of the cosines of `Q Kᵀ`, of `V O` and of the position biases, which no change of
    basis alters and which are computed from d × d products.

    Args:
        a: tensors of one attention. b: of the other, in the same basis of the stream.
        outputs_known: False where the outputs are not yet in one basis.
    """
    queries = [_with_bias(w, "Q") for w in (a, b)]
    if config.qk_norm:
        gains = [score_gains(w["q_norm.g"], w["k_norm.g"]) for w in (a, b)]
        queries = [q * gain.to(q) for q, gain in zip(queries, gains, strict=True)]
    total = _product_cosines(queries, [w["W_K"] for w in (a, b)])
    if outputs_known:
        total = total + _product_cosines([w["W_O"].mT for w in (a, b)], [w["W_V"] for w in (a, b)])
    if "bias_table" in a and "bias_table" in b:
        x, y = ((w["bias_table"] - w["bias_table"].mean(0)).double().mT for w in (a, b))
        x, y = (z / z.norm(dim=-1, keepdim=True).clamp_min(1e-300) for z in (x, y))
        total = total + y @ x.mT
    return total


def score_gains(q: Tensor, k: Tensor) -> Tensor:
    """Product of the gains of queries and keys, which scores see, ``[1 or h, 1, d_k]``."""
    q, k = (torch.atleast_2d(gain) for gain in (q, k))
    return (q * k.repeat_interleave(len(q) // len(k), 0)).unsqueeze(-2)


def _product_cosines(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Cosines of ``L Rᵀ`` of b's heads and of a's, ``[h, h]``."""
    inner = product_inner(left[1], left[0], right[1], right[0])
    sizes = [product_inner(x, x, y, y).diagonal() for x, y in zip(left, right, strict=True)]
    sizes = [x.clamp_min(1e-300).sqrt() for x in sizes]
    return inner / sizes[1].unsqueeze(-1) / sizes[0]


def product_inner(L_1: Tensor, L_2: Tensor, R_1: Tensor, R_2: Tensor) -> Tensor:
    """``⟨L_1 R_1ᵀ, L_2 R_2ᵀ⟩`` of all pairs of heads, ``[h, h]``."""
    h = len(L_1)

    def cross(x: Tensor, y: Tensor) -> Tensor:
        n, _, d = x.shape
        flat = [z.transpose(0, 1).flatten(1) for z in (x, y)]
        out = (flat[0].mT @ flat[1]).reshape(n, d, n, d).permute(0, 2, 1, 3)
        if n < h:
            out = out.repeat_interleave(h // n, 0).repeat_interleave(h // n, 1)
        return out.double()

    return (cross(L_1, L_2) * cross(R_1, R_2)).sum((-2, -1))


def grouped(x: Tensor, groups: int) -> Tensor:
    """``[h, rows, d] → [g, share · rows, d]``."""
    return x.reshape(groups, -1, x.shape[-1])


def _with_bias(weights: Tensors, part: str) -> Tensor:
    """A matrix with its bias as one more row."""
    W, b = weights[f"W_{part}"], weights.get(f"b_{part}")
    return W if b is None else torch.cat([W, b.unsqueeze(-2)], -2)


def query_key_rows(config: Attention, a: Tensors, b: Tensors) -> list[Pair]:
    """Queries and keys with their biases, of both networks, ``[g, rows, d_k]``."""
    x, y = (
        [grouped(_with_bias(w, part).double(), config.groups) for part in "QK"] for w in (a, b)
    )
    return list(zip(x, y, strict=True))


def complex_rows(x: Tensor, y: Tensor) -> Pair:
    """Two tensors with rotary pairs as complex numbers."""
    return HALVES.as_complex(x), HALVES.as_complex(y)


def _weights(noise: Tensors, plain: str, dual: str) -> Pair:
    """Inverse of the expected error."""
    return 1 / noise[plain].clamp_min(1e-300), 1 / noise[dual].clamp_min(1e-300)


def rebase_queries(weights: Tensors, G: Tensor) -> Weights:
    """``Q → Q G`` and ``K → K G⁻ᵀ`` in every group, with their biases."""
    inverse = torch.linalg.inv(G.double()).mT
    return _rebased(weights, G, "Q") | _rebased(weights, inverse, "K")


def _rebased(weights: Tensors, G: Tensor, tensor: str) -> Weights:
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
