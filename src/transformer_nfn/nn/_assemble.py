"""How do the results of the levels become tensors again? Views, then broadcast sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from transformer_nfn.nn._level_map import LevelMap
from transformer_nfn.nn._levels import Target


@dataclass(frozen=True)
class Piece:
    """Where one target's share of one level's result lies, and how to view it.

    The view is ``[b, e, *labels]`` with size 1 for the permuted axes that the level lacks.
    """

    level: int
    dim: int
    start: int
    width: int
    sizes: tuple[int, ...]
    moves: tuple[int, ...]
    missing: tuple[int, ...]

    def view(self, y: Tensor) -> Tensor:
        """The target's share of ``y``, ready to be broadcast."""
        if y.shape[self.dim] != self.width:
            y = y.narrow(self.dim, self.start, self.width)
        if len(self.sizes) > 1:
            y = y.unflatten(self.dim, self.sizes)
        y = y.permute(self.moves)
        for place in self.missing:
            y = y.unsqueeze(place)
        return y


def plan_pieces(maps: Sequence[LevelMap], targets: Sequence[Target]) -> dict[str, list[Piece]]:
    """For each target its pieces, from the smallest level to the largest."""
    out: dict[str, list[Piece]] = {target.name: [] for target in targets}
    for i, linear in reversed(list(enumerate(maps))):
        for target, start, width in linear.offsets():
            out[target.name].append(_piece(i, linear, target, start, width))
    return out


def _piece(i: int, linear: LevelMap, target: Target, start: int, width: int) -> Piece:
    level = linear.level
    channels = linear.out_channels
    lead = ("b",) if not target.private else (target.private, "b")
    places = (*level.axes, *target.carried)
    if level.front:
        order = (*lead, "e", *places)
        dim, sizes = len(lead), (channels,)
    else:
        order = (*lead, *places, "e", *target.free)
        dim = len(lead) + len(places)
        sizes = (channels, *(target.sizes[a] for a in target.free))
    wanted = ("b", "e", *target.labels)
    moves = tuple(order.index(a) for a in wanted if a in order)
    missing = tuple(place for place, a in enumerate(wanted) if a not in order)
    return Piece(i, dim, start, width, sizes, moves, missing)


def add_pieces(pieces: Sequence[Piece], results: Sequence[Tensor]) -> Tensor:
    """The broadcast sum over levels, small ones first so that few full-size tensors are made."""
    total = pieces[0].view(results[pieces[0].level])
    for piece in pieces[1:]:
        total = total + piece.view(results[piece.level])
    return total
