"""Which element takes one attention to another, and does it hold on every tensor of them?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.proof.bases import check_bases, check_pair
from transformer_nfn.checkpoints.proof.checks import check, has_double
from transformer_nfn.checkpoints.proof.match import BlockMatch
from transformer_nfn.checkpoints.reduced import Piece
from transformer_nfn.checkpoints.sketches import HeadSketch
from transformer_nfn.functional.description import Attention
from transformer_nfn.spaces.actions import ComplexScale
from transformer_nfn.spaces.actions.permutation import assign_in_groups
from transformer_nfn.spaces.actions.solvers import (
    least_squares_complex,
    least_squares_matrix,
    nearest_quarter_turns,
    signs,
)

HALVES = ComplexScale("halves")


@dataclass(frozen=True)
class AttentionElement:
    """What takes one attention to another: heads permuted, then re-based group by group.

    Attributes:
        queries: which head of A each head of B is, ``[h]``.
        groups: likewise of keys and values, ``[g]``.
        G: of queries, ``Q_B = Q_A G`` and ``K_A = K_B Gᵀ``, ``[g, d_k, d_k]``.
        H: of values, ``V_B = V_A H`` and ``O_A = H O_B``, ``[g, d_v, d_v]``.
    """

    queries: Tensor
    groups: Tensor
    G: Tensor
    H: Tensor


def match_attention(
    match: BlockMatch,
    prefix: str,
    about: Attention,
    sketches: tuple[HeadSketch, HeadSketch],
    order: Tensor | None,
) -> AttentionElement:
    tables = [None if prefix else block.bias_table() for block in (match.a, match.b)]
    queries, groups = _heads(about, sketches, tables, order)
    if tables[0] is not None and tables[1] is not None:
        moved, found = tables[0].value[:, queries], tables[1].value
        error = tables[0].error[:, queries] + tables[1].error
        away = (moved - found).square().sum(0)
        match.add("bias_table", away, error.sum(0), found.square().sum(0), len(found))
    G = _queries_and_keys(match, prefix, about, queries, groups)
    H = _values_and_outputs(match, prefix, queries, groups, has_double(sketches[1].QK))
    return AttentionElement(queries, groups, G, H)


def _heads(
    about: Attention,
    sketches: tuple[HeadSketch, HeadSketch],
    tables: list[Piece | None],
    order: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Matches heads on all they do; those that share a position bias are in one order."""
    if order is not None:
        share = about.heads // about.groups
        return order, order[::share] // share
    a, b = sketches
    parts = [(a.QK, b.QK), (a.VO, b.VO)]
    if tables[0] is not None and tables[1] is not None:
        parts.append((tables[0].value.mT, tables[1].value.mT))
    cost = torch.zeros(about.heads, about.heads, dtype=torch.float64)
    for x, y in parts:
        scale = max(float(y.double().square().sum(-1).mean()), 1e-300)
        cost += torch.cdist(y.double(), x.double()).square() / scale
    return assign_in_groups(-cost, about.groups)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[h, rows, d] → [g, share · rows, d]``."""
    return x.reshape(groups, -1, x.shape[-1])


def _with_bias(weight: Tensor, bias: Piece | None, order: Tensor) -> Tensor:
    if bias is None:
        return weight
    return torch.cat([weight, bias.value[order].unsqueeze(-2)], -2)


def _queries_and_keys(
    match: BlockMatch, prefix: str, about: Attention, queries: Tensor, groups: Tensor
) -> Tensor:
    A, B = (block.query_key(prefix, about) for block in (match.a, match.b))
    for name, part in (("b_Q", "W_Q"), ("b_K", "W_K")):  # a bias of zeros, where one has none
        for own, other in ((A, B), (B, A)):
            if name in other and name not in own:
                zero = torch.zeros_like(own[part].value[:, 0])
                own[name] = Piece(zero, torch.zeros_like(zero))
    own_order = {"Q": queries, "K": groups}
    moved = {p: match.stream.columns(A[f"W_{p}"].value[own_order[p]]) for p in "QK"}
    same = torch.arange(about.heads)
    stacks = {}
    for p in "QK":
        count = about.groups
        stacks[p] = (
            _grouped(_with_bias(moved[p], A.get(f"b_{p}"), own_order[p]), count),
            _grouped(_with_bias(B[f"W_{p}"].value, B.get(f"b_{p}"), same[: len(moved[p])]), count),
        )
    errors = {p: (A[f"W_{p}"].error[own_order[p]], B[f"W_{p}"].error) for p in "QK"}
    weights = tuple(
        1 / _grouped(e.unsqueeze(-2), about.groups).sum((-2, -1)).clamp_min(1e-300)
        for e in (errors["Q"][1], errors["K"][0])
    )
    even = _even_pairs((A, B), about) if about.qk_norm else None
    G, gains = _solve_queries(about, stacks, (weights[0], weights[1]), even)
    if not about.qk_norm:
        zero = torch.zeros_like(weights[0])
        single = ((weights[0], zero), (zero, weights[1]))
        alone = [_solve_queries(about, stacks, w)[0] for w in single]
        grouped = [[_grouped(e.unsqueeze(-2), about.groups) for e in errors[p]] for p in "QK"]
        check_bases(match, f"{prefix}W_Q·W_K", stacks, grouped, alone, G, about.rotary)
    share = about.heads // about.groups
    spread = G.repeat_interleave(share, dim=0)
    grams = {p: tuple(x.mT @ x for x in stacks[p]) for p in "QK"}
    keys = (grams["K"][0].repeat_interleave(share, 0), grams["K"][1].repeat_interleave(share, 0))
    asked = (grams["Q"][1], grams["Q"][0])
    check_pair(match, f"{prefix}W_Q", (moved["Q"], B["W_Q"].value), errors["Q"], spread, keys)
    pair_K = (B["W_K"].value, moved["K"])
    check_pair(match, f"{prefix}W_K", pair_K, errors["K"][::-1], G.mT, asked)
    for name, (p, matrix, partners) in {
        "b_Q": ("Q", spread, keys),
        "b_K": ("K", G.mT, asked),
    }.items():
        if name not in A:
            continue
        mine = Piece(A[name].value[own_order[p]], A[name].error[own_order[p]])
        pair = (mine, B[name]) if p == "Q" else (B[name], mine)
        values = (pair[0].value.unsqueeze(-2), pair[1].value.unsqueeze(-2))
        own_errors = (pair[0].error, pair[1].error)
        check_pair(match, f"{prefix}{name}", values, own_errors, matrix, partners)
    if about.qk_norm:
        for name in ("q_norm.g", "k_norm.g"):
            away = (A[name].value[gains] - B[name].value).square()
            match.checks.append(
                check(
                    f"{match.a.name}.{prefix}{name}",
                    away.sum(),
                    (A[name].error + B[name].error).sum(),
                    B[name].value.square().sum(),
                    1,
                    sites=False,
                )
            )
    return G


def _even_pairs(models: tuple[Mapping[str, Piece], ...], about: Attention) -> Tensor:
    """Rotary pairs whose two gains are equal in both models: these may turn by any angle."""
    half = about.rotary // 2
    out = torch.ones(half, dtype=torch.bool)
    for pieces in models:
        for name in ("q_norm.g", "k_norm.g"):
            gain, error = pieces[name].value, pieces[name].error
            first, second = gain[:half], gain[half : 2 * half]
            noise = error[:half] + error[half : 2 * half]
            out &= (first - second).square() <= 4 * noise
    return out


def _solve_queries(
    about: Attention,
    stacks: Mapping[str, tuple[Tensor, Tensor]],
    weights: tuple[Tensor, Tensor],
    even: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """G, and the order of the gains of a norm on queries and keys.

    ``even [rotary / 2]`` are the pairs whose two gains are equal.
    """
    d, turned = about.d_k, about.rotary
    same = torch.arange(d)
    G = torch.zeros(about.groups, d, d, dtype=torch.float64)
    rotated, rest = (
        {p: (x[..., cut], y[..., cut]) for p, (x, y) in stacks.items()}
        for cut in (slice(0, turned), slice(turned, d))
    )
    Q, K = ((HALVES.as_complex(x), HALVES.as_complex(y)) for x, y in rotated.values())
    if about.qk_norm:
        if turned and even is not None:
            scales, quarter = nearest_quarter_turns(Q, K, even[: turned // 2])
            G[:, :turned, :turned] = HALVES.matrix(scales)
            chosen, half = quarter.nonzero().squeeze(-1), turned // 2
            same[chosen], same[chosen + half] = chosen + half, chosen
        inner = torch.stack([(x * y).sum(-2) for x, y in rest.values()]).sum(0)
        G[:, turned:, turned:] = torch.diag_embed(signs(inner))
        return G, same
    if turned:
        G[:, :turned, :turned] = HALVES.matrix(
            least_squares_complex(Q, K, (weights[0].unsqueeze(-1), weights[1].unsqueeze(-1)))
        )
    if turned < d:
        G[:, turned:, turned:] = least_squares_matrix(rest["Q"], rest["K"], weights)
    return G, same


def _values_and_outputs(
    match: BlockMatch, prefix: str, queries: Tensor, groups: Tensor, double: Tensor
) -> Tensor:
    """H, and both tensors checked; ``double [h]`` are heads that look where another looks, too."""
    V_A, V_B = (block.reader(f"{prefix}W_V")[0] for block in (match.a, match.b))
    O_A, O_B = (block.writer(f"{prefix}W_O") for block in (match.a, match.b))
    count = len(V_B.value)
    values = match.stream.columns(V_A.value[groups])
    outputs = match.stream(O_A.value[queries])

    def stacked(x: Tensor) -> Tensor:  # [h, d, D] → [g, share · D, d]
        return _grouped(x.mT, count)

    weights = (
        1 / V_B.error.sum(-1).clamp_min(1e-300),
        1 / O_A.error[queries].unflatten(0, (count, -1)).sum((-2, -1)).clamp_min(1e-300),
    )
    plain, dual = (values, V_B.value), (stacked(outputs), stacked(O_B.value))
    H = least_squares_matrix(plain, dual, weights)
    grams = [tuple(x.mT @ x for x in pair) for pair in (plain, dual)]
    share = len(queries) // count
    partners, errors = (grams[1][0], grams[1][1]), (V_A.error[groups], V_B.error)
    shared = double.unflatten(0, (count, share)).any(1)
    zero = torch.zeros_like(weights[0])
    alone = [least_squares_matrix(plain, dual, w) for w in ((weights[0], zero), (zero, weights[1]))]
    grouped = [
        [V_A.error[groups].unsqueeze(-2), V_B.error.unsqueeze(-2)],
        [_grouped(e.unsqueeze(-2), count) for e in (O_A.error[queries], O_B.error)],
    ]
    both = {"Q": plain, "K": dual}
    check_bases(match, f"{prefix}W_V·W_O", both, grouped, alone, H, 0, shared)
    check_pair(match, f"{prefix}W_V", plain, errors, H, partners, shared)
    spread = H.repeat_interleave(share, dim=0).mT
    check_pair(
        match,
        f"{prefix}W_O",
        (O_B.value.mT, outputs.mT),
        (O_B.error, O_A.error[queries]),
        spread,
        (grams[0][1].repeat_interleave(share, 0), grams[0][0].repeat_interleave(share, 0)),
        double,
    )
    return H
