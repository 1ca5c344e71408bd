"""The matrices that LayerNorm does not notice (appendix B of the paper)."""

from __future__ import annotations

from collections.abc import Mapping

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


def turned_alike(
    U: Mapping[str, Tensor], V: Mapping[str, Tensor], *, tolerance: float = 0.01
) -> bool:
    """Whether the heads of two blocks agree up to matrices that LayerNorm does not notice.

    Such matrices, before and after the heads, leave the singular values of ``W_Q W_Kᵀ`` and
    ``W_V W_O`` without their means. Agreement proves nothing; without it no such matrices join
    the two.

    Args:
        U: one block, ``W_Q, W_K, W_V, W_O`` as ``[*lead, h, …]``.
        V: the other.
        tolerance: relative difference of the singular values.
    """
    first, second = _spectra(U), _spectra(V)
    return float((first - second).norm()) <= tolerance * float(first.norm())


def _spectra(weights: Mapping[str, Tensor]) -> Tensor:
    """Singular values of the two products of each head, ``[…, 2D]``, heads in a fixed order."""
    Q, K, V, O = (weights[f"W_{name}"].detach().double() for name in "QKVO")  # noqa: E741
    Q, K, V = (x - x.mean(-2, keepdim=True) for x in (Q, K, V))
    O = O - O.mean(-1, keepdim=True)  # noqa: E741
    values = torch.cat([torch.linalg.svdvals(x) for x in (Q @ K.mT, V @ O)], -1).flatten(0, -2)
    return values[values[:, 0].argsort()]
