"""What may act on the whole stream? One matrix, and every tensor with that axis moves along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises.heads import random_signs
from transformer_nfn.functional.description import Transformer, axes_of
from transformer_nfn.spaces.actions import Drawing
from transformer_nfn.spaces.actions.matrix import orthogonal

StreamAction = Literal[
    "orthogonal", "orthogonal fixing ones", "signed permutation", "permutation and sign", "none"
]


def stream_action(about: Transformer) -> StreamAction:
    """The largest group that acts on the stream of a network once its gains are folded.

    Where the final stream is the output there is none. A norm that stands in the residual
    (post-norm, sandwich) or a tied final norm keeps its gain, and only permutations respect
    that; RMS norm takes a sign for each coordinate, LayerNorm one for all of them.
    """
    if about.inputs == "vectors" or about.headless:
        return "none"
    folded = about.orders <= {"pre", "parallel"} and not about.tied and about.mlm is None
    if about.norm == "rms":
        return "orthogonal" if folded else "signed permutation"
    return "orthogonal fixing ones" if folded else "permutation and sign"


@dataclass(frozen=True)
class Turn:
    """``x → x T`` for the whole stream.

    Attributes:
        order: for a signed permutation, which old coordinate each new one is, ``[D]``.
        signs: with it, ``[D]``.
        matrix: otherwise the orthogonal ``T [D, D]``; gains are all one then.
    """

    order: Tensor | None = None
    signs: Tensor | None = None
    matrix: Tensor | None = None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """A canonical tensor, moved along.

        The output of BERT's transform before its output matrix is a copy of the stream as far
        as a tied output matrix goes: it moves along, with signs in the norm after it.
        """
        for dim, axis in enumerate(axes_of(name)):
            if axis == "D":
                x = self._along(x, dim, gain=name.endswith(".g"))
            elif axis == "mlm":
                x = self._along(x, dim, gain=not name.startswith("extra.mlm_norm."))
        return x

    def _along(self, x: Tensor, dim: int, *, gain: bool) -> Tensor:
        if self.matrix is not None:
            if gain:
                return x
            return (x.movedim(dim, -1) @ self.matrix.to(x)).movedim(-1, dim)
        if self.order is None or self.signs is None:
            return x
        x = x.index_select(dim, self.order)
        if gain:
            return x
        return x * self.signs.to(x).reshape(-1, *[1] * (x.ndim - 1 - dim))

    @property
    def needs_unit_gains(self) -> bool:
        """Whether it is a turn under which gains other than one would not stay gains."""
        return self.matrix is not None


def draw_turn(action: StreamAction, width: int, how: Drawing) -> Turn:
    """A random element of the group."""
    if action == "none":
        return Turn()
    if action == "orthogonal":
        return Turn(matrix=orthogonal(1, width, how)[0])
    if action == "orthogonal fixing ones":
        return Turn(matrix=orthogonal_fixing_ones(width, how))
    signs = random_signs((width if action == "signed permutation" else 1,), how)
    order = torch.randperm(width, generator=how.generator)
    return Turn(order=order, signs=signs.expand(width))


def orthogonal_fixing_ones(size: int, how: Drawing) -> Tensor:
    """A random orthogonal matrix under which the all-ones vector stays."""
    inner = torch.eye(size, dtype=torch.float64)
    inner[1:, 1:] = orthogonal(1, size - 1, how)[0]
    mirror = torch.ones(size, dtype=torch.float64) / size**0.5
    mirror[0] -= 1  # reflects the first unit vector into the direction of ones
    mirror = mirror / mirror.norm().clamp_min(1e-300)

    def reflect(x: Tensor) -> Tensor:
        return x - 2 * torch.outer(mirror, mirror @ x)

    return reflect(reflect(inner).mT).mT
