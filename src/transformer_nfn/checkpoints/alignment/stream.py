"""Turn of a stream that brings one network nearest to another, within the group that acts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries.stream import Turn
from transformer_nfn.functional.description import StreamGroup, axes_of
from transformer_nfn.spaces.actions.permutation import assign_signed
from transformer_nfn.spaces.actions.solvers import polar, polar_fixing_ones


class Cross:
    """Sums ``Aᵀ B`` over tensors along the stream: all that a turn is solved from.

    Attributes:
        vectors: ``[D, D]``, of what turns.
        gains: ``[D, D]``, of gains, which are permuted but never change sign.
    """

    def __init__(self, width: int) -> None:
        self.vectors = torch.zeros(width, width, dtype=torch.float64)
        self.gains = torch.zeros_like(self.vectors)

    def add(self, name: str, a: Tensor, b: Tensor) -> bool:
        """Add a canonical tensor of both networks; False where it does not have the stream."""
        if "D" not in axes_of(name):
            return False
        dim = axes_of(name).index("D")
        x, y = (w.movedim(dim, -1).reshape(-1, len(self.vectors)) for w in (a, b))
        total = self.gains if name.endswith(".g") else self.vectors
        total += (x.mT @ y).double()
        return True

    def turned(self, turn: Turn) -> Cross:
        """The same after A was turned."""
        out = Cross(len(self.vectors))
        if turn.matrix is not None:
            out.vectors, out.gains = turn.matrix.mT @ self.vectors, self.gains.clone()
        elif turn.order is not None and turn.signs is not None:
            out.vectors = self.vectors[turn.order] * turn.signs.double().unsqueeze(-1)
            out.gains = self.gains[turn.order]
        else:
            out.vectors, out.gains = self.vectors.clone(), self.gains.clone()
        return out

    def __add__(self, other: Cross) -> Cross:
        out = Cross(len(self.vectors))
        out.vectors, out.gains = self.vectors + other.vectors, self.gains + other.gains
        return out


def solve_turn(cross: Cross, action: StreamGroup) -> Turn:
    """The turn of a group under which A lies nearest to B."""
    C = cross.vectors
    if action == "none":
        return Turn()
    if action == "orthogonal":
        return Turn(matrix=polar(C))
    if action == "orthogonal fixing ones":
        return Turn(matrix=polar_fixing_ones(C))
    order, signs = assign_signed(C, cross.gains, one_sign=action != "signed permutation")
    return Turn(order=order, signs=signs)


def after(first: Turn, second: Turn) -> Turn:
    """One turn after another, of one kind."""
    if first.matrix is not None and second.matrix is not None:
        T = first.matrix @ second.matrix
        return Turn(matrix=1.5 * T - 0.5 * T @ (T.mT @ T))  # orthogonal up to rounding again
    if first.order is None or second.order is None:
        return second if first.order is None and first.matrix is None else first
    assert first.signs is not None
    assert second.signs is not None
    order = first.order[second.order]
    return Turn(order=order, signs=first.signs[second.order] * second.signs)


def identity(action: StreamGroup, width: int) -> Turn:
    """The turn that leaves everything where it is."""
    if action == "none":
        return Turn()
    if action.startswith("orthogonal"):
        return Turn(matrix=torch.eye(width, dtype=torch.float64))
    return Turn(order=torch.arange(width), signs=torch.ones(width, dtype=torch.float64))


def turn_all(
    turn: Turn, names: Mapping[str, str], weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors by the names of a site, each turned as its canonical name says."""
    return {k: turn(names[k], w) if k in names else w for k, w in weights.items()}
