"""Checkpoints that hold the same numbers, as they are or rounded to another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformer_nfn.architectures.families import Model


def equal_weights(A: Model, B: Model) -> str | None:
    """How the tensors of two models of one architecture agree without any disguise.

    Returns:
        One sentence if every tensor is equal bit by bit, or all of one model are those of the other
        rounded to their dtypes; else None.
    """
    if A.about != B.about or dict(A.names) != dict(B.names):
        return None
    copy = original = True
    rounded: set[torch.dtype] = set()
    for name in A.names:
        a, b = A[name], B[name]
        if a.dtype == b.dtype and torch.equal(a, b):
            continue
        if a.dtype == b.dtype:
            return None
        rounded |= {min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)}
        copy, original = copy and _is_rounded(a, b), original and _is_rounded(b, a)
        if not copy and not original:
            return None
    if not rounded:
        return "both hold the same bytes"
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in rounded))
    return f"{'B' if copy else 'A'} holds the numbers of the other rounded to {dtypes}"


def _is_rounded(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` is ``a`` in another dtype, in which nothing of size was lost to underflow."""
    if not torch.equal(a.to(b.dtype), b):
        return False
    away = (a.double() - b.double()).norm()
    return bool(away <= torch.finfo(b.dtype).eps * a.double().norm())
