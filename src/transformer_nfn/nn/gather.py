"""Data flow of a layer: sources are gathered to levels, results of levels are added to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters

import torch
from torch import Tensor

from transformer_nfn.nn.level_map import LevelMap
from transformer_nfn.nn.levels import RANK, Level, Target, Term
from transformer_nfn.nn.sources import Factor, Source

FEW = 4
"""Up to so many channels are transposed one by one, each as a matrix."""

Dictionary = Callable[[Source, str], Tensor]
"""Returns the dictionary ``[rank, size]`` for a free label of a source."""


@dataclass(frozen=True)
class Gather:
    """Computation of one term: an einsum, or pooling of a term computed before.

    ``order`` names the axes of the result, with ``b`` and ``d`` for batch and channels: features
    first, then batch and places, so that a map is one matrix product without transposes and
    pooling runs along contiguous memory.
    """

    term: Term
    order: tuple[str, ...]
    words: tuple[str, ...] = ()
    result: str = ""
    parent: tuple[int, int] | None = None
    sums: tuple[int, ...] = ()
    moves: tuple[int, ...] = ()

    def run(
        self,
        weights: Mapping[str, Tensor],
        dictionary: Dictionary | None,
        done: Sequence[Sequence[Tensor]],
    ) -> Tensor:
        """The term of these weights; ``done`` holds the terms of larger levels."""
        if self.parent is not None:
            x = done[self.parent[0]][self.parent[1]]
            return x.sum(self.sums).permute(self.moves) if self.sums else x.permute(self.moves)
        source = self.term.source
        operands = []
        for factor, word in zip(source.factors, self.words, strict=True):
            x = _split(factor, weights[factor.tensor])
            if dictionary is not None and source.dense.intersection(factor.all_labels):
                others = "".join(w for w in self.words if w is not word) + self.result
                x = _compress(factor, x, word, others, source, dictionary)
                # Labels that only this factor has and the result lacks are summed by now.
                word = "".join(a for a in word if a in others)
            operands.append((x, word))
        return _contract(operands, self.result)


def plan_gathers(levels: Sequence[Level], rank: int | None) -> tuple[tuple[Gather, ...], ...]:
    """One `Gather` for each term of each level; smaller levels pool terms of larger ones."""
    out: list[tuple[Gather, ...]] = []
    for level in levels:
        row = []
        for term in level.terms:
            order = _order(term, rank)
            parent = _parent(out, term)
            if parent is None:
                words, result = _words(term, order, rank)
                row.append(Gather(term, order, words, result))
            else:
                above = out[parent[0]][parent[1]].order
                sums = tuple(i for i, a in enumerate(above) if a not in order)
                left = [a for a in above if a in order]
                moves = tuple(left.index(a) for a in order)
                row.append(Gather(term, order, parent=parent, sums=sums, moves=moves))
        out.append(tuple(row))
    return tuple(out)


def _order(term: Term, rank: int | None) -> tuple[str, ...]:
    """The axes of a gathered term in order."""
    source = term.source
    free = source.free
    if rank is not None and source.dense:
        free = (RANK, *(a for a in free if a not in source.dense))
    # The frequencies of a complex axis come first: each has a separate matrix.
    lead = (source.private,) if source.private else ()
    return (*lead, "d", *free, "b", *term.kept, *source.carried)


def _parent(done: Sequence[Sequence[Gather]], term: Term) -> tuple[int, int] | None:
    """The smallest term of the same source that was gathered before and includes this level."""
    best: tuple[int, tuple[int, int]] | None = None
    if any(len(labels) > 1 for labels in term.source.perms.values()):
        return None
    for i, row in enumerate(done):
        for j, gather in enumerate(row):
            if gather.term.source is term.source and set(term.kept) <= set(gather.term.kept):
                size = prod(term.source.sizes[a] for a in gather.term.kept)
                if best is None or size < best[0]:
                    best = size, (i, j)
    return best[1] if best else None


def _words(term: Term, order: tuple[str, ...], rank: int | None) -> tuple[tuple[str, ...], str]:
    source = term.source
    labels = dict.fromkeys(a for f in source.factors for a in f.all_labels)
    letters = dict(zip(("b", "d", RANK, *labels), ascii_letters, strict=False))
    for first, second in term.same:
        letters[second] = letters[first]
    words = []
    for factor in source.factors:
        kept = list(factor.all_labels)
        if rank is not None and any(a in source.dense for a in kept):
            kept = [a for a in kept if a not in source.dense] + [RANK]
        words.append("".join(letters[a] for a in ("b", "d", *kept)))
    return tuple(words), "".join(letters[a] for a in order)


def run_gathers(
    plan: Sequence[Sequence[Gather]],
    weights: Mapping[str, Tensor],
    dictionary: Dictionary | None,
    used: Sequence[bool] | None = None,
) -> list[list[Tensor]]:
    """Every term of every level in use, each ``[d, *features, b, *level, *carried]``."""
    done: list[list[Tensor]] = []
    for i, row in enumerate(plan):
        done.append([])
        if used is None or used[i]:
            for gather in row:
                done[i].append(gather.run(weights, dictionary, done))
    return done


def _contract(operands: Sequence[tuple[Tensor, str]], result: str) -> Tensor:
    if len(operands) == 2:
        (x, left), (y, right) = operands
        # torch.einsum sums axes of one factor before the product; axes of both (heads, linear
        # axis) are contracted in one matmul.
        return _dense(torch.einsum(f"{left},{right}->{result}", x, y), result.index("a"))
    x, word = operands[0]
    if len(set(word)) < len(word):
        return torch.einsum(f"{word}->{result}", x)
    # Permuted first, so that the sum runs over contiguous axes.
    rest = [i for i, a in enumerate(word) if a not in result]
    x = x.permute([*(word.index(a) for a in result), *rest])
    return x.flatten(len(result)).sum(-1) if rest else _dense(x, result.index("a"))


def _dense(x: Tensor, features: int) -> Tensor:
    """``x`` made contiguous, by a transposition of two axes.

    Several times faster than a copy with many permuted axes, and done once for all levels.
    """
    if x.is_contiguous():
        return x
    if 1 < x.shape[0] <= FEW:
        return torch.stack([_dense(y, features - 1) for y in x.unbind(0)])
    flat = x.reshape(x.shape[:features].numel(), x.shape[features:].numel())
    return flat.contiguous().view(x.shape)


def _split(factor: Factor, x: Tensor) -> Tensor:
    """Split an axis into its pieces (frequency, pair), and stack ``x`` and ``x J``."""
    if factor.split is None:
        return x
    place, action = factor.split
    place += 2
    x = action.split(x, place)
    if factor.turn is None:
        return x
    real, imaginary = x.unbind(place + 1)
    turned = torch.stack((-imaginary, real), place + 1)
    return torch.stack((x, turned), -1)


def _compress(
    factor: Factor, x: Tensor, word: str, needed: str, source: Source, dictionary: Dictionary
) -> Tensor:
    """Project the free axes of a factor onto a dictionary: ``u_rᵀ W``."""
    dense = [a for a in factor.all_labels if a in source.dense]
    rank_letter = word[-1]
    plain = iter(word[2:-1])
    spare = iter(a for a in reversed(ascii_letters) if a not in word)
    letters = [next(spare) if a in dense else next(plain) for a in factor.all_labels]
    inner = [letters[factor.all_labels.index(a)] for a in dense]
    kept = "".join(a for a in word if a in needed)
    equation = ",".join((word[:2] + "".join(letters), *(rank_letter + a for a in inner)))
    return torch.einsum(f"{equation}->{kept}", x, *(dictionary(source, a) for a in dense))


@dataclass(frozen=True)
class Piece:
    """One target's share of one level's result, and its view.

    The view is ``[b, e, *labels]``, or ``[b, groups, e, *labels]``, with size 1 for the permuted
    axes that the level lacks. ``whole``: no other target shares the level.
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
        """The target's share of a level's result, ready to broadcast."""
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
    """The broadcast sum over levels, small ones first to allocate few full-size tensors."""
    total = _add_views(pieces, results)
    # A fresh sum is contiguous, so this is a view where it matters.
    return total.flatten(1, 2) if pieces[0].grouped else total


def _add_views(pieces: Sequence[Piece], results: Sequence[Sequence[Tensor]]) -> Tensor:
    views = [piece.view(results[piece.level]) for piece in pieces]
    *small, large = _merged(views)
    alone = pieces[-1].whole or not pieces[-1].grouped
    fits = len(small) > 0 and large.numel() > max(x.numel() for x in small)
    if alone and fits and not torch.is_grad_enabled():
        # Each piece is used once, so without gradients the sum is formed in place.
        for x in small:
            large += x
        return large
    for x in small:
        large = large + x
    return large


def _merged(views: Sequence[Tensor]) -> list[Tensor]:
    """The same sum with fewer summands: a piece that broadcasts to another one is added to it."""
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
