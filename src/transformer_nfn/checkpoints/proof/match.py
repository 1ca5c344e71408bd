"""How are two blocks compared tensor by tensor? In one basis of the stream, noting each check."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from transformer_nfn.checkpoints.proof.checks import Check, check
from transformer_nfn.checkpoints.reduced import Piece, ReducedBlock
from transformer_nfn.checkpoints.stream import StreamMap


@dataclass
class BlockMatch:
    """Two blocks in one basis of the stream, being compared."""

    a: ReducedBlock
    b: ReducedBlock
    stream: StreamMap
    checks: list[Check] = field(default_factory=list)

    def add(
        self,
        name: str,
        away: Tensor,
        error: Tensor,
        size: Tensor,
        entries: int,
        felt: Tensor | None = None,
    ) -> None:
        """One more tensor; see `check`."""
        self.checks.append(check(f"{self.a.name}.{name}", away, error, size, entries, felt=felt))

    def vector(self, name: str, a: Piece | None, b: Piece | None, *, gain: bool = False) -> None:
        """A vector of the stream. Gains are permuted with it, but take no sign."""
        if a is None and b is None:
            return
        one = a or b
        assert one is not None
        zero = Piece(torch.zeros_like(one.value), torch.zeros_like(one.error))
        a, b = a or zero, b or zero
        moved = a.value
        if not gain:
            moved = self.stream(moved)
        elif self.stream.index is not None:
            moved = moved[self.stream.index]
        away = (moved - b.value).square().sum()
        size = torch.maximum(moved.square().sum(), b.value.square().sum())
        self.checks.append(
            check(f"{self.a.name}.{name}", away, a.error + b.error, size, 1, sites=False)
        )
