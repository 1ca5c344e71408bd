"""Invertible matrices and orthogonal matrices."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from transformer_nfn.spaces.actions.base import LOG10_2, Drawing, Size, Solution
from transformer_nfn.spaces.actions.matrix import MatrixAction, geometric, normal, orthogonal
from transformer_nfn.spaces.actions.solvers import exact_matrix, polar


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
        """``P_V = P_U G`` and ``D_V = D_U G⁻ᵀ`` at every site, by `exact_matrix`."""
        sites, n = plain[0].shape[:-2], plain[0].shape[-1]
        flat = [f.reshape(sites.numel(), *f.shape[-2:]) for f in (*plain, *dual)]
        pairs = []
        for i in range(sites.numel()):
            pair = exact_matrix(*(f[i] for f in flat), unit=unit)
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
        G = polar(first.mT @ second)
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
