"""Symmetries of an attention with a norm on queries and keys.

Queries are ``q = γ ∘ W x / rms(W x)``, keys likewise, and a score is ``qᵀ R k`` with a rotation R
that depends on the distance of two tokens. Which weights give the same scores?

The scores fix q and k of each group up to a matrix M that commutes with every R: ``q → M q`` and
``k → M⁻ᵀ k``, one complex number ``r e^{iθ}`` for each rotary pair and a plain one for a
coordinate that is not turned. M has to be made of what the norm lets through: ``W → U W`` with U
orthogonal on the width over which the mean square is taken, and another gain γ′. So
``diag(γ′) U = M diag(γ)``, and ``M diag(γ²) Mᵀ = diag(γ′²)`` is diagonal. A rotation by θ keeps a
diagonal matrix with two different entries diagonal only if θ is a multiple of a quarter turn, and
r can only move from one gain to the other. What remains:

- a sign for each pair of each group, in W alone (`QueryKeySigns`);
- ``r > 0`` for each pair, between the gains of queries and keys (`QueryKeyGains`);
- quarter turns of pairs, whose two gains change places (`QuarterTurns`);
- a sign of any row of W, undone in its gain (`QueryKeyNormSigns`);
- heads in another order, with their gains (`HeadPermutation`).

Rows of different pairs or heads cannot mix although U could: M does not. Two kinds of norm differ
in what shares a gain. With a norm in each head (Qwen3) all heads have one gain ``[d_k]``, so r,
quarter turns and signs against gains are the same in all of them. With one norm over all heads
(OLMoE) gains are ``[h, d_k]`` and ``[g, d_k]``, and every group has its own. A gain never moves
into the rows of W, which the norm would see.

Two things are no symmetries here. A positive factor on W (of a head, or of all of them) vanishes in
the norm only up to its ε. Pairs with two equal gains turn by any angle, which depends on the
weights and is left to proofs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from transformer_nfn.checkpoints.symmetries.attention import (
    attention_sites,
    complex_rows,
    query_key_rows,
    rebase_queries,
)
from transformer_nfn.checkpoints.symmetries.base import (
    Element,
    Noise,
    Site,
    Symmetry,
    Tensors,
    Weights,
    random_scales,
    random_signs,
)
from transformer_nfn.functional.description import Attention, Transformer
from transformer_nfn.spaces.actions import Drawing, Size
from transformer_nfn.spaces.actions.base import LOG10_2
from transformer_nfn.spaces.actions.solvers import (
    Pair,
    nearest_quarter_turns,
    nearest_scales,
    signs,
)

GAINS = ("q_norm.g", "k_norm.g")


class QueryKeyNormSymmetry(Symmetry[Element]):
    """A symmetry of an attention with a norm on queries and keys."""

    def sites(self, model: Transformer) -> Iterator[Site]:
        """Attentions with such a norm."""
        return (site for site in attention_sites(model) if site.detail.qk_norm)


class QueryKeySigns(QueryKeyNormSymmetry[Tensor]):
    """Signs of pairs of query and key coordinates ``[g, d_k]``, which a norm does not see.

    Example:
        >>> config = Attention(4, 2, 8, 8, 1.0, rotary=8, qk_norm="each head")
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> round(10 ** QueryKeySigns().size(site).finite)
        256
    """

    name = "signs of query/key pairs"

    def size(self, site: Site) -> Size:
        """A sign for each pair and group."""
        return Size(0, site.detail.groups * _count(site.detail) * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Random signs."""
        attention: Attention = site.detail
        return _spread(random_signs((attention.groups, _count(attention)), how), attention)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Multiplies queries and keys."""
        return rebase_queries(weights, torch.diag_embed(g))

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Signs of the products of queries and of keys, equal within a pair."""
        config: Attention = site.detail
        rows = [torch.cat(z, -2) for z in zip(*query_key_rows(config, a, b), strict=True)]
        x, y = (_paired(z, config) for z in rows)
        return _spread(signs((x * y).sum(-2)), config)


class QueryKeyGains(QueryKeyNormSymmetry[Tensor]):
    """The gain of queries times ``s > 0``, that of keys divided by it.

    ``[1, d_k]``, or ``[g, d_k]`` where every group has gains of its own; equal within a pair.

    Example:
        >>> config = Attention(1, 1, 2, 2, 1.0, rotary=2, qk_norm="each head")
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> gains = {"q_norm.g": torch.ones(2), "k_norm.g": torch.ones(2)}
        >>> QueryKeyGains().act(site, gains, torch.tensor([[2.0, 2.0]]))["k_norm.g"].tolist()
        [0.5, 0.5]
    """

    name = "gains of query and key norm"

    def size(self, site: Site) -> Size:
        """A positive scale for each pair."""
        return Size(site.detail.gain_groups * _count(site.detail))

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """Scales over a factor of ``how.condition``, equal within a pair."""
        config: Attention = site.detail
        scales = random_scales(config.gain_groups * _count(config), how, positive=True)
        return _spread(scales.reshape(config.gain_groups, -1), config)

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Scales both gains."""
        out = {}
        for name, factor in zip(GAINS, (g, 1 / g), strict=True):
            gain = weights[name]
            rows = by_group(gain, len(g)) * factor.unsqueeze(-2)
            out[name] = rows.reshape(gain.shape).to(gain)
        return out

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Nearest scales, equal within a pair."""
        (q_A, k_A), (q_B, k_B) = (_gain_pairs(site.detail, w) for w in (a, b))
        return _spread(nearest_scales((q_A, q_B), (k_A, k_B), positive=True), site.detail)

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """Gains of queries and keys of one size in each pair."""
        q, k = (x.norm(dim=-2).clamp_min(1e-300) for x in _gain_pairs(site.detail, weights))
        return self.act(site, weights, _spread((k / q).sqrt(), site.detail))


class QuarterTurns(QueryKeyNormSymmetry[Tensor]):
    """Pairs ``(a, b)`` of queries and keys become ``(−b, a)``, and their gains change places.

    An element says which pairs turn: ``[1, rotary / 2]``, the same in all heads, or
    ``[g, rotary / 2]`` where every group has gains of its own.

    Example:
        >>> config = Attention(4, 2, 8, 8, 1.0, rotary=8, qk_norm="each head")
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> round(10 ** QuarterTurns().size(site).finite)
        16
    """

    name = "quarter turns of query/key pairs"

    def size(self, site: Site) -> Size:
        """To turn or not, for each pair; two turns are a sign."""
        return Size(0, site.detail.gain_groups * (site.detail.rotary // 2) * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Tensor:
        """A random choice."""
        return random_signs((site.detail.gain_groups, site.detail.rotary // 2), how) < 0

    def act(self, site: Site, weights: Tensors, g: Tensor) -> Weights:
        """Turns queries, keys and gains."""
        d_k = site.detail.d_k
        order = turned_order(g, d_k)
        sign = pad(1 - 2 * g.double(), (0, d_k - g.shape[-1]), value=1.0)
        turned = rebase_queries(weights, one_hot(order, d_k).double().mT * sign.unsqueeze(-2))
        return turned | {name: reorder_gains(weights[name], order) for name in GAINS}

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Tensor:
        """Pairs whose products have a larger imaginary part, over all heads that turn together."""
        config: Attention = site.detail
        Q, K = (
            complex_rows(x[..., : config.rotary], y[..., : config.rotary])
            for x, y in query_key_rows(config, a, b)
        )
        free = torch.zeros(config.gain_groups, config.rotary // 2, dtype=torch.bool)
        return nearest_quarter_turns(Q, K, free)[1]


class QueryKeyNormSigns(QueryKeyNormSymmetry[Pair]):
    """Signs of single coordinates of queries, or of keys, against those of the norm's gain.

    An element is two tensors of signs, of the shapes of both gains.

    Example:
        >>> config = Attention(4, 2, 8, 8, 1.0, rotary=8, qk_norm="each head")
        >>> site = Site(Transformer("mine", 2, "rms", 1e-6, ()), {}, config)
        >>> round(10 ** QueryKeyNormSigns().size(site).finite)
        65536
    """

    name = "signs against gains of query and key norm"

    def size(self, site: Site) -> Size:
        """A sign for each gain."""
        config: Attention = site.detail
        shared = config.qk_norm == "each head"
        return Size(0, (2 if shared else config.heads + config.groups) * config.d_k * LOG10_2)

    def draw(self, site: Site, weights: Tensors, how: Drawing) -> Pair:
        """Random signs."""
        q, k = (random_signs(tuple(weights[name].shape), how) for name in GAINS)
        return q, k

    def act(self, site: Site, weights: Tensors, g: Pair) -> Weights:
        """Multiplies queries, keys and gains."""
        out: Weights = {}
        for part, sign in zip("QK", g, strict=True):
            gain, sign = f"{part.lower()}_norm.g", sign.to(weights[f"W_{part}"])
            out |= {n: weights[n] * sign for n in (f"b_{part}", gain) if n in weights}
            out[f"W_{part}"] = weights[f"W_{part}"] * sign.unsqueeze(-2)
        return out

    def fit(self, site: Site, a: Tensors, b: Tensors, noise: Noise = None) -> Pair:
        """Signs of the gains of ``b`` against those of ``a``."""
        q, k = (signs(a[n].double() * b[n]) for n in GAINS)
        return q, k

    def reduce(self, site: Site, weights: Tensors) -> Weights:
        """Positive gains."""
        q, k = (signs(weights[n]) for n in GAINS)
        return self.act(site, weights, (q, k))


def by_group(gain: Tensor, groups: int) -> Tensor:
    """Gains ``[d_k]``, or of all heads ``[n, d_k]``, as ``[groups, rows, d_k]``."""
    return gain.reshape(groups, -1, gain.shape[-1])


def turned_order(turned: Tensor, d_k: int) -> Tensor:
    """Old coordinate of each new one after quarter turns of pairs, ``[groups, d_k]``.

    >>> turned_order(torch.tensor([[True, False]]), 5).tolist()
    [[2, 1, 0, 3, 4]]
    """
    groups, half = turned.shape
    order = torch.arange(d_k).repeat(groups, 1)
    first, second = order[:, :half], order[:, half : 2 * half]
    swapped = torch.where(turned, second, first), torch.where(turned, first, second)
    return torch.cat([*swapped, order[:, 2 * half :]], -1)


def reorder_gains(gain: Tensor, order: Tensor) -> Tensor:
    """Gains with their coordinates in the order ``[groups, d_k]``."""
    rows = by_group(gain, len(order))
    return rows.gather(-1, order.unsqueeze(-2).expand_as(rows)).reshape(gain.shape)


def _count(attention: Attention) -> int:
    """Pairs that rotary positions turn, and coordinates that they do not."""
    return attention.d_k - attention.rotary // 2


def _paired(x: Tensor, attention: Attention) -> Tensor:
    """Both coordinates of a pair in one column, ``[…, rows, d_k] → […, 2 · rows, pairs]``.

    Coordinates that are not turned have zeros for partners.
    """
    first, second, rest = x.tensor_split((attention.rotary // 2, attention.rotary), -1)
    return torch.cat([torch.cat([first, rest], -1), pad(second, (0, rest.shape[-1]))], -2)


def _spread(x: Tensor, attention: Attention) -> Tensor:
    """One number for each pair as one for each coordinate, ``[…, pairs] → […, d_k]``."""
    return torch.cat([x[..., : attention.rotary // 2], x], -1)


def _gain_pairs(attention: Attention, weights: Tensors) -> Pair:
    """Gains of queries and of keys by group and pair, ``[groups, rows, pairs]``."""
    q, k = (_paired(by_group(weights[n], attention.gain_groups), attention) for n in GAINS)
    return q.double(), k.double()
