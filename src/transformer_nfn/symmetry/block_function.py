"""When two of the paper's blocks are one function although no group element joins them.

The block is ``LN(ReLU(x W_A + b_A) W_B + b_B)`` with ``x = LN(MultiHead(X))`` on the sphere of
radius √D across the ones vector. What LayerNorm discards, what a positive scale of a neuron
does, what equal, opposite, dead or always active neurons add up to: all of it is taken out, and
what is left is compared. Agreement proves equality; anything else proves nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.spaces import Weights
from transformer_nfn.spaces.actions.permutation import distances, is_permutation
from transformer_nfn.symmetry.heads import match_heads, merged_heads

SAFETY = 4.0
MAX_TOLERANCE = 1e-3
RANK = 1e-7


@dataclass(frozen=True)
class Ridges:
    """``x → Σ_j ReLU((x, 1)·d_j) w_j + (x, 1)·L``, neurons distinct, none silent on the sphere.

    Attributes:
        d: unit directions ``[m, D+1]``. w: ``[m, D]``. L: ``[D+1, D]``.
        size: a norm of all that was added up, to judge what is left over.
    """

    d: Tensor
    w: Tensor
    L: Tensor
    size: float


def centred(x: Tensor) -> Tensor:
    """``x ρ``: each row without its mean."""
    return x - x.mean(-1, keepdim=True)


def same_block(U: Weights, V: Weights, unit: float) -> bool:
    """True if the two blocks are provably one function; False says nothing.

    Args:
        U: one network of `spaces.attention_block`, ``[*axes]`` in float64.
        V: the other.
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
    seen = Y[:rank].T  # directions of the stream that any input can reach
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
    # ReLU(z) w = ReLU(−z) w + z w: turn every neuron to one side of a fixed hyperplane.
    generator = torch.Generator().manual_seed(1)
    side = torch.randn(D + 1, generator=generator, dtype=d.dtype).to(d.device)
    flip = d @ side < 0
    L += d[flip].T @ w[flip]
    d = torch.where(flip[:, None], -d, d)
    d, w = _merged(d, w, tolerance)
    alive = w.norm(dim=1) > tolerance * size
    return Ridges(d[alive], w[alive], L, size)


def _merged(d: Tensor, w: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Neurons with one direction made one, their outputs added."""
    if len(d) < 2:
        return d, w
    near = distances(d, d) <= tolerance
    first = near.int().argmax(1)  # the first neuron of each cluster stands for it
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
        return False  # the last LayerNorm is fed a constant: no function to speak of
    scale = float(right.norm() / left.norm())
    allowed = tolerance * (scale * U.size + V.size)
    return float((scale * left - right).norm()) <= allowed
