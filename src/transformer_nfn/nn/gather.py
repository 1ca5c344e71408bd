"""How is a source brought to a level? Pool, multiply, put the features in front."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters

import torch
from torch import Tensor

from transformer_nfn.nn.levels import RANK, Level, Term
from transformer_nfn.nn.sources import Factor, Source

FEW = 4
"""So many channels are transposed one by one, each as a matrix."""

Dictionary = Callable[[Source, str], Tensor]
"""Gives the dictionary ``[rank, size]`` for a free label of a source."""


@dataclass(frozen=True)
class Gather:
    """How one term is computed: by an einsum, or by pooling a term that is there already.

    ``order`` names the axes of the result, ``b`` and ``d`` being batch and channels: features
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
        """The term of these weights, ``done`` being what larger levels have gathered."""
        if self.parent is not None:
            x = done[self.parent[0]][self.parent[1]]
            return x.sum(self.sums).permute(self.moves) if self.sums else x.permute(self.moves)
        source = self.term.source
        operands = []
        for factor, word in zip(source.factors, self.words, strict=True):
            x = _split(factor, weights[factor.tensor])
            dense = [a for a in factor.all_labels if a in source.dense]
            if dictionary is not None and dense:
                others = "".join(w for w in self.words if w is not word) + self.result
                x = _compress(factor, x, word, others, source, dense, dictionary)
                # What only this factor carries and nobody keeps is summed away by now.
                word = "".join(a for a in word if a in others)
            operands.append((x, word))
        return _contract(operands, self.result)


def plan_gathers(levels: Sequence[Level], rank: int | None) -> tuple[tuple[Gather, ...], ...]:
    """One `Gather` for each term of each level; smaller levels pool what larger ones have."""
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
    # The frequencies of a complex axis go before all: each has a matrix of its own.
    lead = (source.private,) if source.private else ()
    return (*lead, "d", *free, "b", *term.kept, *source.carried)


def _parent(done: Sequence[Sequence[Gather]], term: Term) -> tuple[int, int] | None:
    """The smallest term of the same source that is gathered already and includes this level."""
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
        own = list(factor.all_labels)
        if rank is not None and any(a in source.dense for a in own):
            own = [a for a in own if a not in source.dense] + [RANK]
        words.append("".join(letters[a] for a in ("b", "d", *own)))
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
        # Summed by torch.einsum before the product where only one factor carries the axis;
        # axes that both carry (heads, linear axis) are laid side by side in one matmul.
        return _dense(torch.einsum(f"{left},{right}->{result}", x, y), result.index("a"))
    x, word = operands[0]
    if len(set(word)) < len(word):
        return torch.einsum(f"{word}->{result}", x)
    # Moved first, so that the sum runs over the axes in the order they lie in the result.
    rest = [i for i, a in enumerate(word) if a not in result]
    x = x.permute([*(word.index(a) for a in result), *rest])
    return x.flatten(len(result)).sum(-1) if rest else _dense(x, result.index("a"))


def _dense(x: Tensor, features: int) -> Tensor:
    """``x`` with its features in front in memory too.

    As a transposition of two axes, which is several times faster than a copy of many, and once
    for all the levels that pool it.
    """
    if x.is_contiguous():
        return x
    if 1 < x.shape[0] <= FEW:
        return torch.stack([_dense(y, features - 1) for y in x.unbind(0)])
    flat = x.reshape(x.shape[:features].numel(), x.shape[features:].numel())
    return flat.contiguous().view(x.shape)


def _split(factor: Factor, x: Tensor) -> Tensor:
    """The pieces of an axis apart (frequency, pair); ``x`` and ``x J`` side by side."""
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
    factor: Factor,
    x: Tensor,
    word: str,
    needed: str,
    source: Source,
    dense: Sequence[str],
    dictionary: Dictionary,
) -> Tensor:
    """The free axes of a factor against a dictionary: ``u_rᵀ W``, summed where nobody looks."""
    rank_letter = word[-1]
    plain = iter(word[2:-1])
    spare = iter(a for a in reversed(ascii_letters) if a not in word)
    letters = [next(spare) if a in dense else next(plain) for a in factor.all_labels]
    inner = [letters[factor.all_labels.index(a)] for a in dense]
    kept = "".join(a for a in word if a in needed)
    equation = ",".join((word[:2] + "".join(letters), *(rank_letter + a for a in inner)))
    return torch.einsum(f"{equation}->{kept}", x, *(dictionary(source, a) for a in dense))
