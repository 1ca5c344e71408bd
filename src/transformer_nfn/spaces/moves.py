"""Which parts of an element move a tensor, in which order, and along which dimensions?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from transformer_nfn.spaces.actions import Action, Place

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


class Move(NamedTuple):
    """One axis that moves: its name, what acts on it, and where it stands in the tensor."""

    axis: str
    action: Action
    place: Place


class Moves(NamedTuple):
    """What moves a tensor: first matrices, then permutations.

    Inner axes are permuted before the axes they belong to, so that each still stands at the index
    its own permutation was given for: ``(gx)[i, a] = x[τ(i), π_τ(i)(a)]``.
    """

    rebasing: tuple[Move, ...]
    permuting: tuple[Move, ...]


def moves_of(space: WeightSpace, axes: Sequence[str], lead: int, batched: bool) -> Moves:
    """The moves of a tensor ``[*lead, *axes, …]``; see `WeightSpace.moves`."""

    def move(dim: int) -> Move:
        place = space.place(axes, dim, lead=lead, batched=batched)
        return Move(axes[dim], space.axes[axes[dim]].action, place)

    return Moves(
        tuple(move(dim) for dim, axis in enumerate(axes) if space.is_rebased(axis)),
        tuple(move(dim) for dim in space.permuted_dims(axes)),
    )
