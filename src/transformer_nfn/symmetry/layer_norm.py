"""The matrices that LayerNorm does not notice (appendix B of the paper)."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError


def hyperplane(
    D: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> Tensor:
    """An orthonormal basis of the vectors across the ones vector, ``[D, D−1]``."""
    basis = torch.eye(D, dtype=dtype, device=device)
    basis[:, 0] = 1.0
    Q: Tensor = torch.linalg.qr(basis).Q
    return Q[:, 1:]


def random_commuting(
    D: int,
    *,
    generator: torch.Generator | None = None,
    sign: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    r"""A random matrix that commutes with both halves of LayerNorm: projection and scaling.

    These are the orthogonal matrices whose rows and columns all have one sum, which is then ±1
    (the appendix's first theorem). They are ``Q diag(±1, X) Qᵀ`` with X orthogonal of size D−1
    and the first column of Q equal to ``1/√D`` (the paper's remark leaves the conjugation by Q
    out).
    ``LayerNorm(x M) = LayerNorm(x) M`` for every such M.

    Args:
        D: the size.
        generator: where the randomness comes from.
        sign: the common row sum, +1 or −1; drawn if not given.
        dtype: of the result.
    """
    if D < 1:
        raise GroupError(f"D must be positive, found {D}")
    if sign not in (None, 1, -1):
        raise GroupError(f"sign must be 1, -1 or None, found {sign}")
    if sign is None:
        sign = 1 if torch.rand((), generator=generator) < 0.5 else -1
    ones = torch.full((D, D), sign / D, dtype=torch.float64)
    if D == 1:
        return ones.to(dtype)
    noise = torch.randn(D - 1, D - 1, generator=generator, dtype=torch.float64)
    X, triangle = torch.linalg.qr(noise)
    X = X * triangle.diagonal().sign()  # uniform over the orthogonal group
    H = hyperplane(D)
    M: Tensor = ones + H @ X @ H.T
    return M.to(dtype)
