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
    part: int
    dim: int
    sizes: tuple[int, ...]
    moves: tuple[int, ...]
    missing: tuple[int, ...]

    def view(self, parts: Sequence[Tensor]) -> Tensor:
        """The target's share of a level's result, ready to be broadcast."""
        y = parts[self.part]
        if len(self.sizes) > 1:
            y = y.unflatten(self.dim, self.sizes)  # type: ignore[no-untyped-call]
        y = y.permute(self.moves)
        for place in self.missing:
            y = y.unsqueeze(place)
        return y


def plan_pieces(maps: Sequence[LevelMap], targets: Sequence[Target]) -> dict[str, list[Piece]]:
    """For each target its pieces, from the smallest level to the largest."""
    out: dict[str, list[Piece]] = {target.name: [] for target in targets}
    for i, linear in reversed(list(enumerate(maps))):
        for part, target in enumerate(linear.level.targets):
            out[target.name].append(_piece(i, part, linear, target))
    return out


def _piece(i: int, part: int, linear: LevelMap, target: Target) -> Piece:
    level = linear.level
    channels = linear.out_channels
    lead = (target.private,) if target.private else ()
    order = (*lead, "e", *target.free, "b", *level.axes, *target.carried)
    dim = len(lead)
    sizes = (channels, *(target.sizes[a] for a in target.free))
    wanted = ("b", "e", *target.labels)
    moves = tuple(order.index(a) for a in wanted if a in order)
    missing = tuple(place for place, a in enumerate(wanted) if a not in order)
    return Piece(i, part, dim, sizes, moves, missing)


def add_pieces(pieces: Sequence[Piece], results: Sequence[Sequence[Tensor]]) -> Tensor:
    """The broadcast sum over levels, small ones first so that few full-size tensors are made."""
    total = pieces[0].view(results[pieces[0].level])
    for piece in pieces[1:]:
        total = total + piece.view(results[piece.level])
    return total
