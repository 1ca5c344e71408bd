"""Orthogonal matrices: what may turn a stream between norms whose gains are folded away."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from transformer_nfn.spaces.actions.base import Drawing, Solution
from transformer_nfn.spaces.actions.linear import column_signs
from transformer_nfn.spaces.actions.matrix import MatrixAction, orthogonal
from transformer_nfn.spaces.actions.solvers import polar


class Orthogonal(MatrixAction):
    """O(n): plain and dual are the same, so the products of any two tensors are invariant."""

    word: ClassVar[str] = "orthogonal"
    self_dual: ClassVar[bool] = True

    def describe(self, size: int) -> str:
        """``O(64)``."""
        return f"O({size})"

    def dimension(self, size: int) -> int:
        """n(n − 1)/2."""
        return size * (size - 1) // 2

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """Uniform over the group."""
        return orthogonal(count, size, how)

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """The same: every orthogonal matrix has condition 1."""
        return orthogonal(count, size, how)

    def belongs(self, matrix: Tensor) -> str | None:
        """``G Gᵀ = 1``."""
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        near = torch.allclose(matrix @ matrix.mT, eye.expand_as(matrix), atol=1e-6)
        return None if near else "the axis takes orthogonal matrices, and the one given is none"

    def invert(self, part: Tensor) -> Tensor:
        """``Gᵀ``."""
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
