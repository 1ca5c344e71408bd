"""Vectors of a stream that every disguise shares: sums over the vocabulary.

Whatever acts on the stream acts on the embedding of every token alike, so a sum of embeddings with
fixed signs moves along with the stream, `Σ ±(t R) = (Σ ±t) R`: it names the same direction in each
disguise of a model, and nearly the same in models made from it. A few strong directions would
dominate such sums; the polar factor of all of them weighs every direction alike, and moves along
just as well.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.reduced import Reduced
from transformer_nfn.checkpoints.stream import ROWS, shifted
from transformer_nfn.errors import SpaceError
from transformer_nfn.symmetry.sketch import directions

PROBES = 256
"""Vectors of a frame."""
RIDGE = 0.1
"""Directions weaker than this share of the mean one are not brought up to its strength: they are
as much rounding as embedding."""


@dataclass(frozen=True)
class Frame:
    """Vectors of one model's stream that all its disguises share.

    Attributes:
        vectors: ``[PROBES, D]``, each as long as what a norm gives, √D.
        made_of: the table they are sums of: ``token``, ``patch``, ``head``; ``fixed`` where
            nothing acts on the stream.
        rows: of that table that they are sums of.
        error: expected square of the relative rounding error of a vector.
    """

    vectors: Tensor
    made_of: str
    rows: int
    error: float


def rows_used(count: int) -> int:
    """The first 2ⁿ or 3·2ⁿ rows: a vocabulary that grew by a few tokens keeps its frame."""
    power: int = 1 << (count.bit_length() - 1)
    return power + power // 2 if count >= power + power // 2 else power


def draw_frame(model: Reduced) -> Frame:
    """The frame of a model."""
    name = next((n for n in ("token", "patch", "head") if n in model.table_names()), None)
    D = model.about.width
    if name is None or model.about.inputs == "vectors":
        fixed = directions("print fixed", PROBES, D, torch.zeros(0, dtype=torch.float64))
        return Frame(_as_after_norm(fixed, model), "fixed", 0, 0.0)
    (table,) = model.tables((name,))
    used = rows_used(len(table))
    sums = torch.zeros(PROBES, D, dtype=torch.float64)
    mean, signs_sum = torch.zeros(D, dtype=torch.float64), torch.zeros(PROBES, dtype=torch.float64)
    error = 0.0
    for start in range(0, used, ROWS):
        rows = table.rows(start, min(start + ROWS, used))
        drawn = signs("rows", start, len(rows.value), PROBES).to(rows.value)
        sums += (drawn @ rows.value).double()
        mean += rows.value.sum(0).double() / used
        signs_sum += drawn.sum(1).double()
        error += float(rows.error.sum())
    if not bool(torch.isfinite(sums).all()):
        raise SpaceError(f"'{model.model.where}': '{name}' has numbers whose sums overflow")
    if shifted(model, name):  # a vector may move between the rows and what is added to them
        sums -= torch.outer(signs_sum, mean)
    even, moved = _even(sums, error)
    return Frame(_as_after_norm(even, model), name, used, moved)


def signs(key: str, start: int, count: int, rows: int) -> Tensor:
    """Signs of the rows of a table, ``[rows, count]``; those of a row whatever comes after it.

    Args:
        key: of the table.
        start: first of the rows; a multiple of ``ROWS``.
        count: how many of them.
        rows: how many signs each has; a multiple of 8.
    """
    state = np.random.RandomState(zlib.crc32(f"print {key} {start}".encode()))
    bits = np.frombuffer(state.bytes(rows // 8 * ROWS), dtype=np.uint8).reshape(ROWS, -1)
    return torch.as_tensor(np.unpackbits(bits[:count], axis=1).T.copy()).float() * 2 - 1


def _even(sums: Tensor, error: float) -> tuple[Tensor, float]:
    """The polar factor, weak directions left weak, and its expected relative square error.

    Args:
        sums: ``[PROBES, D]``.
        error: expected square of the rounding error of one of them.
    """
    U, S, Vh = torch.linalg.svd(sums, full_matrices=False)
    size = S.square().mean().clamp_min(1e-300)
    damped = S.square() + RIDGE**2 * size
    even: Tensor = U * (S / damped.sqrt()) @ Vh
    noise = error * len(sums) / sums.shape[1] * (1 / damped).sum()
    return even, float(noise / (S.square() / damped).sum().clamp_min(1e-300))


def _as_after_norm(vectors: Tensor, model: Reduced) -> Tensor:
    if model.centred:
        vectors = vectors - vectors.mean(-1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(1e-300)
    scaled: Tensor = vectors * model.about.width**0.5 / length
    return scaled.to(model.dtype)
