"""Invertible matrices and orthogonal matrices."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from transformer_nfn.spaces.actions.base import LOG10_2, Drawing, Size, Solution
from transformer_nfn.spaces.actions.matrix import MatrixAction, geometric, normal, orthogonal

COMPLETION_DRAWS = 3
REFINEMENT_STEPS = 10  # at most; two or three suffice


class Linear(MatrixAction):
    """GL(n): ``Q → Q G`` and ``K → K G⁻ᵀ`` with any invertible G (M and N of the paper).

    >>> Linear().describe(16)
    'GL(16)'
    """

    word: ClassVar[str] = "linear"

    def axis_error(self, name: str, size: int, of: str | None) -> str | None:
        if of is None:
            return f"linear axis '{name}' must say which perm axis it belongs to"
        return None

    def describe(self, size: int) -> str:
        return f"GL({size})"

    def size(self, n: int) -> Size:
        return Size(n**2)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        return normal((count, size, size), how)

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """``X diag(s) Y`` with X and Y uniform and s geometric."""
        left, right = orthogonal(count, size, how), orthogonal(count, size, how)
        return left * geometric(count, size, how, condition).unsqueeze(-2) @ right

    def membership_error(self, matrix: Tensor) -> str | None:
        return None

    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """``P_V = P_U G`` and ``D_V = D_U G⁻ᵀ`` at every site, by `solve_general`."""
        sites, n = plain[0].shape[:-2], plain[0].shape[-1]
        flat = [f.reshape(sites.numel(), *f.shape[-2:]) for f in (*plain, *dual)]
        pairs = []
        for i in range(sites.numel()):
            pair = solve_general(*(f[i] for f in flat), unit=unit)
            if pair is None:
                return None
            pairs.append(pair)
        G, inverse = (torch.stack(list(m)).reshape(*sites, n, n) for m in zip(*pairs, strict=True))
        return Solution(G, inverse)

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """``P Dᵀ = X Σ Yᵀ`` as ``(X Σ^½)(Y Σ^½)ᵀ``, the largest entry of X's columns positive."""
        n = plain.shape[-1]
        Q_p, R_p = torch.linalg.qr(plain)
        Q_d, R_d = torch.linalg.qr(dual)
        X, values, Yh = torch.linalg.svd(R_p @ R_d.mT, full_matrices=False)
        root = values.sqrt().unsqueeze(-2)
        left, right = Q_p @ (X * root), Q_d @ (Yh.mT * root)
        if left.shape[-2]:
            sign = column_signs(left)
            left, right = left * sign, right * sign
        margin = (0, n - left.shape[-1])
        return pad(left, margin), pad(right, margin)


def column_signs(rows: Tensor) -> Tensor:
    """±1 for each column, ``[*sites, 1, n]``, that makes its largest entry positive."""
    top = rows.abs().argmax(-2, keepdim=True)
    return torch.where(rows.gather(-2, top) < 0, -1.0, 1.0).to(rows.dtype)


def solve_general(
    P_U: Tensor, P_V: Tensor, D_U: Tensor, D_V: Tensor, *, unit: float
) -> tuple[Tensor, Tensor] | None:
    """``G`` invertible with ``P_U G = P_V`` and ``D_V Gᵀ = D_U``, factors ``[rows, n]``.

    ``P_U`` fixes G on its row space (from the left), ``D_V`` on its row space (from the right).
    Where both factors lack rank, G is completed arbitrarily but well conditioned.
    """
    n = P_U.shape[-1]
    left, fixed_rows = _row_space(P_U, unit)
    right, fixed_columns = _row_space(D_V, unit)
    # Rows of G along the row space of P_U; columns of G along the row space of D_V.
    rows = _least_squares(P_U @ left[:, :fixed_rows], P_V) if fixed_rows else None
    columns = _least_squares(D_V @ right[:, :fixed_columns], D_U) if fixed_columns else None
    core = P_U.new_zeros(n, n)  # leftᵀ G right
    if columns is not None:
        core[:, :fixed_columns] = (columns @ left).T
    if rows is not None:
        core[:fixed_rows] = rows @ right
    G = left @ _completed(core, fixed_rows, fixed_columns) @ right.T
    if not bool(torch.isfinite(G).all()):
        return None
    if float(torch.linalg.cond(G)) > 0.01 / torch.finfo(G.dtype).eps:
        return None
    return _refined(G, P_U, P_V, D_U, D_V)


def _refined(
    G: Tensor, P_U: Tensor, P_V: Tensor, D_U: Tensor, D_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Refine ``G`` so that both ``P_U G`` and ``D_U G⁻ᵀ`` fit best; return it and its inverse.

    Each column is weighted by its expected rounding error, so that the noise of neither factor
    is multiplied by the condition number of G. Gauss-Newton: with ``G → G (1 + E)`` the normal
    equations are a Sylvester equation for E.
    """
    inverse: Tensor = torch.linalg.inv(G)
    if 0 in (len(P_U), len(D_U)):
        return G, inverse
    sizes = [x.square().sum(0) for x in (P_U, P_V, D_U, D_V)]
    for _ in range(REFINEMENT_STEPS):
        P, D = P_U @ G, D_U @ inverse.mT
        weight_P = _weight(sizes[1] + sizes[0] @ G.square(), len(P))
        weight_D = _weight(sizes[3] + sizes[2] @ inverse.mT.square(), len(D))
        away = P - P_V, D - D_V
        cost = _cost(away, weight_P, weight_D)
        left, right = weight_D.rsqrt(), weight_P.rsqrt()
        a, X = torch.linalg.eigh(left[:, None] * (P.mT @ P) * left)
        b, Y = torch.linalg.eigh(right[:, None] * (D.mT @ D) * right)
        target = weight_D[:, None] * (away[1].mT @ D) - (P.mT @ away[0]) * weight_P
        scale = a[:, None] + b
        F = (X.mT @ (left[:, None] * target * right) @ Y) / scale
        F = torch.where(scale > 1e-14 * scale.abs().max(), F, 0.0)
        step = left[:, None] * (X @ F @ Y.mT) * right
        moved = G + G @ step
        if not bool(torch.isfinite(moved).all()):
            break
        undone, failed = torch.linalg.inv_ex(moved)
        new = _cost((P_U @ moved - P_V, D_U @ undone.mT - D_V), weight_P, weight_D)
        if int(failed) or not new < cost:
            break
        G, inverse = moved, undone
        if new > 0.999 * cost:
            break
    return G, inverse


def _weight(squares: Tensor, rows: int) -> Tensor:
    """Inverse expected squared error of an entry of each column, up to a common factor."""
    return rows / squares.clamp_min(1e-30 * float(squares.max().clamp_min(1e-200)))


def _cost(away: tuple[Tensor, Tensor], weight_P: Tensor, weight_D: Tensor) -> float:
    return float((away[0].square() * weight_P).sum() + (away[1].square() * weight_D).sum())


def _least_squares(A: Tensor, B: Tensor) -> Tensor:
    """``X`` with ``A X`` nearest to ``B``; A has full rank, so the fast driver suffices."""
    solution: Tensor = torch.linalg.lstsq(A, B, driver="gels").solution
    return solution


def _row_space(factor: Tensor, unit: float) -> tuple[Tensor, int]:
    """An orthogonal ``[n, n]`` whose first columns span the row space, and the rank."""
    n = factor.shape[-1]
    if factor.shape[0] == 0:
        return torch.eye(n, dtype=factor.dtype, device=factor.device), 0
    triangle = torch.linalg.qr(factor, mode="r").R
    _, values, vectors = torch.linalg.svd(triangle, full_matrices=True)
    # Four times the largest singular value expected of rounding errors alone.
    limit = float(values.norm()) * (factor.shape[0] ** -0.5 + n**-0.5) * unit * 4
    return vectors.T, int((values > limit).sum())


def _completed(core: Tensor, rows: int, columns: int) -> Tensor:
    """``core`` with its free corner filled by random directions at the scale of the rest.

    Random directions may be close to fixed ones, so the best conditioned of a few draws is taken.
    """
    n = core.shape[-1]
    shape = (n - rows, n - columns)
    if 0 in shape or not bool(torch.isfinite(core).all()):
        return core
    known = torch.linalg.matrix_norm(core, 2) if rows or columns else core.new_ones(())
    scale = known if float(known) > 0 else core.new_ones(())
    generator = torch.Generator().manual_seed(0)
    filled = []
    for _ in range(COMPLETION_DRAWS):
        noise = torch.randn(max(shape), max(shape), generator=generator, dtype=core.dtype)
        Q: Tensor = torch.linalg.qr(noise).Q
        whole = core.clone()
        whole[rows:, columns:] = scale * Q[: shape[0], : shape[1]].to(core.device)
        filled.append(whole)
    return min(filled, key=lambda whole: float(torch.linalg.cond(whole)))


class Orthogonal(MatrixAction):
    """O(n): plain and dual agree, so the product of any two tensors is invariant.

    >>> G = Orthogonal().draw(3, (), Drawing(torch.Generator().manual_seed(0)))
    >>> torch.allclose(G @ G.mT, torch.eye(3).double())
    True
    """

    word: ClassVar[str] = "orthogonal"
    self_dual: ClassVar[bool] = True

    def describe(self, size: int) -> str:
        return f"O({size})"

    def size(self, n: int) -> Size:
        return Size(n * (n - 1) // 2, LOG10_2)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        return orthogonal(count, size, how)

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        return orthogonal(count, size, how)

    def membership_error(self, matrix: Tensor) -> str | None:
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        near = torch.allclose(matrix @ matrix.mT, eye.expand_as(matrix), atol=1e-6)
        return None if near else "the matrix is not orthogonal, as the axis requires"

    def invert(self, part: Tensor) -> Tensor:
        return part.mT.contiguous()

    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """Orthogonal Procrustes on all rows."""
        first, second = (torch.cat(pair, -2) for pair in zip(plain, dual, strict=True))
        X, _, Yh = torch.linalg.svd(first.mT @ second)
        G = X @ Yh
        return Solution(G, G.mT.contiguous())

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """All rows ``X Σ Yᵀ`` as ``X Σ``, the largest entry of each column positive."""
        rows, n = torch.cat([plain, dual], -2), plain.shape[-1]
        if rows.shape[-2] == 0:
            return plain, dual
        X, values, _ = torch.linalg.svd(rows, full_matrices=False)
        turned = X * values.unsqueeze(-2)
        turned = pad(turned * column_signs(turned), (0, n - turned.shape[-1]))
        return turned[..., : plain.shape[-2], :], turned[..., plain.shape[-2] :, :]
