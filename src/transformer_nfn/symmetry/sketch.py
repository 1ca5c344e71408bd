"""Fixed pseudo-random projections: what keeps a large product small without forming it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def directions(key: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """Fixed directions ``[rows, columns]`` of unit scale, the same on every machine."""
    state = np.random.RandomState(zlib.crc32(key.encode()))
    noise = state.standard_normal((rows, columns))
    return torch.as_tensor(noise, dtype=like.dtype, device=like.device)


def sketch(x: Tensor, dims: Sequence[int], columns: int, key: str) -> Tensor:
    """``x`` with the axes ``dims`` contracted to one last axis of ``columns`` numbers.

    Number r is the scalar product with ``u_r ⊗ v_r ⊗ …``, one fixed vector for each axis, so the
    sketch of a product of two factors needs the sketch of each factor alone. Without ``dims``
    the last axis has size 1.
    """
    if not dims:
        return x.unsqueeze(-1)
    vectors = {d: directions(f"{key} {i}", x.shape[d], columns, x) for i, d in enumerate(dims)}
    # The longest axis goes first, by a matrix product: what is left is small.
    order = sorted(dims, key=lambda d: x.shape[d])
    x = x.movedim(order, list(range(-len(order), 0)))
    x = x @ vectors[order.pop()]
    while order:
        x = torch.einsum("...nr,nr->...r", x, vectors[order.pop()])
    return x


def multiply_sketches(left: Tensor, right: Tensor, words: tuple[str, str], out: str) -> Tensor:
    """The sketch of a product from those of its factors, direction by direction.

    Args:
        left: ``[*axes, pieces, k, columns]``, with one letter for each of ``axes`` in
            ``words[0]``; 1 column if there was nothing to sketch.
        right: likewise, with ``words[1]``.
        words: letters of the axes of both.
        out: letters of the axes of the result, ``[*out, pieces, columns]``.

    Returns:
        A real tensor; complex pieces have real and imaginary part as two.
    """
    sides = []
    for x, word in zip((left, right), words, strict=True):
        # A side without columns of its own is not repeated in memory.
        alone = x.shape[-1] == 1
        sides.append((x.squeeze(-1), f"{word}YZ") if alone else (x, f"{word}YZX"))
    many = any(word.endswith("X") for _, word in sides)
    (x, first), (y, second) = sides
    value = torch.einsum(f"{first},{second}->{out}Y{'X' * many}", x, y)
    value = value if many else value.unsqueeze(-1)
    if value.is_complex():
        value = torch.view_as_real(value).movedim(-1, -2).flatten(-3, -2)
    return value
