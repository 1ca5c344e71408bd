"""Spectra of the maps of a block, and its dead and duplicate heads and neurons.

Spectra are the same for every disguise of a network: norms are folded in, and a change of basis
alters neither `Q Kᵀ` nor `V O`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.attention import product_inner

LARGE = 1e12
"""Weights beyond this are scaled down before they are squared."""
DEAD = 1e-3
"""Size of `V O`, or of a neuron's input weights times its output weights, relative to the median
of the block, up to which a unit is dead."""
DUPLICATE = 0.99
"""Cosine of both `Q Kᵀ` and `V O` of two heads, or of the input weights of two neurons, from which
on they are duplicates."""
CHUNK = 2048


@dataclass(frozen=True)
class Redundancy:
    """Dead and duplicate units of a layer.

    Attributes:
        dead: indices of units whose output is negligible.
        duplicates: ``(i, j, cosine)`` with i < j.
    """

    dead: tuple[int, ...]
    duplicates: tuple[tuple[int, int, float], ...]


def product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of ``left · rightᵀ`` per head, largest first, ``[h, d]``.

    Args:
        left: ``[h, D, d]``.
        right: ``[h, D, d]``, or one for several heads, ``[g, D, d]``.

    Example:
        >>> x = torch.eye(3)[None, :, :2]
        >>> product_spectrum(2 * x, x).tolist()
        [[2.0, 2.0]]
    """
    share = len(left) // len(right)
    triangles = [torch.linalg.qr(x, mode="r").R for x in (left, right)]
    values: Tensor = torch.linalg.svdvals(
        triangles[0] @ triangles[1].repeat_interleave(share, dim=0).mT
    )
    return values


def matrix_spectrum(W: Tensor) -> Tensor:
    """Singular values of ``W [m, n]``, largest first, from the smaller Gram matrix.

    Of float32 weights, values below 3e-4 of the largest cannot be distinguished from zero.

    Example:
        >>> matrix_spectrum(torch.tensor([[3.0, 0.0], [0.0, 4.0]])).tolist()
        [4.0, 3.0]
    """
    if W.shape[0] > W.shape[1]:
        W = W.mT
    # Squares of large weights overflow float32; a power of two changes no digit.
    size = float(W.abs().amax()) if W.numel() else 0.0
    scale = 2.0 ** math.frexp(size)[1] if size > LARGE else 1.0
    W = W / scale
    gram = torch.zeros(len(W), len(W), dtype=torch.float64)
    for part in W.split(1024, dim=1):
        gram += (part @ part.mT).double()
    values: Tensor = torch.linalg.eigvalsh(gram).flip(0)
    return values.clamp_min(0).sqrt() * scale


def stable_rank(values: Tensor) -> Tensor:
    """``‖W‖²_F / ‖W‖²₂`` from singular values ``[…, d]``; 0 for a map that is zero.

    Example:
        >>> float(stable_rank(torch.tensor([2.0, 1.0])))
        1.25
    """
    top = values.amax(-1).square()
    return torch.where(top > 0, values.square().sum(-1) / top.clamp_min(1e-300), 0.0)


def redundant_heads(
    QK: tuple[Tensor, Tensor], VO: tuple[Tensor, Tensor], VO_spectrum: Tensor
) -> Redundancy:
    """Dead and duplicate heads of an attention.

    Args:
        QK: queries and keys, ``[heads or groups, D, d]`` each.
        VO: outputs (transposed) and values, likewise.
        VO_spectrum: singular values of their product, ``[heads, d]``.
    """
    dead = _dead(VO_spectrum.double().norm(dim=-1))
    cosines = torch.minimum(_product_cosines(*QK), _product_cosines(*VO))
    return Redundancy(dead, tuple(_duplicates(cosines, 0, set(dead))))


def _product_cosines(left: Tensor, right: Tensor) -> Tensor:
    """Cosines of ``L_i R_iᵀ`` and ``L_j R_jᵀ`` for all heads, from d × d products."""
    inner = product_inner(left, left, right, right)
    size = inner.diagonal().clamp_min(1e-300).sqrt()
    cosines: Tensor = inner / size / size.unsqueeze(-1)
    return cosines


def redundant_neurons(read: Tensor, write: Tensor, *, scale_free: bool) -> Redundancy:
    """Dead and duplicate neurons of an MLP.

    Args:
        read: ``[f, n]``: everything that determines how active a neuron is, bias and gate
            included.
        write: ``[f, D]``.
        scale_free: neurons with parallel input weights are duplicates (ReLU); else their sizes
            have to agree within 1 % too.

    Example:
        >>> read = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
        >>> redundant_neurons(read, torch.ones(3, 1), scale_free=True).duplicates
        ((0, 2, 1.0),)
    """
    sizes = read.double().norm(dim=1)
    dead = _dead(sizes * write.double().norm(dim=1))
    unit = read / sizes.to(read).clamp_min(1e-30).unsqueeze(-1)
    pairs = []
    for start in range(0, len(unit), CHUNK):
        pairs += _duplicates(unit[start : start + CHUNK] @ unit.mT, start, set(dead))
    if not scale_free:
        pairs = [(i, j, c) for i, j, c in pairs if abs(float(sizes[i] / sizes[j]) - 1) <= 0.01]
    return Redundancy(dead, tuple(pairs))


def _dead(sizes: Tensor) -> tuple[int, ...]:
    limit = DEAD * float(sizes.median())
    return tuple(int(i) for i in (sizes <= limit).nonzero().flatten())


def _duplicates(cosines: Tensor, start: int, dead: set[int]) -> list[tuple[int, int, float]]:
    rows, columns = (cosines >= DUPLICATE).nonzero(as_tuple=True)
    pairs = []
    for i, j in zip((rows + start).tolist(), columns.tolist(), strict=True):
        if i < j and i not in dead and j not in dead:
            pairs.append((i, j, min(float(cosines[i - start, j]), 1.0)))
    return pairs
