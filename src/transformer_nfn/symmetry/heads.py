"""The paper's theorem in the form that needs no assumption: heads merged, dead ones dropped.

With ``A_i = Q_i K_iᵀ`` and ``B_i = V_i O_i``, heads of equal A act as one head with the sum of
their B, and a head with B = 0 does nothing (Theorem 3.1). Two attentions are the same function
if and only if the multisets {(A, B)} left over agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.spaces import Weights
from transformer_nfn.spaces.actions.permutation import match_rows


@dataclass(frozen=True)
class Heads:
    """Distinct, living heads.

    Attributes:
        A: ``[m, D, D]``. B: ``[m, D, F]``.
        error_A: allowed rounding error (Frobenius) of each A, ``[m]``; ``error_B`` likewise.
        clear: False if it could not be told whether two heads are equal, or one is dead.
    """

    A: Tensor
    B: Tensor
    error_A: Tensor
    error_B: Tensor
    clear: bool


def merged_heads(weights: Weights, unit: float, *, centred: bool = False) -> Heads:
    """The distinct, living heads of one network.

    Args:
        weights: ``W_Q, W_K, W_V, W_O`` as ``[h, …]`` in float64.
        unit: relative error allowed in one weight.
        centred: project B onto what a following LayerNorm sees (its rows' means removed).
    """
    Q, K, V, O = (weights[f"W_{name}"] for name in "QKVO")  # noqa: E741
    if centred:
        O = O - O.mean(-1, keepdim=True)  # noqa: E741
    A, B = Q @ K.mT, V @ O
    error_A = unit * (Q.square().sum(-2) * K.square().sum(-2)).sum(-1).sqrt()
    error_B = unit * (V.square().sum(-2) * O.square().sum(-1)).sum(-1).sqrt()
    clear = True
    clusters: list[list[int]] = []
    for i in range(len(A)):
        for cluster in clusters:
            j = cluster[0]
            away = float((A[i] - A[j]).norm() / (error_A[i] + error_A[j]).clamp_min(1e-300))
            if away <= 1:
                cluster.append(i)
                break
            clear = clear and away > 8
        else:
            clusters.append([i])
    keep_A, keep_B, keep_eA, keep_eB = [], [], [], []
    for cluster in clusters:
        total = B[cluster].sum(0)
        error = error_B[cluster].sum()
        size = float(total.norm() / error.clamp_min(1e-300))
        if size <= 1:
            continue
        clear = clear and size > 8
        keep_A.append(A[cluster[0]])
        keep_B.append(total)
        keep_eA.append(error_A[cluster].max())
        keep_eB.append(error)
    if not keep_A:
        return Heads(A[:0], B[:0], error_A[:0], error_B[:0], clear)
    stacked = [torch.stack(x) for x in (keep_A, keep_B, keep_eA, keep_eB)]
    return Heads(stacked[0], stacked[1], stacked[2], stacked[3], clear)


def match_heads(U: Heads, V: Heads) -> Heads | None:
    """The heads of ``U`` in the order of ``V``, if their A agree one to one."""
    if len(U.A) != len(V.A):
        return None
    if len(U.A) == 0:
        return U
    order = match_rows(V.A.flatten(1), U.A.flatten(1)).index
    away = (U.A[order] - V.A).flatten(1).norm(dim=1)
    if bool((away > U.error_A[order] + V.error_A).any()):
        return None
    return Heads(U.A[order], U.B[order], U.error_A[order], U.error_B[order], U.clear)


def same_attention(U: Weights, V: Weights, unit: float) -> bool | None:
    """Whether the multisets {(A, B)} agree: True, False, or None if rounding hides the answer."""
    left, right = merged_heads(U, unit), merged_heads(V, unit)
    matched = match_heads(left, right)
    if matched is not None:
        away = (matched.B - right.B).flatten(1).norm(dim=1)
        if bool((away <= matched.error_B + right.error_B).all()):
            return True
    return False if left.clear and right.clear else None
