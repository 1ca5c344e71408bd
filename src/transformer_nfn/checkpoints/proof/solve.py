"""Which matrix, scale or permutation takes the heads and neurons of one block to another's?

A re-basing G takes `Q_B = Q_A G` and `K_A = K_B Gᵀ`; both are asked of it at once, weighted by
their noise, which is a Sylvester equation. Where both hold, `Q_B K_Bᵀ = Q_A K_Aᵀ`, also where G
happens to be singular, so that a head of low rank does not stand in the way of a proof.
"""

from __future__ import annotations

import torch
from torch import Tensor


def solve_matrix(
    plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]
) -> Tensor:
    """G ``[g, d, d]`` that minimises ``w₁‖P_B − P_A G‖² + w₂‖D_A − D_B Gᵀ‖²`` in each group.

    Args:
        plain: P_A, P_B ``[g, rows, d]``.
        dual: D_A, D_B ``[g, rows, d]``.
        weights: w₁, w₂ ``[g]``.
    """
    (P_A, P_B), (D_A, D_B) = plain, dual
    w_1, w_2 = (w.reshape(-1, 1, 1) for w in weights)
    a, U = torch.linalg.eigh(w_1 * (P_A.mT @ P_A))
    b, V = torch.linalg.eigh(w_2 * (D_B.mT @ D_B))
    right = w_1 * (P_A.mT @ P_B) + w_2 * (D_A.mT @ D_B)
    scale = a.unsqueeze(-1) + b.unsqueeze(-2)
    floor = 1e-14 * scale.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    G: Tensor = U @ ((U.mT @ right @ V) / scale.clamp_min(floor)) @ V.mT
    return G


def solve_turns(
    plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]
) -> Tensor:
    """The same where G is one complex scale for each pair (i, i + d/2); see `solve_matrix`."""
    (P_A, P_B), (D_A, D_B) = ([_complex(x) for x in pair] for pair in (plain, dual))
    w_1, w_2 = (w.reshape(-1, 1) for w in weights)
    above = w_1 * (P_A.conj() * P_B).sum(-2) + w_2 * (D_A.conj() * D_B).sum(-2)
    below = w_1 * P_A.abs().square().sum(-2) + w_2 * D_B.abs().square().sum(-2)
    return turn_matrix(above / below.clamp_min(1e-300))


def solve_quarter_turns(
    plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], even: Tensor
) -> tuple[Tensor, Tensor]:
    """The same where a norm leaves signs of pairs, and quarter turns of whole layers.

    Args:
        plain: P_A, P_B ``[g, rows, d]``.
        dual: D_A, D_B ``[g, rows, d]``.
        even: pairs ``[d / 2]`` with equal gains, which each group may turn by any angle.

    Returns:
        G ``[g, d, d]``, and which coordinate of the gains each new one is, ``[d]``.
    """
    (P_A, P_B), (D_A, D_B) = ([_complex(x) for x in pair] for pair in (plain, dual))
    inner = sum((x.conj() * y).sum(-2) for x, y in ((P_A, P_B), (D_A, D_B)))
    assert isinstance(inner, Tensor)
    turned = (inner.imag.abs().sum(0) > inner.real.abs().sum(0)) & ~even
    real, imaginary = (torch.where(x < 0, -1.0, 1.0).to(x) for x in (inner.real, inner.imag))
    zero = torch.zeros_like(real)
    scale = torch.complex(torch.where(turned, zero, real), torch.where(turned, imaginary, zero))
    scale = torch.where(even, inner / inner.abs().clamp_min(1e-300), scale)
    half = len(turned)
    order = torch.arange(2 * half)
    chosen = turned.nonzero().squeeze(-1)
    order[chosen], order[chosen + half] = chosen + half, chosen.clone()
    return turn_matrix(scale), order


def turn_matrix(scale: Tensor) -> Tensor:
    """Complex scales ``[g, d/2]`` as matrices ``[g, d, d]`` that act on rows from the right."""
    p, q = torch.diag_embed(scale.real), torch.diag_embed(scale.imag)
    return torch.cat([torch.cat([p, q], -1), torch.cat([-q, p], -1)], -2)


def _complex(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.complex(first.contiguous(), second.contiguous())


def solve_scales(
    plain: tuple[Tensor, Tensor],
    dual: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    *,
    positive: bool,
) -> Tensor:
    """s ``[n]`` that minimises ``w₁‖p_B − s p_A‖² + w₂‖d_A − s d_B‖²`` for each row.

    Args:
        plain: p_A, p_B ``[n, entries]``.
        dual: d_A, d_B ``[n, entries]``.
        weights: w₁, w₂ ``[n]``.
        positive: only positive scales act (ReLU).
    """
    (p_A, p_B), (d_A, d_B) = plain, dual
    above = weights[0] * (p_A * p_B).sum(-1) + weights[1] * (d_A * d_B).sum(-1)
    below = weights[0] * p_A.square().sum(-1) + weights[1] * d_B.square().sum(-1)
    scales = above / below.clamp_min(1e-300)
    return scales.clamp_min(0) if positive else scales


def match_heads(cost: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Which head of A each head of B is, groups staying whole.

    Args:
        cost: ``[h, h]``, of B's head i being A's head j.
        groups: of keys and values.

    Returns:
        ``queries [h]`` and ``groups [g]``.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    share = len(cost) // groups
    tiles = cost.unflatten(0, (groups, share)).unflatten(2, (groups, share)).transpose(1, 2)
    if share == 1:
        _, order = linear_sum_assignment(tiles[:, :, 0, 0].numpy())
        index = torch.as_tensor(order)
        return index, index
    total = torch.zeros(groups, groups, dtype=cost.dtype)
    inner = torch.zeros(groups, groups, share, dtype=torch.long)
    for i in range(groups):
        for j in range(groups):
            tile = tiles[i, j].numpy()
            rows, columns = linear_sum_assignment(tile)
            total[i, j], inner[i, j] = float(tile[rows, columns].sum()), torch.as_tensor(columns)
    _, order = linear_sum_assignment(total.numpy())
    chosen = torch.as_tensor(order)
    within = inner[torch.arange(groups), chosen]
    return (chosen.unsqueeze(-1) * share + within).flatten(), chosen
