"""All invertible matrices: what may re-base the query/key and value/output spaces of a head."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from transformer_nfn.spaces.actions.base import Drawing, Solution
from transformer_nfn.spaces.actions.matrix import MatrixAction, geometric, normal, orthogonal
from transformer_nfn.spaces.actions.solvers import exact_matrix


class Linear(MatrixAction):
    """GL(n): ``Q → Q G`` and ``K → K G⁻ᵀ`` with any invertible G (M and N of the paper)."""

    word: ClassVar[str] = "linear"

    def misfit(self, name: str, size: int, of: str | None) -> str | None:
        """A linear axis belongs to the axis that counts its matrices."""
        if of is None:
            return f"linear axis '{name}' must say which perm axis it belongs to"
        return None

    def describe(self, size: int) -> str:
        """``GL(16)``."""
        return f"GL({size})"

    def dimension(self, size: int) -> int:
        """n²."""
        return size**2

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """Independent entries."""
        return normal((count, size, size), how)

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """``X diag(s) Y`` with X and Y uniform and s geometric."""
        left, right = orthogonal(count, size, how), orthogonal(count, size, how)
        return left * geometric(count, size, how, condition).unsqueeze(-2) @ right

    def belongs(self, matrix: Tensor) -> str | None:
        """Every invertible matrix does."""
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
    """±1 for each column, ``[*sites, 1, n]``: what makes its largest entry positive."""
    top = rows.abs().argmax(-2, keepdim=True)
    return torch.where(rows.gather(-2, top) < 0, -1.0, 1.0).to(rows.dtype)
