"""What may be done to the heads of an attention? Permute them, re-base them, move their biases.

Tensors are those of one block under their canonical names; ``part`` is ``"cross."`` for the
attention to an encoder. Each function returns the tensors that it changed. Elements are drawn by
the functions that begin with ``draw``, so that a wrong element can be tried as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.functional.description import Attention
from transformer_nfn.spaces.actions import Drawing
from transformer_nfn.spaces.actions.matrix import geometric, orthogonal
from transformer_nfn.spaces.actions.scales import ComplexScale

Weights = dict[str, Tensor]


def draw_heads(about: Attention, how: Drawing) -> tuple[Tensor, Tensor]:
    """Groups in a new order, and the queries of each group in one of their own.

    Returns:
        ``queries [h]`` and ``groups [g]``: which old head (group) each new one is.
    """
    groups = torch.randperm(about.groups, generator=how.generator)
    share = about.heads // about.groups
    within = torch.stack(
        [torch.randperm(share, generator=how.generator) for _ in range(about.groups)]
    )
    return (groups.unsqueeze(-1) * share + within).flatten(), groups


def permute_heads(
    weights: Mapping[str, Tensor], queries: Tensor, groups: Tensor, part: str = ""
) -> Weights:
    """Heads in a new order; the columns of a position bias go with them."""
    out: Weights = {}
    for name, order in (("Q", queries), ("K", groups), ("V", groups), ("O", queries)):
        names = [f"{part}W_{name}"] + [f"{part}b_{name}"] * (name != "O")
        out |= {n: weights[n][order] for n in names if n in weights}
    if not part and "bias_table" in weights:
        out["bias_table"] = weights["bias_table"][:, queries]
    return out


def draw_query_bases(about: Attention, how: Drawing) -> Tensor:
    """One ``G [g, d_k, d_k]`` per group: complex scales where rotary positions act, else GL."""
    turned, plain = about.rotary, about.d_k - about.rotary
    G = torch.zeros(about.groups, about.d_k, about.d_k, dtype=torch.float64)
    if turned:
        scales = spread((about.groups, turned // 2), how)
        turns = torch.rand(scales.shape, generator=how.generator, dtype=torch.float64)
        complex_scales = torch.polar(scales, 2 * torch.pi * turns)
        G[:, :turned, :turned] = ComplexScale("halves").matrix(complex_scales)
    if plain:
        G[:, turned:, turned:] = draw_bases(about.groups, plain, how)
    return G


def rebase_queries(weights: Mapping[str, Tensor], G: Tensor, part: str = "") -> Weights:
    """``Q → Q G`` and ``K → K G⁻ᵀ`` in every group, with their biases."""
    inverse = torch.linalg.inv(G.double()).mT
    return _turned(weights, G, f"{part}W_Q", f"{part}b_Q") | _turned(
        weights, inverse, f"{part}W_K", f"{part}b_K"
    )


def draw_value_bases(about: Attention, how: Drawing) -> Tensor:
    """One invertible ``G [g, d_v, d_v]`` per group."""
    return draw_bases(about.groups, about.d_v, how)


def draw_bases(count: int, size: int, how: Drawing) -> Tensor:
    """``X diag(s) Y`` with random orthogonal X and Y, of condition ``how.condition``."""
    left, right = orthogonal(count, size, how), orthogonal(count, size, how)
    return left * spread((count, size), how).unsqueeze(-2) @ right


def spread(shape: tuple[int, int], how: Drawing) -> Tensor:
    """Positive numbers with largest over smallest ``how.condition`` exactly, in random order.

    Most are near one: what a re-basing costs in precision is the root mean square of its
    singular values times that of their inverses, 1.4 at condition 10 (evenly spaced: 2.1).
    """
    count, size = shape
    steps = torch.linspace(-1, 1, size, dtype=torch.float64) if size > 1 else torch.zeros(1)
    values = torch.exp(0.5 * math.log(how.condition or 1.0) * steps**3)
    noise = torch.rand((count, size), generator=how.generator)
    return values[noise.argsort(-1)].double()


def rebase_values(weights: Mapping[str, Tensor], G: Tensor, part: str = "") -> Weights:
    """``V → V G`` and ``O → G⁻¹ O`` in every group, the bias with V."""
    out = _turned(weights, G, f"{part}W_V", f"{part}b_V")
    W_O = weights[f"{part}W_O"]
    inverse = torch.linalg.inv(G.double()).repeat_interleave(len(W_O) // len(G), dim=0)
    return out | {f"{part}W_O": inverse.to(W_O) @ W_O}


def _turned(weights: Mapping[str, Tensor], G: Tensor, matrix: str, bias: str) -> Weights:
    """``W G`` and ``b G`` head by head; heads of one group share its G."""
    W = weights[matrix]
    G = G.repeat_interleave(len(W) // len(G), dim=0).to(W)
    out = {matrix: W @ G}
    if bias in weights:
        out[bias] = (weights[bias].unsqueeze(-2) @ G).squeeze(-2)
    return out


def shift_key_bias(weights: Mapping[str, Tensor], shift: Tensor) -> Weights:
    """``b_K + shift``, ``[g, d_k]``: it adds one number to all scores of a query."""
    return {"b_K": weights["b_K"] + shift.to(weights["b_K"])}


def move_value_bias(weights: Mapping[str, Tensor], shift: Tensor) -> Weights:
    """``b_V + shift``, ``[g, d_v]``, taken back in ``b_O``: attention's rows sum to one."""
    W_O, shift = weights["W_O"], shift.to(weights["b_V"])
    per_head = shift.repeat_interleave(len(W_O) // len(shift), dim=0)
    taken = torch.einsum("hv,hvd->d", per_head, W_O)
    return {"b_V": weights["b_V"] + shift, "b_O": weights["b_O"] - taken}


def shift_position_bias(weights: Mapping[str, Tensor], shift: Tensor) -> Weights:
    """A constant per head on a table of position biases: all scores of a head move alike."""
    return {"bias_table": weights["bias_table"] + shift.to(weights["bias_table"])}


def draw_pair_signs(about: Attention, how: Drawing) -> Tensor:
    """±1 for each pair of rotary coordinates and each group, ``[g, d_k]``."""
    signs = random_signs((about.groups, about.rotary // 2), how)
    rest = random_signs((about.groups, about.d_k - about.rotary), how)
    return torch.cat([signs, signs, rest], dim=-1)


def sign_queries(weights: Mapping[str, Tensor], signs: Tensor) -> Weights:
    """Coordinates of queries and keys times ``signs [g, d_k]``, which a norm does not notice."""
    return rebase_queries(weights, torch.diag_embed(signs))


def draw_pair_scales(about: Attention, how: Drawing) -> Tensor:
    """A nonzero scale for each pair of rotary coordinates, one for the whole layer, ``[d_k]``."""
    scales = random_scales(about.rotary // 2, how)
    return torch.cat([scales, scales, random_scales(about.d_k - about.rotary, how)])


def trade_gains(weights: Mapping[str, Tensor], scales: Tensor) -> Weights:
    """The gain of the norm on queries times ``scales [d_k]``, that on keys divided by them."""
    scales = scales.to(weights["q_norm.g"])
    return {
        "q_norm.g": weights["q_norm.g"] * scales,
        "k_norm.g": weights["k_norm.g"] / scales,
    }


def draw_quarter_turns(about: Attention, how: Drawing) -> Tensor:
    """Which pairs make a quarter turn, one choice for the whole layer, ``[rotary / 2]``."""
    return random_signs((about.rotary // 2,), how) < 0


def quarter_turns(weights: Mapping[str, Tensor], chosen: Tensor) -> Weights:
    """Pairs (a, b) of queries and keys become (−b, a), and the norms' gains change places."""
    half = len(chosen)
    d_k = weights["q_norm.g"].shape[-1]
    order, signs = torch.arange(d_k), torch.ones(d_k, dtype=torch.float64)
    first = chosen.nonzero().squeeze(-1)
    order[first], order[first + half] = first + half, first.clone()
    signs[first] = -1
    G = torch.eye(d_k, dtype=torch.float64)[:, order] * signs
    turned = rebase_queries(weights, G.unsqueeze(0).expand(len(weights["W_K"]), d_k, d_k))
    gains = {name: weights[name][order] for name in ("q_norm.g", "k_norm.g")}
    return turned | gains


def sign_against_gains(
    weights: Mapping[str, Tensor], query_signs: Tensor, key_signs: Tensor
) -> Weights:
    """Single coordinates of all queries (or keys) change sign, and the norm's gain with them."""
    out = {}
    for part, signs in (("q", query_signs), ("k", key_signs)):
        for name in (f"W_{part.upper()}", f"b_{part.upper()}", f"{part}_norm.g"):
            if name in weights:
                out[name] = weights[name] * signs.to(weights[name])
    return out


def random_signs(shape: tuple[int, ...], how: Drawing) -> Tensor:
    """±1 with equal chances, float64."""
    return torch.randint(0, 2, shape, generator=how.generator).double() * 2 - 1


def random_scales(size: int, how: Drawing, *, positive: bool = False) -> Tensor:
    """Nonzero numbers spread over a factor of ``how.condition``, ``[size]``."""
    scales = geometric(1, size, how, how.condition or 1.0)[0]
    return scales if positive else scales * random_signs((size,), how)
