"""Scales of single entries: any nonzero number, a positive one, or a sign."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from transformer_nfn.spaces.actions.base import Drawing, Pieces, Pointwise, Solution
from transformer_nfn.spaces.actions.linear import column_signs
from transformer_nfn.spaces.actions.matrix import MatrixAction, geometric, normal
from transformer_nfn.spaces.actions.pointwise import is_odd, is_positively_homogeneous


class Diagonal(MatrixAction):
    """Diagonal matrices: every entry of the axis is scaled on its own."""

    @abstractmethod
    def nearest(self, scales: Tensor) -> Tensor:
        """The scales of the group nearest to given ones (0 where there is none near)."""

    def dimension(self, size: int) -> int:
        """One for each entry."""
        return size

    def pieces(self, size: int) -> Pieces:
        """Every entry by itself."""
        return Pieces(size, 1, 1)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """Independent numbers, brought into the group."""
        return torch.diag_embed(self.nearest(normal((count, size), how)))

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """Absolute values geometric, signs as the group has them."""
        noise = normal((count, size), how)
        signs = torch.where(noise < 0, -1.0, 1.0)
        return torch.diag_embed(self.nearest(geometric(count, size, how, condition) * signs))

    def belongs(self, matrix: Tensor) -> str | None:
        """The matrix must be diagonal, with scales of the group."""
        scales = matrix.diagonal(dim1=-2, dim2=-1)
        if not torch.equal(matrix, torch.diag_embed(scales)):
            return "the axis takes scales, and the matrix given is not diagonal"
        if not torch.allclose(scales, self.nearest(scales), rtol=1e-9):
            return f"the axis takes {self.describe(matrix.shape[-1])}, found other numbers"
        return None

    def invert(self, part: Tensor) -> Tensor:
        """``1 / s``."""
        return torch.diag_embed(1 / part.diagonal(dim1=-2, dim2=-1))

    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """By least squares: ``p_V = s p_U``, or else ``d_U = s d_V``; then into the group."""
        p_U, p_V, d_U, d_V = (*plain, *dual)
        by_p = (p_U * p_V).sum(-2) / p_U.square().sum(-2)
        by_d = (d_V * d_U).sum(-2) / d_V.square().sum(-2)
        s = torch.where(torch.isfinite(by_p) & (by_p != 0), by_p, by_d)
        s = torch.where(torch.isfinite(s), s, torch.ones_like(s))
        s = self.nearest(s)
        if bool((s == 0).any()):
            return None
        return Solution(torch.diag_embed(s), torch.diag_embed(1 / s))

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """Both factors of each entry at one norm."""
        p_norm, d_norm = (x.square().sum(-2, keepdim=True).sqrt() for x in (plain, dual))
        dead = (p_norm == 0) | (d_norm == 0)
        scale = torch.where(dead, 0.0, (d_norm / p_norm.clamp_min(1e-300)).sqrt())
        inverse = torch.where(dead, 0.0, 1 / scale.clamp_min(1e-300))
        return plain * scale, dual * inverse


class Scale(Diagonal):
    """Any nonzero number for each entry: up against down of a gated MLP."""

    word: ClassVar[str] = "scale"

    def describe(self, size: int) -> str:
        """``4 nonzero scales``."""
        return f"{size} nonzero scale{'s' * (size > 1)}"

    def nearest(self, scales: Tensor) -> Tensor:
        """All of them."""
        return scales

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """Both factors of each entry at one norm, the largest plain entry positive."""
        plain, dual = super().balance(plain, dual)
        if plain.shape[-2] == 0:
            return plain, dual
        sign = column_signs(plain)
        return plain * sign, dual * sign


class PositiveScale(Diagonal):
    """A positive number for each entry: what a ReLU neuron does not notice.

    Products do not see whether both factors changed their sign, so they are not all there is
    to know: `separating` is False.
    """

    word: ClassVar[str] = "positive"
    separating: ClassVar[bool] = False

    def describe(self, size: int) -> str:
        """``4 positive scales``."""
        return f"{size} positive scale{'s' * (size > 1)}"

    def nearest(self, scales: Tensor) -> Tensor:
        """Negative ones have no neighbour."""
        return scales.clamp_min(0)

    def sample(self, count: int, size: int, how: Drawing) -> Tensor:
        """``exp`` of a normal number, or absolute values where entries are prescribed."""
        x = normal((count, size), how)
        return torch.diag_embed(x.exp() if how.entries is None else x.abs())

    def sample_conditioned(self, count: int, size: int, how: Drawing, condition: float) -> Tensor:
        """Geometric."""
        return torch.diag_embed(geometric(count, size, how, condition))

    def reads_through(self, size: int) -> bool:
        """Never: an activation may act on the tensors that carry the axis."""
        return False

    def commutes_with(self, fn: Pointwise) -> bool:
        """ReLU and its like do."""
        return is_positively_homogeneous(fn)


class Sign(Diagonal):
    """+1 or −1 for each entry."""

    word: ClassVar[str] = "sign"
    self_dual: ClassVar[bool] = True

    def describe(self, size: int) -> str:
        """``4 signs``."""
        return f"{size} sign{'s' * (size > 1)}"

    def dimension(self, size: int) -> int:
        """The group is discrete."""
        return 0

    def log10_order(self, size: int) -> float:
        """log10 of 2ⁿ."""
        return size * math.log10(2)

    def nearest(self, scales: Tensor) -> Tensor:
        """Their signs."""
        return torch.where(scales < 0, -1.0, 1.0).to(scales.dtype)

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """The largest entry of each column positive."""
        rows = torch.cat([plain, dual], -2)
        sign = column_signs(rows) if rows.shape[-2] else 1.0
        return plain * sign, dual * sign

    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """The sign of the scalar product of all rows."""
        first, second = (torch.cat(pair, -2) for pair in zip(plain, dual, strict=True))
        s = torch.diag_embed(self.nearest((first * second).sum(-2)))
        return Solution(s, s)

    def commutes_with(self, fn: Pointwise) -> bool:
        """Odd functions do."""
        return is_odd(fn)
