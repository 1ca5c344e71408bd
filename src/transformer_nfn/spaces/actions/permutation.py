"""Permutations of an axis: plain, or one for each index of the axes it belongs to."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.spaces.actions.base import Action, Drawing, Place, Pointwise, Solution
from transformer_nfn.spaces.actions.matching import match_rows
from transformer_nfn.spaces.actions.sites import line_up, spread


class Permutation(Action):
    """All permutations; an element is the indices gathered, ``(gx)_i = x_π(i)``, ``[*sites, n]``.

    On an axis that belongs to another one there is a permutation for each index of the owner
    (queries within a key/value group: with the owner's own permutation the wreath product).
    """

    word: ClassVar[str] = "perm"
    permutes: ClassVar[bool] = True

    def describe(self, size: int) -> str:
        """``permutations of 8``."""
        return f"permutations of {size}"

    def dimension(self, size: int) -> int:
        """The group is discrete."""
        return 0

    def log10_order(self, size: int) -> float:
        """log10 of n!."""
        return math.lgamma(size + 1) / math.log(10)

    def identity(
        self,
        size: int,
        sites: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> Tensor:
        """``0, 1, …, n − 1``, whatever the dtype of matrices."""
        return torch.arange(size, device=device).expand(*sites, size).contiguous()

    def draw(self, size: int, sites: tuple[int, ...], how: Drawing) -> Tensor:
        """Uniform over all permutations."""
        noise = torch.rand((*sites, size), generator=how.generator, device=how.device)
        return noise.argsort(-1)

    def refuse(self, part: Tensor, max_condition: float | None) -> str | None:
        """Every row must hold every index once."""
        expected = self.identity(part.shape[-1], tuple(part.shape[:-1]), part.dtype, part.device)
        same = torch.equal(part.sort(-1).values, expected)
        return None if same else "some row is not a permutation"

    def invert(self, part: Tensor) -> Tensor:
        """``π⁻¹``."""
        return torch.argsort(part, dim=-1)

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """``π_first[π_then]``."""
        return torch.gather(first, -1, then)

    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        """``x[…, π, …]``."""
        dim = place.dim
        if not place.sites:
            return x.index_select(dim, part)
        x = spread(x, part, place)
        n = x.shape[dim]
        if place.sites == (0,) and all(size == 1 for size in x.shape[1:dim]):
            # Whole rows move: one index_select over the flattened batch copies them contiguously.
            start = torch.arange(0, x.shape[0] * n, n, device=x.device).unsqueeze(1)
            rows = x.reshape(x.shape[0] * n, -1)
            return rows.index_select(0, (start + part).view(-1)).view(x.shape)
        index = line_up(part, (*place.sites, dim), x.ndim)
        return torch.gather(x, dim, index.expand(x.shape))

    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """The permutation of columns that brings the first rows nearest to the second."""
        x, y = (torch.cat(pair, -2).mT for pair in zip(plain, dual, strict=True))
        sites, n = x.shape[:-2], x.shape[-2]
        matched = [
            match_rows(target, source)
            for source, target in zip(
                x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:]), strict=True
            )
        ]
        index = torch.stack([m.index for m in matched]).reshape(*sites, n)
        return Solution(index, self.invert(index), all(m.certain for m in matched))

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """Columns in falling order of a fixed linear key."""
        index = self.order([plain, dual]).unsqueeze(-2)
        return plain.take_along_dim(index, -1), dual.take_along_dim(index, -1)

    def order(self, rows: list[Tensor]) -> Tensor:
        """The permutation that `balance` uses, from tables ``[*sites, rows, n]`` of one ``n``."""
        keys = [
            _key(table) @ (table / table.norm().clamp_min(1e-300))
            for table in rows
            if table.shape[-2]
        ]
        if not keys:
            table = rows[0]
            return self.identity(
                table.shape[-1], tuple(table.shape[:-2]), torch.long, table.device
            )
        return torch.stack(keys).sum(0).argsort(-1, descending=True)

    def commutes_with(self, fn: Pointwise) -> bool:
        """Every pointwise function does."""
        return True


def _key(table: Tensor) -> Tensor:
    """Fixed pseudo-random weights ``[rows]``, the same on every machine."""
    rows = table.shape[-2]
    noise = np.random.RandomState(rows % 2**32).standard_normal(rows)
    return torch.as_tensor(noise, dtype=table.dtype, device=table.device)
