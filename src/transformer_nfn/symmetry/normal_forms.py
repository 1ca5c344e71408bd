"""Normal forms of functions: when networks are equal although no group element joins them.

Attention (Theorem 3.1): with ``A_i = Q_i K_iᵀ`` and ``B_i = V_i O_i``, heads of equal A act as one
head with the sum of their B, and a head with B = 0 does nothing. Two attentions are the same
function if and only if the remaining multisets {(A, B)} agree.

The paper's block is ``LN(ReLU(x W_A + b_A) W_B + b_B)`` with ``x = LN(MultiHead(X))`` on the sphere
of radius √D orthogonal to the ones vector. Its normal form removes what LayerNorm discards,
positive scales of neurons, and equal, opposite, dead or always active neurons. Agreement proves
equality; disagreement proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.functional import Architecture
from transformer_nfn.spaces import Weights
from transformer_nfn.spaces.actions.permutation import distances, is_permutation, match_rows
from transformer_nfn.spaces.axis import under_prefix

SAFETY = 4.0
MAX_TOLERANCE = 1e-3
RANK = 1e-7


@dataclass(frozen=True)
class Heads:
    """Distinct heads with nonzero output.

    Attributes:
        A: ``[m, D, D]``. B: ``[m, D, F]``.
        error_A: allowed rounding error (Frobenius) of each A, ``[m]``; ``error_B`` likewise.
    """

    A: Tensor
    B: Tensor
    error_A: Tensor
    error_B: Tensor


def merged_heads(weights: Weights, unit: float, *, centred: bool = False) -> Heads:
    """The distinct heads of one network with nonzero output.

    Args:
        weights: ``W_Q, W_K, W_V, W_O`` as ``[h, …]`` in float64.
        unit: relative error allowed in one weight.
        centred: remove the row means of B, as a following LayerNorm does.
    """
    Q, K, V, O = (weights[f"W_{name}"] for name in "QKVO")  # noqa: E741
    if centred:
        O = O - O.mean(-1, keepdim=True)  # noqa: E741
    A, B = Q @ K.mT, V @ O
    error_A = unit * (Q.square().sum(-2) * K.square().sum(-2)).sum(-1).sqrt()
    error_B = unit * (V.square().sum(-2) * O.square().sum(-1)).sum(-1).sqrt()
    clusters: list[list[int]] = []
    for i in range(len(A)):
        for cluster in clusters:
            j = cluster[0]
            distance = float((A[i] - A[j]).norm() / (error_A[i] + error_A[j]).clamp_min(1e-300))
            if distance <= 1:
                cluster.append(i)
                break
        else:
            clusters.append([i])
    kept = []
    for cluster in clusters:
        total = B[cluster].sum(0)
        error = error_B[cluster].sum()
        size = float(total.norm() / error.clamp_min(1e-300))
        if size <= 1:
            continue
        kept.append((A[cluster[0]], total, error_A[cluster].max(), error))
    if not kept:
        return Heads(A[:0], B[:0], error_A[:0], error_B[:0])
    return Heads(*map(torch.stack, zip(*kept, strict=True)))


def match_heads(U: Heads, V: Heads) -> Heads | None:
    """The heads of ``U`` in the order of ``V``, if their A agree one to one."""
    if len(U.A) != len(V.A):
        return None
    if len(U.A) == 0:
        return U
    order = match_rows(V.A.flatten(1), U.A.flatten(1)).index
    distance = (U.A[order] - V.A).flatten(1).norm(dim=1)
    if bool((distance > U.error_A[order] + V.error_A).any()):
        return None
    return Heads(U.A[order], U.B[order], U.error_A[order], U.error_B[order])


def same_attention(U: Weights, V: Weights, unit: float) -> bool:
    """Whether the multisets {(A, B)} agree; False is inconclusive."""
    left, right = merged_heads(U, unit), merged_heads(V, unit)
    matched = match_heads(left, right)
    if matched is None:
        return False
    distance = (matched.B - right.B).flatten(1).norm(dim=1)
    return bool((distance <= matched.error_B + right.error_B).all())


@dataclass(frozen=True)
class Ridges:
    """``x → Σ_j ReLU((x, 1)·d_j) w_j + (x, 1)·L``, neurons distinct and active on the sphere.

    Attributes:
        d: unit directions ``[m, D+1]``. w: ``[m, D]``. L: ``[D+1, D]``.
        size: norm of all summands, the scale of rounding errors.
    """

    d: Tensor
    w: Tensor
    L: Tensor
    size: float


def centred(x: Tensor) -> Tensor:
    """``x`` with the mean of each row removed."""
    return x - x.mean(-1, keepdim=True)


def same_block(U: Weights, V: Weights, unit: float) -> bool:
    """Whether the two blocks are provably the same function; False is inconclusive.

    Args:
        U: one network of `spaces.attention_block`, ``[*axes]`` in float64. V: the other.
        unit: relative error allowed in one weight.
    """
    left, right = (merged_heads(w, unit, centred=True) for w in (U, V))
    matched = match_heads(left, right)
    if matched is None or len(right.A) == 0:
        return False
    S_U, S_V = matched.B.flatten(0, 1), right.B.flatten(0, 1)
    scale = S_V.norm() / S_U.norm()
    # Rotation of the hyperplane between attention and MLP, fixed by the outputs of all heads.
    X, values, Y = torch.linalg.svd(S_U.T @ S_V)
    R = X @ Y
    error = scale * matched.error_B.norm() + right.error_B.norm()
    if float((scale * S_U @ R - S_V).norm()) > float(error) * 2:
        return False
    rank = int((values > RANK**2 * values[0]).sum())
    seen = Y[:rank].T  # directions of the stream that inputs can reach
    spread = float((values[0] / values[rank - 1]).sqrt())
    inflation = float(error / (unit * S_V.norm())) + 1.0
    tolerance = SAFETY * unit * spread * inflation
    if tolerance > MAX_TOLERANCE:
        return False
    ridges = [
        _ridges(seen @ (seen.T @ (R.T @ U["W_A"])), U, tolerance),
        _ridges(seen @ (seen.T @ V["W_A"]), V, tolerance),
    ]
    return _same_up_to_scale(ridges[0], ridges[1], tolerance)


def _ridges(W_A: Tensor, weights: Weights, tolerance: float) -> Ridges:
    D = W_A.shape[0]
    reach = W_A.T * D**0.5  # largest |x·a| on the sphere is the norm of this row
    b, w = weights["b_A"], centred(weights["W_B"])
    top = reach.norm(dim=1)
    rows = torch.cat([reach, b[:, None]], 1)
    size = float((rows.norm(dim=1) * w.norm(dim=1)).norm() + weights["b_B"].norm())
    L = torch.zeros(D + 1, D, dtype=w.dtype, device=w.device)
    L[-1] = centred(weights["b_B"])
    always, never = b >= top, b <= -top
    L += rows[always].T @ w[always]
    rows, w = rows[~(always | never)], w[~(always | never)]
    norm = rows.norm(dim=1, keepdim=True)
    d, w = rows / norm, w * norm
    # ReLU(z) w = ReLU(−z) w + z w: reflect every neuron to one side of a fixed hyperplane.
    generator = torch.Generator().manual_seed(1)
    side = torch.randn(D + 1, generator=generator, dtype=d.dtype).to(d.device)
    flip = d @ side < 0
    L += d[flip].T @ w[flip]
    d = torch.where(flip[:, None], -d, d)
    d, w = _merged(d, w, tolerance)
    alive = w.norm(dim=1) > tolerance * size
    return Ridges(d[alive], w[alive], L, size)


def _merged(d: Tensor, w: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Merge neurons of equal direction, adding their outputs."""
    if len(d) < 2:
        return d, w
    near = distances(d, d) <= tolerance
    first = near.int().argmax(1)  # the first neuron represents its cluster
    total = torch.zeros_like(w).index_add_(0, first, w)
    keep = first == torch.arange(len(d), device=d.device)
    return d[keep], total[keep]


def _same_up_to_scale(U: Ridges, V: Ridges, tolerance: float) -> bool:
    if len(U.d) != len(V.d):
        return False
    w, d = U.w, U.d
    if len(d):
        order = distances(V.d, d).argmin(1)
        if not is_permutation(order):
            return False
        w, d = w[order], d[order]
        if float((d - V.d).norm(dim=1).max()) > tolerance:
            return False
    left, right = (torch.cat([x.flatten() for x in pair]) for pair in ((w, U.L), (V.w, V.L)))
    if float(left.norm()) <= tolerance * U.size or float(right.norm()) <= tolerance * V.size:
        return False  # the last LayerNorm reads a constant: its output is undefined
    scale = float(right.norm() / left.norm())
    allowed = tolerance * (scale * U.size + V.size)
    return float((scale * left - right).norm()) <= allowed


SameForm = Callable[[Weights, Weights, float], bool]


NORMAL_FORMS: Mapping[str, SameForm] = {
    "multi_head": same_attention,
    "attention_block": same_block,
}
"""By name of the architecture: True proves that two networks are the same function."""


def same_normal_form(architecture: Architecture, u: Weights, v: Weights, unit: float) -> bool:
    """Whether every stage of two networks has the same normal form; False is inconclusive.

    Args:
        u: one network, ``[*axes]`` in float64. v: the other.
        unit: relative error allowed in one weight.
    """
    stages = architecture.stages
    if not stages or any(stage.architecture not in NORMAL_FORMS for stage in stages):
        return False
    return all(
        NORMAL_FORMS[stage.architecture](
            under_prefix(u, stage.prefix), under_prefix(v, stage.prefix), unit
        )
        for stage in stages
    )
