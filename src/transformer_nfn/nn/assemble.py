"""How do the results of the levels become tensors again? Views, then broadcast sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.nn.level_map import LevelMap
from transformer_nfn.nn.levels import Target


@dataclass(frozen=True)
class Piece:
    """Where one target's share of one level's result lies, and how to view it.

    The view is ``[b, e, *labels]``, or ``[b, groups, e, *labels]``, with size 1 for the permuted
    axes that the level lacks. ``whole`` says that no other target shares the level.
    """

    level: int
    part: int
    grouped: bool
    whole: bool
    dim: int
    sizes: tuple[int, ...]
    moves: tuple[int, ...]
    missing: tuple[int, ...]

    def view(self, parts: Sequence[Tensor]) -> Tensor:
        """The target's share of a level's result, ready to be broadcast."""
        y = parts[self.part]
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
        for part, target in enumerate(linear.level.targets):
            out[target.name].append(_piece(i, part, linear, target))
    return out


def _piece(i: int, part: int, linear: LevelMap, target: Target) -> Piece:
    level = linear.level
    channels = linear.out_channels
    grouped = linear.groups > 1
    group = ("g",) if grouped else ()
    lead = (*((target.private,) if target.private else ()), *group)
    order = (*lead, "e", *target.free, "b", *level.axes, *target.carried)
    dim = len(lead)
    sizes = (channels, *(target.sizes[a] for a in target.free))
    wanted = ("b", *group, "e", *target.labels)
    moves = tuple(order.index(a) for a in wanted if a in order)
    missing = tuple(place for place, a in enumerate(wanted) if a not in order)
    return Piece(i, part, grouped, len(linear.widths) == 1, dim, sizes, moves, missing)


def add_pieces(pieces: Sequence[Piece], results: Sequence[Sequence[Tensor]]) -> Tensor:
    """The broadcast sum over levels, small ones first so that few full-size tensors are made."""
    total = _add_views(pieces, results)
    # A fresh sum is dense, so this is a view where it matters.
    return total.flatten(1, 2) if pieces[0].grouped else total


def _add_views(pieces: Sequence[Piece], results: Sequence[Sequence[Tensor]]) -> Tensor:
    views = [piece.view(results[piece.level]) for piece in pieces]
    *small, large = _merged(views)
    own = pieces[-1].whole or not pieces[-1].grouped
    fits = bool(small) and large.numel() > max(x.numel() for x in small)
    if own and fits and not torch.is_grad_enabled():
        # Each piece is used once, so without gradients the largest may hold the sum.
        for x in small:
            large += x
        return large
    for x in small:
        large = large + x
    return large


def _merged(views: Sequence[Tensor]) -> list[Tensor]:
    """The same sum with fewer summands: what fits into a small piece is added there."""
    left = list(views)
    kept = []
    while left:
        x = left.pop(0)
        for j, y in enumerate(left[:-1]):
            if all(n in (1, m) for n, m in zip(x.shape, y.shape, strict=True)):
                left[j] = y + x
                break
        else:
            kept.append(x)
    return kept
