"""Which element takes one block to another, and does it hold on every tensor of them?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transformer_nfn.architectures.families.description import Attention
from transformer_nfn.spaces.actions.matching import match_rows
from transformer_nfn.symmetry.prove import solve
from transformer_nfn.symmetry.prove.checks import Check, check
from transformer_nfn.symmetry.reduced import Piece, ReducedBlock
from transformer_nfn.symmetry.relate.probes import BlockSketch, HeadSketch
from transformer_nfn.symmetry.relate.stream import StreamMap


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


@dataclass(frozen=True)
class BlockElement:
    """What takes one block to another.

    Attributes:
        attentions: by the prefix of their tensors.
        neurons: which neuron of A each of B is, ``[f]``.
        scales: of what neurons read against what they write, ``[f]``; None where none acts.
    """

    attentions: Mapping[str, AttentionElement]
    neurons: Tensor
    scales: Tensor | None


@dataclass
class BlockMatch:
    """Two blocks in one basis of the stream, being compared."""

    a: ReducedBlock
    b: ReducedBlock
    stream: StreamMap
    checks: list[Check] = field(default_factory=list)

    def add(self, name: str, away: Tensor, error: Tensor, size: Tensor, entries: int) -> None:
        """One more tensor; see `check`."""
        self.checks.append(check(f"{self.a.name}.{name}", away, error, size, entries))

    def vector(self, name: str, a: Piece | None, b: Piece | None, *, gain: bool = False) -> None:
        """A vector of the stream. Gains are permuted with it, but take no sign."""
        if a is None and b is None:
            return
        one = a or b
        assert one is not None
        zero = Piece(torch.zeros_like(one.value), torch.zeros_like(one.error))
        a, b = a or zero, b or zero
        moved = a.value
        if not gain:
            moved = self.stream(moved)
        elif self.stream.index is not None:
            moved = moved[self.stream.index]
        away = (moved - b.value).square().sum()
        size = torch.maximum(moved.square().sum(), b.value.square().sum())
        self.checks.append(
            check(f"{self.a.name}.{name}", away, a.error + b.error, size, 1, sites=False)
        )


def match_block(
    a: ReducedBlock,
    b: ReducedBlock,
    stream: StreamMap,
    sketches: tuple[BlockSketch, BlockSketch],
    order: Tensor | None,
) -> tuple[BlockElement, list[Check]]:
    """The element that takes block ``a`` to ``b``, and every tensor checked under it.

    Args:
        a: a block of one model.
        b: of the other, of the same description.
        stream: takes the first stream to the second.
        sketches: of both in one basis, to match heads and neurons by.
        order: of heads, where blocks share a position bias and so their order.
    """
    match = BlockMatch(a, b, stream)
    attentions = {}
    for prefix, about in a.attentions():
        fixed = None if prefix else order
        heads = (sketches[0].heads[prefix], sketches[1].heads[prefix])
        attentions[prefix] = _attention(match, prefix, about, heads, fixed)
        match.vector(f"{prefix}b_O", a.output_bias(prefix), b.output_bias(prefix))
    neurons, scales = _mlp(match, sketches)
    match.vector("b_B", a.mlp_bias(), b.mlp_bias())
    theirs = b.norms()
    for name, piece in a.norms().items():
        match.vector(name, piece, theirs.get(name), gain=True)
    return BlockElement(attentions, neurons, scales), match.checks


def _attention(
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
    H = _values_and_outputs(match, prefix, queries, groups)
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
    return solve.match_heads(cost, about.groups)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[h, …, rows, d] → [g, share · rows, d]``."""
    return x.unflatten(0, (groups, -1)).flatten(1, 2)


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
    errors = {
        p: (A[f"W_{p}"].error[own_order[p]], B[f"W_{p}"].error)
        for p in "QK"
    }
    weights = tuple(
        1 / _grouped(e.unsqueeze(-2), about.groups).sum((-2, -1)).clamp_min(1e-300)
        for e in (errors["Q"][1], errors["K"][0])
    )
    G, gains = _solve_queries(about, stacks, (weights[0], weights[1]))
    share = about.heads // about.groups
    spread = G.repeat_interleave(share, dim=0)
    _check_pair(match, f"{prefix}W_Q", (moved["Q"], B["W_Q"].value), errors["Q"], spread)
    _check_pair(match, f"{prefix}W_K", (B["W_K"].value, moved["K"]), errors["K"][::-1], G.mT)
    for name, (p, matrix) in {"b_Q": ("Q", spread), "b_K": ("K", G.mT)}.items():
        if name not in A:
            continue
        mine = Piece(A[name].value[own_order[p]], A[name].error[own_order[p]])
        pair = (mine, B[name]) if p == "Q" else (B[name], mine)
        values = (pair[0].value.unsqueeze(-2), pair[1].value.unsqueeze(-2))
        _check_pair(match, f"{prefix}{name}", values, (pair[0].error, pair[1].error), matrix)
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


def _solve_queries(
    about: Attention,
    stacks: Mapping[str, tuple[Tensor, Tensor]],
    weights: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """G, and the order of the gains of a norm on queries and keys."""
    d, turned = about.d_k, about.rotary
    same = torch.arange(d)
    G = torch.zeros(about.groups, d, d, dtype=torch.float64)
    rotated, rest = (
        {p: (x[..., cut], y[..., cut]) for p, (x, y) in stacks.items()}
        for cut in (slice(0, turned), slice(turned, d))
    )
    if about.qk_norm:
        if turned:
            G[:, :turned, :turned], same[:turned] = solve.solve_quarter_turns(
                rotated["Q"], rotated["K"]
            )
        inner = sum((x * y).sum(-2) for x, y in rest.values())
        signs = torch.where(torch.as_tensor(inner) < 0, -1.0, 1.0).double()
        G[:, turned:, turned:] = torch.diag_embed(signs)
        return G, same
    if turned:
        G[:, :turned, :turned] = solve.solve_turns(rotated["Q"], rotated["K"], weights)
    if turned < d:
        G[:, turned:, turned:] = solve.solve_matrix(rest["Q"], rest["K"], weights)
    return G, same


def _check_pair(
    match: BlockMatch,
    name: str,
    values: tuple[Tensor, Tensor],
    errors: tuple[Tensor, Tensor],
    G: Tensor,
) -> None:
    """Checks ``x G = y`` head by head: x, y ``[h, rows, d]``, errors ``[h, d]``, G ``[h, d, d]``."""
    x, y = values
    away = (x @ G - y).square().sum((-2, -1))
    through = (errors[0].unsqueeze(-2) @ G.square()).squeeze(-2)
    error = (through + errors[1]).sum(-1)
    match.add(name, away, error, y.square().sum((-2, -1)), y.shape[-2] * y.shape[-1])


def _values_and_outputs(
    match: BlockMatch, prefix: str, queries: Tensor, groups: Tensor
) -> Tensor:
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
    H = solve.solve_matrix(plain, dual, weights)
    _check_pair(match, f"{prefix}W_V", plain, (V_A.error[groups], V_B.error), H)
    spread = H.repeat_interleave(len(queries) // count, dim=0).mT
    _check_pair(
        match,
        f"{prefix}W_O",
        (O_B.value.mT, outputs.mT),
        (O_B.error, O_A.error[queries]),
        spread,
    )
    return H


def _mlp(
    match: BlockMatch, sketches: tuple[BlockSketch, BlockSketch]
) -> tuple[Tensor, Tensor | None]:
    about = match.a.about.mlp
    scaled = about.gated or about.activation == "relu"
    features = [_neuron_features(s, gated=about.gated, scaled=scaled) for s in sketches]
    order = match_rows(features[1], features[0]).index
    (W_A, b_A), (V_A, c_A) = (block.reader("W_A") for block in (match.a, match.b))
    mine = match.stream.columns(W_A.value)[:, order]
    W_B, V_B = (block.writer("W_B") for block in (match.a, match.b))
    out = match.stream(W_B.value[order])
    width = len(mine)
    scales: Tensor | None = None
    s = torch.ones(len(order), dtype=mine.dtype)
    if scaled:
        weights = (1 / V_A.error.clamp_min(1e-300), 1 / W_B.error[order].clamp_min(1e-300))
        scales = s = solve.solve_scales(
            (mine.mT, V_A.value.mT), (out, V_B.value), weights, positive=not about.gated
        )
    size = V_A.value.square().sum(0)
    error = s.square() * W_A.error[order] + V_A.error
    match.add("W_A", (mine * s - V_A.value).square().sum(0), error, size, width)
    away = (out - s.unsqueeze(-1) * V_B.value).square().sum(1)
    error = W_B.error[order] + s.square() * V_B.error
    match.add("W_B", away, error, out.square().sum(1), width)
    _neuron_bias(match, "b_A", b_A, c_A, order, s)
    if about.gated:
        (W_G, b_G), (V_G, c_G) = (block.reader("W_G") for block in (match.a, match.b))
        gate = match.stream.columns(W_G.value)[:, order]
        error = W_G.error[order] + V_G.error
        away = (gate - V_G.value).square().sum(0)
        match.add("W_G", away, error, V_G.value.square().sum(0), width)
        _neuron_bias(match, "b_G", b_G, c_G, order, torch.ones_like(s))
    return order, scales


def _neuron_bias(
    match: BlockMatch, name: str, a: Piece | None, b: Piece | None, order: Tensor, s: Tensor
) -> None:
    if a is None and b is None:
        return
    zero = torch.zeros_like(s)
    x, e = (zero, zero) if a is None else (s * a.value[order], s.square() * a.error[order])
    y, f = (zero, zero) if b is None else (b.value, b.error)
    match.checks.append(
        check(
            f"{match.a.name}.{name}",
            (x - y).square(),
            e + f,
            torch.maximum(x.square(), y.square()),
            1,
            sites=False,
        )
    )


def _neuron_features(sketch: BlockSketch, *, gated: bool, scaled: bool) -> Tensor:
    """What tells neurons apart whatever their scale: ``[f, …]``."""
    n = sketch.neurons
    if gated:
        return n.read
    if scaled:
        pair = [x / x.norm(dim=1, keepdim=True).clamp_min(1e-30) for x in (n.read, n.write)]
        return torch.cat(pair, 1)
    sizes = [x.square().mean().sqrt().clamp_min(1e-30) for x in (n.read, n.write)]
    return torch.cat([n.read / sizes[0], n.write / sizes[1]], 1)
