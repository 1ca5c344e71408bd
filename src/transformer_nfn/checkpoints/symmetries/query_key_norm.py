"""Symmetries of an attention with a norm on queries and keys: signs, gains and quarter turns."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.attention import (
    attention_sites,
    complex_rows,
    query_key_rows,
    rebase_queries,
)
from transformer_nfn.checkpoints.symmetries.base import (
    Noise,
    Site,
    Symmetry,
    Tensors,
    Weights,
    random_scales,
    random_signs,
)
from transformer_nfn.functional.description import Attention, Transformer
from transformer_nfn.spaces.actions import Drawing, Scale, Size
from transformer_nfn.spaces.actions.base import LOG10_2
from transformer_nfn.spaces.actions.matrix import column_signs
from transformer_nfn.spaces.actions.solvers import (
    Pair,
    nearest_quarter_turns,
    nearest_scales,
    signs,
)


class QueryKeyNormSymmetry(Symmetry[Tensor]):
    """A symmetry of an attention with a norm on queries and keys."""

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with such a norm."""
        return (site for site in attention_sites(model) if site.detail.qk_norm)


class QueryKeySigns(QueryKeyNormSymmetry):
    """Signs of pairs of query and key coordinates ``[g, d_k]``, which a norm does not see.

    Example:
        >>> config = Attention(4, 2, 8, 8, 1.0, rotary=8, qk_norm=True)
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> round(10 ** QueryKeySigns().size(site).finite)
        256
    """

    name = "signs of query/key pairs"

    def size(self, site: Site) -> Size:
        """A sign for each pair and group."""
        return Size(0, site.detail.groups * _pairs(site.detail) * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Random signs."""
        attention: Attention = site.detail
        signs = random_signs((attention.groups, attention.rotary // 2), how)
        rest = random_signs((attention.groups, attention.d_k - attention.rotary), how)
        return torch.cat([signs, signs, rest], dim=-1)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies queries and keys."""
        return rebase_queries(weights, torch.diag_embed(g))

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Signs of the products of queries and of keys, equal within a pair."""
        half = site.detail.rotary // 2
        inner = torch.stack([(x * y).sum(-2) for x, y in query_key_rows(site.detail, a, b)]).sum(0)
        pairs = inner[..., :half] + inner[..., half : 2 * half]
        return signs(torch.cat([pairs, pairs, inner[..., 2 * half :]], -1))

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """The largest weight of the queries of each pair positive."""
        half = site.detail.rotary // 2
        (Q, _), _ = query_key_rows(site.detail, weights, weights)
        pairs = torch.cat([Q[..., :half], Q[..., half : 2 * half]], -2)
        chosen = [column_signs(x).squeeze(-2) for x in (pairs, Q[..., 2 * half :])]
        return self.act(site, weights, torch.cat([chosen[0], *chosen], -1))


class QueryKeyGains(QueryKeyNormSymmetry):
    """The gain of the norm on queries times ``s [d_k]``, that on keys divided by it.

    Example:
        >>> config = Attention(1, 1, 2, 2, 1.0, rotary=2, qk_norm=True)
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> gains = {"q_norm.g": torch.ones(2), "k_norm.g": torch.ones(2)}
        >>> QueryKeyGains().act(site, gains, torch.tensor([2.0, 2.0]))["k_norm.g"].tolist()
        [0.5, 0.5]
    """

    name = "gains of query and key norm"

    def size(self, site: Site) -> Size:
        """A nonzero scale for each pair."""
        return Size(_pairs(site.detail), _pairs(site.detail) * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Scales over a factor of ``how.condition``, equal within a pair."""
        scales = random_scales(site.detail.rotary // 2, how)
        rest = random_scales(site.detail.d_k - site.detail.rotary, how)
        return torch.cat([scales, scales, rest])

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Scales both gains."""
        g = g.to(weights["q_norm.g"])
        return {"q_norm.g": weights["q_norm.g"] * g, "k_norm.g": weights["k_norm.g"] / g}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Nearest scales, equal within a pair."""
        rotary = site.detail.rotary
        pairs: list[Pair] = []
        rest: list[Pair] = []
        for name in ("q_norm.g", "k_norm.g"):
            x, y = a[name].double(), b[name].double()
            pairs.append((x[:rotary].unflatten(0, (2, -1)), y[:rotary].unflatten(0, (2, -1))))
            rest.append((x[None, rotary:], y[None, rotary:]))
        s = nearest_scales(pairs[0], pairs[1], positive=False)
        return torch.cat([s, s, nearest_scales(rest[0], rest[1], positive=False)])

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """Gains of queries and keys of one size in each pair, the largest of queries positive."""
        half = site.detail.rotary // 2
        q, k = (weights[name].double() for name in ("q_norm.g", "k_norm.g"))
        pairs = Scale().balance(*(x[: 2 * half].unflatten(0, (2, half)) for x in (q, k)))
        rest = Scale().balance(*(x[None, 2 * half :] for x in (q, k)))
        gains = [torch.cat([x.flatten(), y[0]]) for x, y in zip(pairs, rest, strict=True)]
        return {"q_norm.g": gains[0].to(q), "k_norm.g": gains[1].to(k)}


class QuarterTurns(QueryKeyNormSymmetry):
    """Pairs ``(a, b)`` of queries and keys become ``(−b, a)``, and their gains change places.

    An element says which pairs turn, ``[rotary / 2]``, the same in all heads.

    Example:
        >>> config = Attention(4, 2, 8, 8, 1.0, rotary=8, qk_norm=True)
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> round(10 ** QuarterTurns().size(site).finite)
        16
    """

    name = "quarter turns of query/key pairs"

    def size(self, site: Site) -> Size:
        """To turn or not, for each pair."""
        return Size(0, site.detail.rotary // 2 * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random choice."""
        return random_signs((site.detail.rotary // 2,), how) < 0

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Turns queries, keys and gains."""
        half, d_k = len(g), weights["q_norm.g"].shape[-1]
        order, signs = torch.arange(d_k), torch.ones(d_k, dtype=torch.float64)
        first = g.nonzero().squeeze(-1)
        order[first], order[first + half] = first + half, first.clone()
        signs[first] = -1
        G = torch.eye(d_k, dtype=torch.float64)[:, order] * signs
        turned = rebase_queries(weights, G.expand(len(weights["W_K"]), d_k, d_k))
        return turned | {name: weights[name][order] for name in ("q_norm.g", "k_norm.g")}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Pairs whose products have a larger imaginary part, over all heads."""
        rotary = site.detail.rotary
        Q, K = (
            complex_rows(x[..., :rotary], y[..., :rotary])
            for x, y in query_key_rows(site.detail, a, b)
        )
        return nearest_quarter_turns(Q, K, torch.zeros(rotary // 2, dtype=torch.bool))[1]

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """The larger gain of a pair first; then signs as in `QueryKeySigns`, alike in all heads."""
        half = site.detail.rotary // 2
        gain = (weights["q_norm.g"] * weights["k_norm.g"]).abs()
        turned = dict(weights) | self.act(site, weights, gain[:half] < gain[half : 2 * half])
        Q = turned["W_Q"].flatten(0, 1)
        sign = column_signs(torch.cat([Q[:, :half], Q[:, half : 2 * half]]))[0]
        signs_ = torch.cat([sign, sign, torch.ones_like(Q[0, 2 * half :])])
        groups = len(turned["W_K"])
        return turned | QueryKeySigns().act(site, turned, signs_.expand(groups, -1))


class QueryKeyNormSigns(QueryKeyNormSymmetry):
    """Signs of single coordinates of all queries, or all keys, against those of the norm's gain.

    An element is ``[2, d_k]``, for queries and for keys.

    Example:
        >>> config = Attention(4, 2, 8, 8, 1.0, rotary=8, qk_norm=True)
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> round(10 ** QueryKeyNormSigns().size(site).finite)
        65536
    """

    name = "signs against gains of query and key norm"

    def size(self, site: Site) -> Size:
        """Two signs for each coordinate."""
        return Size(0, 2 * site.detail.d_k * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Random signs."""
        return random_signs((2, site.detail.d_k), how)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies queries, keys and gains."""
        tensors = (("W_Q", "b_Q", "q_norm.g"), ("W_K", "b_K", "k_norm.g"))
        return {
            name: weights[name] * signs.to(weights[name])
            for names, signs in zip(tensors, g, strict=True)
            for name in names
            if name in weights
        }

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Signs of the gains of ``b`` against those of ``a``."""
        return torch.stack([signs(a[n].double() * b[n]) for n in ("q_norm.g", "k_norm.g")])

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """Positive gains."""
        gains = [signs(weights[n].double()) for n in ("q_norm.g", "k_norm.g")]
        return self.act(site, weights, torch.stack(gains))


def _pairs(attention: Attention) -> int:
    """Pairs that rotary positions turn, and coordinates that they do not."""
    return attention.rotary // 2 + attention.d_k - attention.rotary
