"""Do two checkpoints hold the same bytes? Then nothing else needs to be asked, in any dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformer_nfn.architectures.families import Model


def equal_bytes(A: Model, B: Model) -> bool:
    """Whether both describe one architecture, and every tensor is equal bit by bit."""
    if A.about != B.about or dict(A.names) != dict(B.names):
        return False
    for name in A.names:
        a, b = A[name], B[name]
        if a.dtype != b.dtype or not torch.equal(a, b):
            return False
    return True
