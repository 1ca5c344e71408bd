"""Checks of two tensors up to a change of basis, and that both determine the same one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.proof.checks import check
from transformer_nfn.checkpoints.proof.match import BlockMatch

INVERTIBLE = 1e4
"""Condition up to which a re-basing is inverted."""
CORRELATED = 2.0
"""Times the variance of independent errors: both tensors read through one norm, whose rounded gains
move both bases the same way. Exact would be 1 to 1.5."""
FEW = 64
"""Fewer numbers than these scatter as a vector does."""


def check_pair(
    match: BlockMatch,
    name: str,
    values: tuple[Tensor, Tensor],
    errors: tuple[Tensor, Tensor],
    G: Tensor,
    partners: tuple[Tensor, Tensor],
    double: Tensor | None = None,
) -> None:
    """Checks ``x G = y`` head by head.

    A disguise of bad condition has its own rounding error spread over all directions, which
    weighs least in its own basis; so the equation is read as ``x = y G⁻¹`` where that says more.

    Args:
        match: what is being compared.
        name: of the tensor.
        values: x, y ``[h, rows, d]``.
        errors: of both ``[h, d]``.
        G: ``[h, d, d]``.
        partners: Gram matrices ``[h, d, d]`` of what x and y are multiplied with.
        double: heads ``[h]`` of which nothing can be said alone.
    """
    sides = [(values, errors, G, partners[1])]
    if bool((torch.linalg.cond(G) < INVERTIBLE).all()):
        sides.append((values[::-1], errors[::-1], torch.linalg.inv(G), partners[0]))
    tried = []
    for (x, y), (e, f), matrix, partner in sides:
        error = (e.unsqueeze(-2) @ matrix.square()).squeeze(-2) + f
        size = y.square().sum((-2, -1))
        told = float(error.sum() / size.sum().clamp_min(1e-300))
        tried.append((told, x, y, matrix, e, f, partner, error.sum(-1), size))
    _, x, y, matrix, e, f, partner, error, size = min(tried, key=lambda side: side[0])
    residual = x @ matrix - y
    away = residual.square().sum((-2, -1))
    noise = matrix.mT @ (e.unsqueeze(-1) * matrix) + torch.diag_embed(f)
    seen = ((residual.mT @ residual) * partner).sum((-2, -1))
    felt = seen / (noise * partner).sum((-2, -1)).clamp_min(1e-300)
    if double is not None:
        felt = torch.where(double, 0.0, felt)
    match.add(name, away, error, size, y.shape[-2] * y.shape[-1], felt)


def check_bases(
    match: BlockMatch,
    name: str,
    stacks: Mapping[str, tuple[Tensor, Tensor]],
    errors: list[list[Tensor]],
    alone: list[Tensor],
    G: Tensor,
    turned: int,
    double: Tensor | None = None,
) -> None:
    """Checks that the basis one tensor asks for is the one the other asks for.

    A change within what a re-basing can do, such as a factor of 1.01 on all of ``W_Q``, fits
    either tensor perfectly; it shows only here, and with little noise, since each basis is a mean
    over all rows of a tensor. Which of the two was changed has no answer.

    Args:
        match: what is being compared.
        name: of the two tensors.
        stacks: both sides of the plain (``Q``) and the dual tensor (``K``), ``[g, rows, d]``.
        errors: of those, ``[g, share, d]``, summed over rows.
        alone: G from the plain tensor alone, and from the dual one alone.
        G: from both.
        turned: leading coordinates that have a complex scale per pair instead of a matrix.
        double: groups ``[g]`` of which nothing can be said alone.
    """
    (P_A, _), (_, D_B) = stacks["Q"], stacks["K"]
    plain, dual = ([e.sum(-2) for e in pair] for pair in errors)
    # What is left of Q_B − Q_A G and of K_A − K_B Gᵀ by rounding, per row and column.
    left = [
        ((plain[0].unsqueeze(-2) @ G.square()).squeeze(-2) + plain[1]) / P_A.shape[-2],
        ((dual[1].unsqueeze(-2) @ G.mT.square()).squeeze(-2) + dual[0]) / D_B.shape[-2],
    ]
    sides = [_base_error(x, e, turned) for x, e in zip((P_A, D_B), left, strict=True)]
    away = (alone[0] - alone[1]).square().sum((-2, -1))
    size = G.square().sum((-2, -1))
    d = G.shape[-1]
    numbers = turned + (d - turned) ** 2  # that are free in one group's basis
    found = check(
        f"{match.a.name}.{name}",
        away,
        CORRELATED * (sides[0] + sides[1]),
        size,
        numbers,
        sites=len(G) * numbers >= FEW,
        felt=None if double is None else torch.where(double, 0.0, torch.inf),
    )
    match.checks.append(found)


def _base_error(x: Tensor, error: Tensor, turned: int) -> Tensor:
    """Expected square of the error of a least-squares basis, ``[g]``.

    Rounding moves large rows most, and least squares weigh them most again.
    """
    d = x.shape[-1]
    total = torch.zeros(len(x), dtype=torch.float64)
    if turned:
        squares = x[..., :turned].square().unflatten(-1, (2, -1)).sum(-2)
        size = squares.sum(-2).clamp_min(1e-300)
        noise = error[..., :turned].unflatten(-1, (2, -1)).sum(-2)
        total += (2 * noise * _focus(squares) / size).sum(-1)
    if turned < d:
        rest = x[..., turned:]
        error = error * _focus(rest.square().sum(-1, keepdim=True))
        values = torch.linalg.eigvalsh(rest.mT @ rest)
        floor = (1e-12 * values.amax(-1, keepdim=True)).clamp_min(1e-150)
        total += (1 / values.clamp_min(floor)).sum(-1) * error[..., turned:].sum(-1)
    # A tensor of zeros leaves its basis open.
    silent = x.square().sum((-2, -1)) == 0
    return torch.where(silent, 1e100, total)


def _focus(squares: Tensor) -> Tensor:
    """How much the largest of some squares ``[..., rows, n]`` outweigh the others: 1 to rows."""
    return len(squares[0]) * squares.square().sum(-2) / squares.sum(-2).square().clamp_min(1e-300)
