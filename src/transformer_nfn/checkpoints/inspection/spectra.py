"""Which singular values have the maps of a block? Products of a head stay factored.

All of these are the same for every disguise of a network: norms are folded in, and a re-basing of
a head changes neither `Q Kᵀ` nor `V O`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGE = 1e12
"""Weights beyond this are scaled down before they are squared."""


def product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of ``left · rightᵀ`` per head, largest first, ``[h, d]``.

    Args:
        left: ``[h, D, d]``.
        right: ``[h, D, d]``, or one for several heads, ``[g, D, d]``.
    """
    share = len(left) // len(right)
    triangles = [torch.linalg.qr(x, mode="r").R for x in (left, right)]
    values: Tensor = torch.linalg.svdvals(
        triangles[0] @ triangles[1].repeat_interleave(share, dim=0).mT
    )
    return values


def matrix_spectrum(W: Tensor) -> Tensor:
    """Singular values of ``W [m, n]``, largest first, from the smaller Gram matrix.

    For float32 weights, values below 3e-4 of the largest are not told apart from zero.
    """
    if W.shape[0] > W.shape[1]:
        W = W.mT
    # Squares of large weights leave float32; a power of two changes no digit.
    size = float(W.abs().amax()) if W.numel() else 0.0
    scale = 2.0 ** math.frexp(size)[1] if size > LARGE else 1.0
    W = W / scale
    gram = torch.zeros(len(W), len(W), dtype=torch.float64)
    for part in W.split(1024, dim=1):
        gram += (part @ part.mT).double()
    values: Tensor = torch.linalg.eigvalsh(gram).flip(0)
    return values.clamp_min(0).sqrt() * scale


def stable_rank(values: Tensor) -> Tensor:
    """``‖W‖²_F / ‖W‖²₂`` from singular values ``[…, d]``; 0 for a map that is zero."""
    top = values.amax(-1).square()
    return torch.where(top > 0, values.square().sum(-1) / top.clamp_min(1e-300), 0.0)
