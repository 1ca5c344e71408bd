"""Units of one model that another still has: blocks, heads and neurons of cut models.

Units are matched by their sketches in one basis of the stream, on everything that they read and
write. A unit survived if its partner points in its direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.sketches import Directions
from transformer_nfn.spaces.actions.permutation import assign_pairs
from transformer_nfn.spaces.actions.solvers import Pair

SURVIVED = 0.5
"""Least cosine of a surviving unit with its partner, the mean of what it reads and what it writes:
half of the way from unrelated units to a copy."""
CHUNK = 512


@dataclass(frozen=True)
class BlockUnits:
    """Units of a block of A that a block of B has.

    Attributes:
        block: of B.
        source: the block of A.
        heads: by the prefix of the attention: number of A's heads, and A's head for each of B's
            (None where it is new).
        neurons: likewise.

    Example:
        >>> print(BlockUnits("1", "2", {"": (4, (0, 2, 3))}, (8, (0, 1, None, 5))))
        block 1 is block 2 of A: 3 of 4 heads, 3 of 8 neurons; 1 neuron is new
    """

    block: str
    source: str
    heads: dict[str, tuple[int, tuple[int | None, ...]]]
    neurons: tuple[int, tuple[int | None, ...]]

    def __str__(self) -> str:
        kept: list[str] = []
        new: list[str] = []
        for prefix, (count, units) in self.heads.items():
            _describe(kept, new, count, units, f"{prefix.replace('.', ' ')}head")
        _describe(kept, new, *self.neurons, "neuron")
        rest = "".join(f"; {text}" for text in new)
        return f"block {self.block} is block {self.source} of A: {', '.join(kept)}{rest}"

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        heads = {f"{prefix}heads": list(units) for prefix, (_, units) in self.heads.items()}
        return {"source": self.source, **heads, "neurons": list(self.neurons[1])}


def _describe(
    kept: list[str], new: list[str], count: int, units: tuple[int | None, ...], word: str
) -> None:
    known = {u for u in units if u is not None}
    kept.append(f"{len(known)} of {count} {word}s")
    missing = units.count(None)
    if missing:
        new.append(f"{missing} {word}{'s are' if missing > 1 else ' is'} new")


def surviving_units(block: str, source: str, a: Directions, b: Directions) -> BlockUnits:
    """Find the units of a block of A in a block of B.

    Args:
        block: name of the block of B. source: of the block of A.
        a: sketch of the block of A. b: of the block of B, in the same basis.
    """
    heads = {}
    for prefix in a.heads.keys() & b.heads.keys():
        partners, alike = match_heads_of(a, b, prefix)
        heads[prefix] = len(a.heads[prefix][0]), _known(partners, alike)
    neurons = match_neurons_of(a, b)
    return BlockUnits(block, source, heads, (len(a.read), _known(*neurons)))


def _known(partners: Tensor, alike: Tensor) -> tuple[int | None, ...]:
    found = zip(partners.tolist(), alike.tolist(), strict=True)
    return tuple(i if i >= 0 and cosine >= SURVIVED else None for i, cosine in found)


def match_heads_of(a: Directions, b: Directions, prefix: str) -> Pair:
    """Head of A that each head of B is, -1 for none, and the cosine of the two."""
    (QK_a, VO_a, _), (QK_b, VO_b, _) = a.heads[prefix], b.heads[prefix]
    return _assigned((QK_b @ QK_a.mT + VO_b @ VO_a.mT) / 2)


def match_neurons_of(a: Directions, b: Directions) -> Pair:
    """Neuron of A that each neuron of B is, -1 for none, and the cosine of the two."""
    rows = []
    for part in torch.arange(len(b.read)).split(CHUNK):
        alike = b.read[part] @ a.read.mT
        written = torch.ones_like(alike)
        for x, y in zip(a.written, b.written, strict=True):
            written *= y[part] @ x.mT
        rows.append((alike + written) / 2)
    return _assigned(torch.cat(rows))


def _assigned(alike: Tensor) -> Pair:
    """The best matching of rows with columns, with the entries that it takes.

    One to one, unless there are more rows than columns.
    """
    best, nearest = alike.max(1)
    # A wider model may have several copies of a unit, as experts of a mixture are.
    if len(nearest.unique()) == len(nearest) or alike.shape[0] > alike.shape[1]:
        return nearest, best
    rows, columns = assign_pairs(alike)
    partners = torch.full((len(alike),), -1)
    partners[rows] = columns
    values = torch.zeros(len(alike), dtype=alike.dtype)
    values[rows] = alike[rows, columns]
    return partners, values
