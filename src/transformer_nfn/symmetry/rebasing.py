"""Which matrix re-bases one pair of factors into another with the same product."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.symmetry.forms import as_complex, complex_matrix


def factor(space: WeightSpace, weights: Weights, axis: str, *, dual: bool) -> Tensor:
    """Everything that carries a linear axis plain (or dual), side by side.

    Returns:
        ``[*ancestors, rows, n]``; no rows if nothing carries it so.
    """
    sites = space.ancestors(axis)
    n = space.axes[axis].size
    silent = {shift.tensor for shift in space.shifts}
    parts = []
    for name, spec in space.tensors.items():
        if axis in spec.axes and (axis in spec.dual) == dual and name not in silent:
            order = [spec.position(a) for a in sites]
            at = spec.position(axis)
            rest = [d for d in range(len(spec.axes)) if d not in (*order, at)]
            value = weights[name].permute(*order, *rest, at)
            parts.append(value.reshape(*value.shape[: len(sites)], -1, n))
    if parts:
        return torch.cat(parts, -2)
    shape = [space.axes[a].size for a in sites]
    sample = next(iter(weights.values()))
    return sample.new_zeros(*shape, 0, n)


def unfactor(
    space: WeightSpace, weights: Weights, axis: str, rows: Tensor, *, dual: bool
) -> Weights:
    """The weights with what carries a linear axis plain (or dual) replaced; undoes `factor`."""
    sites = space.ancestors(axis)
    silent = {shift.tensor for shift in space.shifts}
    out = dict(weights)
    start = 0
    for name, spec in space.tensors.items():
        if axis in spec.axes and (axis in spec.dual) == dual and name not in silent:
            order = [*(spec.position(a) for a in sites)]
            at = spec.position(axis)
            order += [d for d in range(len(spec.axes)) if d not in (*order, at)] + [at]
            shape = [space.shape(name)[d] for d in order]
            count = prod(shape[len(sites) : -1])
            part = rows[..., start : start + count, :].reshape(shape)
            out[name] = part.permute(*(order.index(d) for d in range(len(order))))
            start += count
    return out


def solve_axis(
    space: WeightSpace, axis: str, U: Weights, V: Weights, unit: float
) -> tuple[Tensor, Tensor] | None:
    """``G`` and its inverse with ``P_V = P_U G`` and ``D_V = D_U G⁻ᵀ`` at every site.

    None if no invertible matrix does it even nearly (the ranks differ).
    """
    P_U, P_V = (factor(space, w, axis, dual=False) for w in (U, V))
    D_U, D_V = (factor(space, w, axis, dual=True) for w in (U, V))
    if space.axes[axis].form == "complex":
        return _solve_complex(P_U, P_V, D_U, D_V)
    sites = P_U.shape[:-2]
    n = P_U.shape[-1]
    pairs = [
        solve_general(*(f.reshape(-1, *f.shape[-2:])[i] for f in (P_U, P_V, D_U, D_V)), unit=unit)
        for i in range(sites.numel())
    ]
    if any(pair is None for pair in pairs):
        return None
    stacked = [torch.stack(list(ms)).reshape(*sites, n, n) for ms in zip(*pairs, strict=True)]
    return stacked[0], stacked[1]


def solve_general(
    P_U: Tensor, P_V: Tensor, D_U: Tensor, D_V: Tensor, *, unit: float
) -> tuple[Tensor, Tensor] | None:
    """``G`` invertible with ``P_U G = P_V`` and ``D_V Gᵀ = D_U``, factors ``[rows, n]``.

    ``P_U`` fixes G on its row space (from the left), ``D_V`` fixes it on its own (from the
    right). Where neither does — both factors lack rank — any completion will do; one that keeps
    G well conditioned is chosen.
    """
    n = P_U.shape[-1]
    left, fixed_rows = _row_space(P_U, unit)
    right, fixed_columns = _row_space(D_V, unit)
    # Rows of G along the row space of P_U; columns of G along the row space of D_V.
    rows = torch.linalg.lstsq(P_U @ left[:, :fixed_rows], P_V).solution if fixed_rows else None
    columns = (
        torch.linalg.lstsq(D_V @ right[:, :fixed_columns], D_U).solution if fixed_columns else None
    )
    core = P_U.new_zeros(n, n)  # leftᵀ G right
    if columns is not None:
        core[:, :fixed_columns] = (columns @ left).T
    if rows is not None:
        core[:fixed_rows] = rows @ right
    core[fixed_rows:, fixed_columns:] = _completion(core, fixed_rows, fixed_columns)
    G = left @ core @ right.T
    if not bool(torch.isfinite(G).all()):
        return None
    if float(torch.linalg.cond(G)) > 0.01 / torch.finfo(G.dtype).eps:
        return None
    return G, torch.linalg.inv(G)


def _row_space(factor: Tensor, unit: float) -> tuple[Tensor, int]:
    """An orthogonal ``[n, n]`` whose first columns span the row space, and how many do."""
    n = factor.shape[-1]
    if factor.shape[0] == 0:
        return torch.eye(n, dtype=factor.dtype, device=factor.device), 0
    triangle = torch.linalg.qr(factor, mode="r").R
    _, values, vectors = torch.linalg.svd(triangle, full_matrices=True)
    limit = float(values[0]) * max(factor.shape) * unit * 4
    return vectors.T, int((values > limit).sum())


def _completion(core: Tensor, rows: int, columns: int) -> Tensor:
    """The free corner of ``core``: directions not yet reached, one to one, at a middling scale."""
    n = core.shape[-1]
    shape = (n - rows, n - columns)
    if 0 in shape:
        return core.new_zeros(shape)
    known = torch.linalg.matrix_norm(core, 2) if rows or columns else core.new_ones(())
    scale = known if float(known) > 0 else core.new_ones(())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(max(shape), max(shape), generator=generator, dtype=core.dtype)
    Q: Tensor = torch.linalg.qr(noise).Q
    return scale * Q[: shape[0], : shape[1]].to(core.device)


def _solve_complex(
    P_U: Tensor, P_V: Tensor, D_U: Tensor, D_V: Tensor
) -> tuple[Tensor, Tensor] | None:
    """One complex scale a frequency, by least squares: ``q_V = z q_U``, or else ``k_U = z̄ k_V``."""
    q_U, q_V, k_U, k_V = (as_complex(x) for x in (P_U, P_V, D_U, D_V))
    by_q = (q_U.conj() * q_V).sum(-2) / q_U.abs().square().sum(-2)
    by_k = ((k_V.conj() * k_U).sum(-2) / k_V.abs().square().sum(-2)).conj()
    z = torch.where(torch.isfinite(by_q.abs()) & (by_q != 0), by_q, by_k)
    dead = ~torch.isfinite(z.abs())
    z = torch.where(dead, torch.ones_like(z), z)
    if bool((z == 0).any()):
        return None
    return complex_matrix(z), complex_matrix(1 / z)
