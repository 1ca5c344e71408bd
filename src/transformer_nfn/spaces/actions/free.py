"""No symmetry at all: an axis whose entries stand where they stand."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from transformer_nfn.spaces.actions.base import Action, Drawing, Place, Pointwise, Solution


class Free(Action):
    """Nothing acts; the only element is the identity, which holds no numbers."""

    word: ClassVar[str] = "free"

    def misfit(self, name: str, size: int, of: str | None) -> str | None:
        """A free axis has no owner."""
        return f"free axis '{name}' cannot belong to another axis" if of is not None else None

    def describe(self, size: int) -> str:
        """Nothing."""
        return "nothing"

    def dimension(self, size: int) -> int:
        """None."""
        return 0

    def identity(
        self,
        size: int,
        sites: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> Tensor:
        """No numbers, ``[*sites, 0]``."""
        return torch.empty(*sites, 0, dtype=dtype, device=device)

    def draw(self, size: int, sites: tuple[int, ...], how: Drawing) -> Tensor:
        """The identity."""
        return self.identity(size, sites, torch.float64, how.device)

    def refuse(self, part: Tensor, max_condition: float | None) -> str | None:
        """There is nothing to refuse."""
        return None

    def invert(self, part: Tensor) -> Tensor:
        """Itself."""
        return part

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """Either of them."""
        return first

    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        """``x`` as it is."""
        return x

    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """The identity."""
        part = plain[0].new_empty(*plain[0].shape[:-2], 0)
        return Solution(part, part)

    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """The rows as they are."""
        return plain, dual

    def commutes_with(self, fn: Pointwise) -> bool:
        """Everything does."""
        return True
