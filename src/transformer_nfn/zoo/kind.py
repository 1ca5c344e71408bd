"""Which kind of small transformer: how wide, how many heads, how deep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from transformer_nfn.known_tasks import BLOCKS, HEADS, WIDTH
from transformer_nfn.zoo.errors import ZooError

MOST_WIDTH, MOST_DEPTH = 512, 32
_NAME = re.compile(r"w(\d{1,9})-h(\d{1,9})-d(\d{1,9})")


@dataclass(frozen=True, order=True)
class Kind:
    """The sizes a build may choose; the paper's by default. The MLP has ``2·width`` neurons.

    Attributes:
        width: D, even because sinusoidal positions come in pairs.
        heads: of width ``width // heads`` each.
        depth: blocks.
    """

    width: int = WIDTH
    heads: int = HEADS
    depth: int = BLOCKS

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MOST_WIDTH or self.width % 2:
            raise ZooError(
                f"width must be an even number from 2 to {MOST_WIDTH}, found {self.width}"
            )
        if not 1 <= self.depth <= MOST_DEPTH:
            raise ZooError(f"depth must lie between 1 and {MOST_DEPTH}, found {self.depth}")
        if self.heads < 1:
            raise ZooError(f"heads must be at least 1, found {self.heads}")
        if self.width % self.heads:
            raise ZooError(
                f"{self.heads} heads do not divide width {self.width}: every head has an equal "
                "share of it"
            )

    @property
    def name(self) -> str:
        """As folders of a mixed zoo are called: ``w16-h2-d1``."""
        return f"w{self.width}-h{self.heads}-d{self.depth}"

    @property
    def neurons(self) -> int:
        """Of each block's MLP: twice the width, as the paper's 64 at width 32."""
        return 2 * self.width

    def __str__(self) -> str:
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        blocks = "1 block" if self.depth == 1 else f"{self.depth} blocks"
        return f"width {self.width}, {heads}, {blocks}"

    @staticmethod
    def named(name: str) -> Kind:
        """The kind that `name` calls so."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ZooError(f"'{name}' is not a kind of network: expected a name like w16-h2-d1")
        return Kind(*map(int, match.groups()))


PAPER = Kind()
"""The kind of all networks of the paper."""


def all_kinds(
    widths: Sequence[int], heads: Sequence[int], depths: Sequence[int]
) -> tuple[Kind, ...]:
    """Every combination, in order; each must be possible, and none may come twice."""
    kinds = tuple(Kind(*sizes) for sizes in product(widths, heads, depths))
    for name, sizes in (("width", widths), ("heads", heads), ("depth", depths)):
        twice = sorted({size for size in sizes if list(sizes).count(size) > 1})
        if twice:
            raise ZooError(f"{name} {twice[0]} was asked for twice")
    return kinds
