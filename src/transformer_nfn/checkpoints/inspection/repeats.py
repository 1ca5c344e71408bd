"""Which heads and neurons of a block do nothing, and which do the same?

Dead: what a head or neuron writes is at most `DEAD` of the median in its block. Duplicated: two
read and write in the same directions up to a cosine of `DUPLICATE`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEAD = 1e-3
"""Size of `V O`, or of a neuron's reading times its writing, in units of the block's median."""
DUPLICATE = 0.99
"""Cosine of both `Q Kᵀ` and `V O` of two heads; of what two neurons read, bias included."""
CHUNK = 2048


@dataclass(frozen=True)
class Repeats:
    """Indices of dead ones, and pairs that are alike.

    Attributes:
        dead: indices.
        pairs: ``(i, j, cosine)`` with i < j.
    """

    dead: tuple[int, ...]
    pairs: tuple[tuple[int, int, float], ...]


def head_repeats(
    QK: tuple[Tensor, Tensor], VO: tuple[Tensor, Tensor], VO_spectrum: Tensor
) -> Repeats:
    """Of an attention: ``(Q, K)`` and ``(V, Oᵀ)``, each ``[heads, D, d]``."""
    dead = _dead(VO_spectrum.double().norm(dim=-1))
    alike = torch.minimum(_product_cosines(*QK), _product_cosines(*VO))
    pairs = _pairs(alike, 0, set(dead))
    return Repeats(dead, tuple(pairs))


def _product_cosines(left: Tensor, right: Tensor) -> Tensor:
    """Cosines of ``L_i R_iᵀ`` and ``L_j R_jᵀ`` for all heads, from d × d products."""
    h, _, d = left.shape
    share = h // len(right)

    def products(x: Tensor) -> Tensor:
        flat = x.transpose(0, 1).flatten(1)
        cross = (flat.mT @ flat).reshape(len(x), d, len(x), d).permute(0, 2, 1, 3)
        if len(x) < h:
            cross = cross.repeat_interleave(share, 0).repeat_interleave(share, 1)
        return cross

    inner = (products(left).double() * products(right)).sum((-2, -1))
    size = inner.diagonal().clamp_min(1e-300).sqrt()
    cosines: Tensor = inner / size / size.unsqueeze(-1)
    return cosines


def neuron_repeats(read: Tensor, write: Tensor, *, scale_free: bool) -> Repeats:
    """Of an MLP.

    Args:
        read: ``[f, n]``: everything that decides how active a neuron is, bias and gate included.
        write: ``[f, D]``.
        scale_free: two neurons that read the same up to scale are alike (ReLU); else their sizes
            have to agree within 1 % too.
    """
    sizes = read.double().norm(dim=1)
    dead = _dead(sizes * write.double().norm(dim=1))
    unit = read / sizes.to(read).clamp_min(1e-30).unsqueeze(-1)
    gone, pairs = set(dead), []
    for start in range(0, len(unit), CHUNK):
        alike = unit[start : start + CHUNK] @ unit.mT
        pairs += _pairs(alike, start, gone)
    if not scale_free:
        pairs = [(i, j, c) for i, j, c in pairs if abs(float(sizes[i] / sizes[j]) - 1) <= 0.01]
    return Repeats(dead, tuple(pairs))


def _dead(sizes: Tensor) -> tuple[int, ...]:
    limit = DEAD * float(sizes.median())
    return tuple(int(i) for i in (sizes <= limit).nonzero().flatten())


def _pairs(alike: Tensor, start: int, gone: set[int]) -> list[tuple[int, int, float]]:
    rows, columns = (alike >= DUPLICATE).nonzero(as_tuple=True)
    found = []
    for i, j in zip((rows + start).tolist(), columns.tolist(), strict=True):
        if i < j and i not in gone and j not in gone:
            found.append((i, j, min(float(alike[i - start, j]), 1.0)))
    return found
