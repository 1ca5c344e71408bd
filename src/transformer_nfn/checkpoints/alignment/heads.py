"""Which head is which, and in which basis is it nearest? One attention moved towards another.

Heads are paired by the cosines of `Q Kᵀ` and `V O`, which no re-basing changes and which are
computed from d × d products; then each group is re-based by `bases`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import heads
from transformer_nfn.functional.description import Attention
from transformer_nfn.spaces.actions import ComplexScale
from transformer_nfn.spaces.actions.permutation import assign_in_groups
from transformer_nfn.spaces.actions.solvers import (
    nearest_complex,
    nearest_matrix,
    nearest_quarter_turns,
    nearest_scales,
    signs,
)

HALVES = ComplexScale("halves")

Weights = dict[str, Tensor]


def head_cosines(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    about: Attention,
    part: str = "",
    *,
    outputs_known: bool = True,
) -> Tensor:
    """How alike head i of ``b`` and head j of ``a`` are, ``[h, h]``.

    Args:
        a: tensors of one attention, its stream in the other's basis.
        b: of the other.
        about: both.
        part: ``cross.`` or nothing.
        outputs_known: False where what heads write is not yet in one basis.
    """
    queries = [_with_bias(w, f"{part}W_Q", f"{part}b_Q") for w in (a, b)]
    if about.qk_norm:
        queries = [
            q * (w["q_norm.g"] * w["k_norm.g"]).to(q) for q, w in zip(queries, (a, b), strict=True)
        ]
    keys = [_with_bias(w, f"{part}W_K", f"{part}b_K", zero=True) for w in (a, b)]
    total = _product_cosines(queries, keys)
    if outputs_known:
        outputs = [w[f"{part}W_O"].mT for w in (a, b)]
        values = [w[f"{part}W_V"] for w in (a, b)]
        total = total + _product_cosines(outputs, values)
    if not part and "bias_table" in a and "bias_table" in b:
        tables = [_unit((w["bias_table"] - w["bias_table"].mean(0)).double().mT) for w in (a, b)]
        total = total + tables[1] @ tables[0].mT
    return total


def _product_cosines(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Cosines of ``L Rᵀ`` of b's heads and of a's, ``[h, h]``."""
    inner = _inner(left[1], left[0], right[1], right[0])
    sizes = [_inner(x, x, y, y).diagonal() for x, y in zip(left, right, strict=True)]
    sizes = [x.clamp_min(1e-300).sqrt() for x in sizes]
    return inner / sizes[1].unsqueeze(-1) / sizes[0]


def _inner(L_1: Tensor, L_2: Tensor, R_1: Tensor, R_2: Tensor) -> Tensor:
    h = len(L_1)

    def cross(x: Tensor, y: Tensor) -> Tensor:
        n, _, d = x.shape
        flat = [z.transpose(0, 1).flatten(1) for z in (x, y)]
        out = (flat[0].mT @ flat[1]).reshape(n, d, n, d).permute(0, 2, 1, 3)
        if n < h:
            out = out.repeat_interleave(h // n, 0).repeat_interleave(h // n, 1)
        return out.double()

    return (cross(L_1, L_2) * cross(R_1, R_2)).sum((-2, -1))


def move_attention(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    about: Attention,
    part: str = "",
    *,
    order: Tensor | None = None,
    outputs_known: bool = True,
) -> Weights:
    """The tensors of attention ``a``, its heads in b's order and bases.

    Args:
        a: tensors of one attention, its stream in the other's basis.
        b: of the other.
        about: both.
        part: ``cross.`` or nothing.
        order: of the heads, where blocks share it.
        outputs_known: False where what heads write is not yet in one basis.
    """
    if order is None:
        cosines = head_cosines(a, b, about, part, outputs_known=outputs_known)
        queries, groups = assign_in_groups(cosines, about.groups)
    else:
        share = about.heads // about.groups
        queries, groups = order, order[::share] // share
    out: Weights = dict(a)
    out |= heads.permute_heads(out, queries, groups, part)
    if about.qk_norm:
        out |= _normed_queries(out, b, about)
    else:
        out |= heads.rebase_queries(out, _query_bases(out, b, about, part), part)
    plain = [_grouped(_with_bias(w, f"{part}W_V", f"{part}b_V"), about.groups) for w in (out, b)]
    dual = [_grouped(w[f"{part}W_O"].mT, about.groups) for w in (out, b)]
    H = nearest_matrix((plain[0], plain[1]), (dual[0], dual[1]), dual_known=outputs_known)
    return out | heads.rebase_values(out, H, part)


def _query_bases(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], about: Attention, part: str
) -> Tensor:
    g, turned = about.groups, about.rotary
    Q = [_grouped(_with_bias(w, f"{part}W_Q", f"{part}b_Q"), g) for w in (a, b)]
    # A key bias that softmax does not see says nothing of the basis.
    K = [_with_bias(w, f"{part}W_K", f"{part}b_K", zero=not turned) for w in (a, b)]
    G = torch.zeros(g, about.d_k, about.d_k, dtype=torch.float64)
    if turned:
        cut = slice(0, turned)
        plain, dual = ([HALVES.as_complex(x[..., cut].double()) for x in side] for side in (Q, K))
        z = nearest_complex((plain[0], plain[1]), (dual[0], dual[1]))
        G[:, cut, cut] = HALVES.matrix(z)
    if turned < about.d_k:
        cut = slice(turned, about.d_k)
        G[:, cut, cut] = nearest_matrix(
            (Q[0][..., cut], Q[1][..., cut]), (K[0][..., cut], K[1][..., cut])
        )
    return G


def _normed_queries(a: Mapping[str, Tensor], b: Mapping[str, Tensor], about: Attention) -> Weights:
    """Under a norm on queries and keys: quarter turns and signs, then the two gains."""
    out: Weights = dict(a)
    g, half = about.groups, about.rotary // 2
    turned = 2 * half

    def pairs(w: Mapping[str, Tensor], name: str, cut: slice) -> Tensor:
        bias = name.replace("W", "b")
        return _grouped(_with_bias(w, name, bias).double(), g)[..., cut]

    cut = slice(0, turned)
    if turned:
        Q, K = (
            (HALVES.as_complex(pairs(out, n, cut)), HALVES.as_complex(pairs(b, n, cut)))
            for n in ("W_Q", "W_K")
        )
        _, quarter = nearest_quarter_turns(Q, K, torch.zeros(half, dtype=torch.bool))
        out |= heads.quarter_turns(out, quarter)
    inner = sum(
        (pairs(out, n, slice(None)) * pairs(b, n, slice(None))).sum(-2) for n in ("W_Q", "W_K")
    )
    assert isinstance(inner, Tensor)
    both = inner[..., :half] + inner[..., half:turned]
    inner = torch.cat([both, both, inner[..., turned:]], -1)
    out |= heads.sign_queries(out, signs(inner))
    gains = []
    for name in ("q_norm.g", "k_norm.g"):
        x, y = (w[name].double() for w in (out, b))
        gains.append([torch.stack([z[:half], z[half:turned]]) for z in (x, y)])
        gains[-1] += [z[turned:].unsqueeze(0) for z in (x, y)]
    (q_A, q_B, p_A, p_B), (k_A, k_B, l_A, l_B) = gains
    s = nearest_scales((q_A, q_B), (k_A, k_B), positive=True)
    rest = nearest_scales((p_A, p_B), (l_A, l_B), positive=True)
    return out | heads.trade_gains(out, torch.cat([s, s, rest]))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[h, rows, d] → [g, share · rows, d]``."""
    return x.reshape(groups, -1, x.shape[-1])


def _with_bias(w: Mapping[str, Tensor], weight: str, bias: str, *, zero: bool = False) -> Tensor:
    """A matrix with its bias as one row more."""
    if bias not in w or zero:
        return w[weight]
    return torch.cat([w[weight], w[bias].unsqueeze(-2)], -2)


def _unit(x: Tensor) -> Tensor:
    unit: Tensor = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return unit
