"""What can every action on an axis do? The one interface behind which symmetries differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MAX_CONDITION = 1e4
"""Matrices with a larger condition number are drawn again unless asked for."""

Pointwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """Where an axis stands in a tensor.

    Attributes:
        dim: the dimension of the axis.
        sites: the dimensions along which there is an element each: the batch if there is one,
            then the axes that the axis belongs to, outermost first.
    """

    dim: int
    sites: tuple[int, ...]


@dataclass(frozen=True)
class Drawing:
    """How random elements are drawn.

    Attributes:
        generator: where the randomness comes from; drawn on its device.
        entries: matrix entries uniform on ``(low, high)``; standard normal if None.
        max_condition: matrices worse than this are drawn again; None for no limit.
        condition: every matrix gets exactly this condition number (where the action has any).
    """

    generator: torch.Generator | None = None
    entries: tuple[float, float] | None = None
    max_condition: float | None = MAX_CONDITION
    condition: float | None = None

    @property
    def device(self) -> torch.device | None:
        """Where the random numbers are made."""
        return self.generator.device if self.generator is not None else None


@dataclass(frozen=True)
class Pieces:
    """How an axis falls apart under an action: ``size = count · width``.

    Attributes:
        count: pieces that no equivariant map mixes (the frequencies of rotary positions).
        width: numbers in each of them.
        turns: dimension of what commutes with the action on one piece: 1 for multiples of the
            identity, 2 where a quarter turn commutes too.
    """

    count: int
    width: int
    turns: int

    @property
    def whole(self) -> bool:
        """Whether the axis stays in one piece, on which only multiples of 1 commute."""
        return self.count == self.turns == 1


@dataclass(frozen=True)
class Solution:
    """The element that takes one network's rows to another's.

    Attributes:
        part: the element, as `Action.identity` shapes it.
        inverse: what undoes it.
        certain: False if another element would have done almost as well.
    """

    part: Tensor
    inverse: Tensor
    certain: bool = True


def cut(x: Tensor, dim: int, first: int, second: int) -> Tensor:
    """``x`` with one axis as two, ``[first, second]``."""
    return x.reshape(*x.shape[:dim], first, second, *x.shape[dim + 1 :])


class Action(ABC):
    """One group that may act along an axis of ``size`` entries.

    An element is one tensor, with the sites in front (one element for each item of a batch and
    each index of the axes that the axis belongs to): ``[*sites, n]`` for permutations,
    ``[*sites, n, n]`` for matrices ``G``. Rows ``x [*sites, rows, n]`` move plain, ``x → x G``,
    or dual, ``x → x G⁻ᵀ``, so that ``x yᵀ`` of a plain and a dual one stays as it is.
    """

    word: ClassVar[str]
    """What an action is called in messages and tables."""
    permutes: ClassVar[bool] = False
    """Whether elements only move indices."""
    rebases: ClassVar[bool] = False
    """Whether elements are matrices, so that entries are invariant in products only."""
    self_dual: ClassVar[bool] = False
    """Whether plain and dual are the same (``G⁻ᵀ = G``), so that any two tensors contract."""
    separating: ClassVar[bool] = True
    """Whether products tell apart everything that an invariant function can tell apart."""

    def misfit(self, name: str, size: int, of: str | None) -> str | None:
        """Why the action cannot stand on such an axis, in a sentence; None if it can."""
        return None

    @abstractmethod
    def describe(self, size: int) -> str:
        """The group in words, ``GL(16)``."""

    @abstractmethod
    def dimension(self, size: int) -> int:
        """How many continuous parameters an element has."""

    def log10_order(self, size: int) -> float:
        """log10 of the number of permutations and signs in the group."""
        return 0.0

    @abstractmethod
    def identity(
        self,
        size: int,
        sites: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> Tensor:
        """The element that changes nothing, at every site."""

    @abstractmethod
    def draw(self, size: int, sites: tuple[int, ...], how: Drawing) -> Tensor:
        """Random elements, matrices in float64."""

    @abstractmethod
    def refuse(self, part: Tensor, max_condition: float | None) -> str | None:
        """Why ``part`` is no element (shape and dtype being right); None if it is one."""

    @abstractmethod
    def invert(self, part: Tensor) -> Tensor:
        """The element that undoes ``part``."""

    @abstractmethod
    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """The element that does ``first`` and ``then`` after it, at the same sites."""

    @abstractmethod
    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        """``x`` moved along one axis.

        Args:
            x: a tensor that has the axis at ``place.dim``.
            part: the element; for ``dual`` its inverse.
            place: where the axis and its sites stand in ``x``.
            dual: whether ``x`` carries the axis dual.
        """

    @abstractmethod
    def solve(
        self, plain: tuple[Tensor, Tensor], dual: tuple[Tensor, Tensor], unit: float
    ) -> Solution | None:
        """The element that takes the first network's rows to the second's, as well as any.

        Args:
            plain: rows that carry the axis plain, of both networks, ``[*sites, rows, n]``.
            dual: rows that carry it dual.
            unit: relative error to expect in one weight.

        Returns:
            None if no element does it even nearly (the ranks differ).
        """

    @abstractmethod
    def balance(self, plain: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        """One representative for all rows that elements (or limits of them) join.

        Args:
            plain: ``[*sites, rows, n]``. dual: likewise.
        """

    @abstractmethod
    def commutes_with(self, fn: Pointwise) -> bool:
        """Whether ``fn``, applied entry by entry, commutes with every element."""

    def pieces(self, size: int) -> Pieces:
        """How the axis falls apart under the action."""
        return Pieces(1, size, 1)

    def reads_through(self, size: int) -> bool:
        """Whether a layer's products follow from those of its input (see `nn.ReadThrough`)."""
        return True

    def split(self, x: Tensor, dim: int) -> Tensor:
        """``x`` with the axis cut into ``[count, width]``, two axes where there was one."""
        pieces = self.pieces(x.shape[dim])
        return cut(x, dim, pieces.count, pieces.width)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Undoes `split`: the axes ``dim`` and ``dim + 1`` become one."""
        return x.flatten(dim, dim + 1)

    def vectors(self, x: Tensor, *, dual: bool) -> Tensor:
        """Rows ``[…, n]`` as vectors of each piece, ``[…, count, k]``, real or complex.

        The invariant product of a plain and a dual row is ``Σ_k vectors(x) vectors(y)`` for
        each piece: nothing finer is invariant.
        """
        return self.split(x, x.ndim - 1)
