"""Element that takes one attention to another, with every tensor of both checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.pieces import Piece, filled
from transformer_nfn.checkpoints.proof.checks import Bases, BlockChecks, Squares, has_duplicate
from transformer_nfn.checkpoints.sketches import HeadSketch
from transformer_nfn.checkpoints.symmetries import QueryKeyBasis, ValueOutputBasis
from transformer_nfn.checkpoints.symmetries.attention import (
    HALVES,
    complex_rows,
    grouped,
    query_key_rows,
)
from transformer_nfn.checkpoints.symmetries.base import Site
from transformer_nfn.checkpoints.symmetries.query_key_norm import (
    GAINS,
    by_group,
    reorder_gains,
    turned_order,
)
from transformer_nfn.functional.description import Attention
from transformer_nfn.spaces.actions.permutation import assign_in_groups
from transformer_nfn.spaces.actions.solvers import (
    Pair,
    nearest_quarter_turns,
    signs,
    whitened_least_squares,
)


@dataclass(frozen=True)
class AttentionElement:
    """Element that takes one attention to another: heads permuted, then bases changed.

    Attributes:
        queries: head of A that each head of B is, ``[h]``.
        groups: likewise of keys and values, ``[g]``.
        G: of queries, ``Q_B = Q_A G`` and ``K_A = K_B Gᵀ``, ``[g, d_k, d_k]``.
        H: of values, ``V_B = V_A H`` and ``O_A = H O_B``, ``[g, d_v, d_v]``.
    """

    queries: Tensor
    groups: Tensor
    G: Tensor
    H: Tensor


def match_attention(
    block: BlockChecks,
    prefix: str,
    config: Attention,
    sketches: tuple[HeadSketch, HeadSketch],
    order: Tensor | None,
) -> AttentionElement:
    """Fit the element of one attention and check all of its tensors.

    Args:
        block: both blocks, and the checks so far.
        prefix: of the tensors, ``cross.`` or nothing.
        config: of the attention.
        sketches: of its heads in both models.
        order: of the heads, where blocks share it.
    """
    tables = [None if prefix else side.bias_table() for side in (block.a, block.b)]
    queries, groups = match_heads(config, sketches, tables, order)
    if tables[0] is not None and tables[1] is not None:
        table = Piece(tables[0].value[:, queries], tables[0].error[:, queries])
        block.add("bias_table", Squares.between(table, tables[1], 0), len(table.value))
    contact = [None if prefix else side.contact() for side in (block.a, block.b)]
    if contact[0] is not None and contact[1] is not None:
        block.add("contact", Squares.between(contact[0][queries], contact[1]), 1)
    G = _queries_and_keys(block, prefix, config, queries, groups)
    duplicate = has_duplicate(sketches[1].QK)
    H = _values_and_outputs(block, prefix, config, (queries, groups), duplicate)
    return AttentionElement(queries, groups, G, H)


def match_heads(
    config: Attention,
    sketches: tuple[HeadSketch, HeadSketch],
    tables: list[Piece | None],
    order: Tensor | None,
) -> Pair:
    """Match heads by their sketches, which cost less than the products of all heads."""
    if config.alibi:  # slopes of positions fix the order
        order = torch.arange(config.heads)
    if order is not None:
        share = config.heads // config.groups
        return order, order[::share] // share
    a, b = sketches
    parts = [(a.QK, b.QK), (a.VO, b.VO)]
    if tables[0] is not None and tables[1] is not None:
        parts.append((tables[0].value.mT, tables[1].value.mT))
    cost = torch.zeros(config.heads, config.heads, dtype=torch.float64)
    for x, y in parts:
        scale = max(float(y.double().square().sum(-1).mean()), 1e-300)
        cost += torch.cdist(y.double(), x.double()).square() / scale
    return assign_in_groups(-cost, config.groups)


def _queries_and_keys(
    block: BlockChecks, prefix: str, config: Attention, queries: Tensor, groups: Tensor
) -> Tensor:
    A, B = (side.query_key(prefix) for side in (block.a, block.b))
    for bias in ("b_Q", "b_K"):
        pair = filled(A.get(bias), B.get(bias))
        if pair is not None:
            A[bias], B[bias] = pair
    orders = {"Q": queries, "K": groups}
    for p, order in orders.items():
        W, crosses = A[f"W_{p}"], prefix and p == "K"
        stream = block.streams.memory if crosses else block.streams.before
        A[f"W_{p}"] = Piece(stream.columns(W.value[order]), W.error[order])
        for name in (f"b_{p}", f"{p.lower()}_norm.g"):
            if name in A and A[name].value.ndim == 2:
                A[name] = A[name][order]
    a, b = ({name: side[name].value for name in ("W_Q", "W_K")} for side in (A, B))
    for bias, weight in (("b_Q", "W_Q"), ("b_K", "W_K")):
        if bias in A:
            # Biases with large norm biases folded in are less precise than rows of the matrices.
            precision = _precision(A[bias], B[bias], A[weight], B[weight])
            a[bias], b[bias] = A[bias].value * precision, B[bias].value * precision
    plain, dual = query_key_rows(config, a, b)
    if config.qk_norm:
        G, gain_order = normed_basis(config, plain, dual, equal_pairs((A, B), config))
    else:
        errors: list[Pair] = []
        for p in "QK":
            e, f = (side[f"W_{p}"].error.unsqueeze(-2) for side in (A, B))
            errors.append((grouped(e, config.groups), grouped(f, config.groups)))
        noise = {"W_Q": errors[0][1].sum((-2, -1)), "W_K": errors[1][0].sum((-2, -1))}
        site = Site(block.a.network.description, {}, config)
        G, by_plain, by_dual = (
            QueryKeyBasis().fit(site, a, b, given) for given in _both_and_each(noise)
        )
        both = (errors[0], errors[1])
        G = _reweighted(plain, dual, both, G, config.rotary)
        bases = Bases(plain, dual, both, G, by_plain, by_dual, config.rotary)
        block.bases_agree(f"{prefix}W_Q·W_K", bases)
    share = config.heads // config.groups
    spread = G.repeat_interleave(share, dim=0)
    Q_grams = _grams(plain, (A["W_Q"].error, B["W_Q"].error))
    keys = _grams(dual, (A["W_K"].error, B["W_K"].error), share)
    for name in ("W_Q", "W_K", "b_Q", "b_K"):
        if name not in A:
            continue
        x, y = (A[name], B[name]) if "Q" in name else (B[name], A[name])
        values, noise_of = (x.value, y.value), (x.error, y.error)
        if name.startswith("b"):
            values = (x.value.unsqueeze(-2), y.value.unsqueeze(-2))
            W, V = (side[f"W_{name[-1]}"] for side in ((A, B) if "Q" in name else (B, A)))
            noise_of = (x.error + _leverage(x, W), y.error + _leverage(y, V))
        matrix, partners = (spread, keys) if "Q" in name else (G.mT, Q_grams[::-1])
        block.rebased(f"{prefix}{name}", values, noise_of, matrix, partners)
    if config.qk_norm:
        for name in GAINS:
            moved = Piece(reorder_gains(A[name].value, gain_order), A[name].error)
            squares = Squares.between(moved, B[name], -1)
            block.add(f"{prefix}{name}", squares, config.d_k, sites=moved.value.ndim > 1)
    return G


def _grams(values: Pair, errors: Pair, repeats: int = 1) -> tuple[Piece, Piece]:
    """Gram matrices of values ``[g, rows, d]``, and errors that a basis fitted to them takes over.

    These are ``d / rows`` of their errors ``[h, d]``, summed over the heads of a group.
    """

    def gram(x: Tensor, e: Tensor) -> Piece:
        taken = e.unflatten(0, (len(x), -1)).sum(1) * x.shape[-1] / x.shape[-2]
        return Piece(*(z.repeat_interleave(repeats, 0) for z in (x.mT @ x, taken)))

    return gram(values[0], errors[0]), gram(values[1], errors[1])


def _precision(a: Piece, b: Piece, A: Piece, B: Piece) -> Tensor:
    """Error of a row of both matrices in units of the biases' error, at most 1, ``[h, 1]``."""
    row = (A.error + B.error).sum(-1, keepdim=True) / A.value.shape[-2]
    bias = (a.error + b.error).sum(-1, keepdim=True).clamp_min(1e-300)
    return (row / bias).sqrt().clamp_max(1)


def _leverage(bias: Piece, matrix: Piece) -> Tensor:
    """Error that a bias takes over from a basis fitted to the rows of a matrix, ``[h, d]``.

    It is that of a least-squares prediction: the error of a row times the leverage of the bias.
    """
    inverse = torch.linalg.pinv(matrix.value.mT @ matrix.value, hermitian=True)
    b = bias.value.unsqueeze(-2)
    leverage: Tensor = (b @ inverse @ b.mT).squeeze(-1)
    return leverage * matrix.error / matrix.value.shape[-2]


def _reweighted(
    plain: Pair, dual: Pair, errors: tuple[Pair, Pair], G: Tensor, rotary: int = 0
) -> Tensor:
    """G fitted again by the errors that it implies; of rotary pairs it stays.

    ``errors`` are summed over rows, ``[g, share, d]`` each.
    """
    if rotary == G.shape[-1]:
        return G
    (P_A, P_B), (D_A, D_B) = ([x[..., rotary:] for x in pair] for pair in (plain, dual))
    (e, f), (d, c) = (
        [error.sum(-2)[..., rotary:] / x.shape[-2] for error in pair]
        for x, pair in zip((P_A, D_A), errors, strict=True)
    )
    out = G.clone()
    out[..., rotary:, rotary:] = whitened_least_squares(
        (P_A, P_B), (D_A, D_B), ((e, f), (d, c)), G[..., rotary:, rotary:]
    )
    return out


def _both_and_each(noise: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Noise for a fit to both tensors, to the first alone, and to the second alone."""
    ignored = {name: torch.full_like(e, torch.inf) for name, e in noise.items()}
    return [dict(noise), *({**ignored, name: e} for name, e in noise.items())]


def equal_pairs(models: tuple[Mapping[str, Piece], ...], config: Attention) -> Tensor:
    """Rotary pairs whose two gains are equal in both models: these may rotate by any angle.

    ``[1, rotary / 2]``, or a row for each group with gains of its own.
    """
    half = config.rotary // 2
    out = torch.ones(config.gain_groups, half, dtype=torch.bool)
    for pieces in models:
        for name in GAINS:
            gain, error = (by_group(x, len(out)) for x in (pieces[name].value, pieces[name].error))
            first, second = gain[..., :half], gain[..., half : 2 * half]
            noise = error[..., :half] + error[..., half : 2 * half]
            out &= ((first - second).square() <= 4 * noise).all(1)
    return out


def normed_basis(config: Attention, plain: Pair, dual: Pair, equal: Tensor) -> Pair:
    """Basis under a norm on queries and keys, and the order of its gains, see `reorder_gains`.

    Quarter turns and signs are fitted together here, since pairs with equal gains, which rotate
    by any angle, are no symmetry of the architecture but of these weights.
    """
    rotary, turned = config.rotary, torch.zeros_like(equal)
    G = torch.zeros(config.groups, config.d_k, config.d_k, dtype=torch.float64)
    if rotary:
        Q, K = (complex_rows(x[..., :rotary], y[..., :rotary]) for x, y in (plain, dual))
        scales, turned = nearest_quarter_turns(Q, K, equal)
        G[:, :rotary, :rotary] = HALVES.matrix(scales)
    inner = torch.stack([(x * y)[..., rotary:].sum(-2) for x, y in (plain, dual)]).sum(0)
    G[:, rotary:, rotary:] = torch.diag_embed(signs(inner))
    return G, turned_order(turned, config.d_k)


def _values_and_outputs(
    block: BlockChecks, prefix: str, config: Attention, orders: Pair, duplicate: Tensor
) -> Tensor:
    """H, with both tensors checked.

    ``duplicate [h]`` marks heads with the same attention as another.
    """
    queries, groups = orders
    V_A, V_B = (side.reader(f"{prefix}W_V")[0] for side in (block.a, block.b))
    O_A, O_B = (side.writer(f"{prefix}W_O") for side in (block.a, block.b))
    count, share = config.groups, config.heads // config.groups
    stream = block.streams.memory if prefix else block.streams.before
    a = {
        "W_V": stream.columns(V_A.value[groups]),
        "W_O": block.streams.middle(O_A.value[queries]),
    }
    b = {"W_V": V_B.value, "W_O": O_B.value}
    errors_V, errors_O = (V_A.error[groups], V_B.error), (O_A.error[queries], O_B.error)
    noise = {
        "W_V": errors_V[1].sum(-1),
        "W_O": errors_O[0].unflatten(0, (count, -1)).sum((-2, -1)),
    }
    site = Site(block.a.network.description, {}, config)
    H, by_plain, by_dual = (
        ValueOutputBasis().fit(site, a, b, given) for given in _both_and_each(noise)
    )
    plain = (a["W_V"], b["W_V"])
    dual = (grouped(a["W_O"].mT, count), grouped(b["W_O"].mT, count))
    errors = (
        (errors_V[0].unsqueeze(-2), errors_V[1].unsqueeze(-2)),
        (grouped(errors_O[0].unsqueeze(-2), count), grouped(errors_O[1].unsqueeze(-2), count)),
    )
    H = _reweighted(plain, dual, errors, H)
    shared = duplicate.unflatten(0, (count, share)).any(1)
    bases = Bases(plain, dual, errors, H, by_plain, by_dual)
    block.bases_agree(f"{prefix}W_V·W_O", bases, shared)
    block.rebased(f"{prefix}W_V", plain, errors_V, H, _grams(dual, errors_O), shared)
    outputs = (b["W_O"].mT, a["W_O"].mT)
    V_grams = _grams(plain, errors_V, share)
    block.rebased(
        f"{prefix}W_O",
        outputs,
        (errors_O[1], errors_O[0]),
        H.repeat_interleave(share, dim=0).mT,
        V_grams[::-1],
        duplicate,
    )
    return H
