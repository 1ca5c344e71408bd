"""Interface of an action on an axis, and the trivial action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log10
from typing import ClassVar

import torch
from torch import Tensor

from transformer_nfn.spaces.actions.solvers import Pair

MAX_CONDITION = 1e4
"""Default limit on the condition number of random matrices."""
LOG10_2 = log10(2.0)

Pointwise = Callable[[Tensor], Tensor]
Device = torch.device | str | None
Sites = tuple[int, ...]
"""Sizes of the axes along which there is one element each."""


@dataclass(frozen=True)
class Size:
    """Size of a group: continuous parameters, and log10 of the order of its finite part.

    Permutations and signs count as finite; the two components of GL(n) do not.

    >>> Size(4, 1.0) + 2 * Size(1, 0.5)
    Size(continuous=6, finite=2.0)
    """

    continuous: int = 0
    finite: float = 0.0

    def __add__(self, other: Size) -> Size:
        return Size(self.continuous + other.continuous, self.finite + other.finite)

    def __rmul__(self, copies: int) -> Size:
        return Size(copies * self.continuous, copies * self.finite)


@dataclass(frozen=True)
class Place:
    """Position of an axis in a tensor.

    Attributes:
        dim: dimension of the axis.
        sites: dimensions along which there is one element each: the batch if there is one,
            then the axes that the axis belongs to, outermost first.
    """

    dim: int
    sites: tuple[int, ...]


@dataclass(frozen=True)
class Drawing:
    """Options for random elements.

    Attributes:
        generator: source of randomness; numbers are drawn on its device.
        entries: matrix entries uniform on ``(low, high)``; standard normal if None.
        max_condition: matrices with a larger condition number are redrawn; None for no limit.
        condition: prescribed condition number of every matrix (where the action has any).
    """

    generator: torch.Generator | None = None
    entries: tuple[float, float] | None = None
    max_condition: float | None = MAX_CONDITION
    condition: float | None = None

    @property
    def device(self) -> torch.device | None:
        """Device of the random numbers."""
        return self.generator.device if self.generator is not None else None


@dataclass(frozen=True)
class Pieces:
    """Decomposition of an axis under an action: ``size = count · width``.

    Attributes:
        count: pieces that no equivariant map mixes (the frequencies of rotary positions).
        width: entries of each piece.
        turns: dimension of the commutant of the action on one piece: 1 for multiples of the
            identity, 2 where a quarter turn commutes too.

    >>> from transformer_nfn.spaces import Axis
    >>> Axis.linear("qk", 8, of="head", form="complex").pieces
    Pieces(count=4, width=2, turns=2)
    """

    count: int
    width: int
    turns: int

    @property
    def single(self) -> bool:
        """Whether there is one piece, on which only multiples of the identity commute."""
        return self.count == self.turns == 1


@dataclass(frozen=True)
class Solution:
    """The element that takes one network's rows to another's.

    Attributes:
        part: the element, in the shape of `Action.identity`.
        inverse: its inverse.
        certain: False if another element fits almost as well.
    """

    part: Tensor
    inverse: Tensor
    certain: bool = True


class Action(ABC):
    """A group that acts along an axis of ``size`` entries.

    An element is one tensor with the sites in front (one element for each item of a batch and
    each index of the axes that the axis belongs to): ``[*sites, n]`` for permutations,
    ``[*sites, n, n]`` for matrices ``G``. Rows ``x [*sites, rows, n]`` transform plain,
    ``x → x G``, or dual, ``x → x G⁻ᵀ``, so ``x yᵀ`` of a plain and a dual row is invariant.

    >>> from transformer_nfn.spaces.actions import ACTIONS
    >>> gl = ACTIONS["linear", "general"]
    >>> gl.describe(4), gl.size(4)
    ('GL(4)', Size(continuous=16, finite=0.0))
    >>> ACTIONS["perm", "general"].commutes_with(torch.tanh), gl.commutes_with(torch.tanh)
    (True, False)
    """

    word: ClassVar[str]
    """Name in messages and tables."""
    permutes: ClassVar[bool] = False
    """Whether elements only permute indices."""
    rebases: ClassVar[bool] = False
    """Whether elements are matrices, so that only products of entries can be invariant."""
    self_dual: ClassVar[bool] = False
    """Whether plain and dual agree (``G⁻ᵀ = G``), so that any two tensors contract."""
    separating: ClassVar[bool] = True
    """Whether the invariant products separate orbits as well as any invariant function."""

    def axis_error(self, name: str, size: int, of: str | None) -> str | None:
        """Reason why the action cannot stand on such an axis; None if it can."""
        return None

    @abstractmethod
    def describe(self, size: int) -> str:
        """The group in words, ``GL(16)``."""

    @abstractmethod
    def size(self, n: int) -> Size:
        """Size of the group on an axis of ``n`` entries."""

    @abstractmethod
    def identity(self, size: int, sites: Sites, dtype: torch.dtype, device: Device) -> Tensor:
        """The identity at every site."""

    @abstractmethod
    def draw(self, size: int, sites: Sites, how: Drawing) -> Tensor:
        """Random elements, matrices in float64."""

    @abstractmethod
    def invert(self, part: Tensor) -> Tensor:
        """The inverse of ``part``."""

    @abstractmethod
    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        """The element that applies ``first``, then ``then``, at the same sites."""

    @abstractmethod
    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        """Apply elements along one axis.

        Args:
            x: a tensor with the axis at ``place.dim``.
            part: the element; for ``dual`` its inverse.
            place: position of the axis and its sites in ``x``.
            dual: whether ``x`` carries the axis dual.
        """

    @abstractmethod
    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        """The element that takes the first network's rows closest to the second's.

        Args:
            plain: rows that carry the axis plain, of both networks, ``[*sites, rows, n]``.
            dual: rows that carry it dual.
            unit: expected relative error of one weight.

        Returns:
            None if no element comes close (the ranks differ).
        """

    @abstractmethod
    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        """Canonical representative of an orbit of rows (or of its closure).

        Args:
            plain: ``[*sites, rows, n]``. dual: likewise.
        """

    @abstractmethod
    def commutes_with(self, fn: Pointwise) -> bool:
        """Whether the pointwise function ``fn`` commutes with every element."""

    def pieces(self, size: int) -> Pieces:
        """Decomposition of the axis under the action."""
        return Pieces(1, size, 1)

    def reads_through(self, size: int) -> bool:
        """Whether a layer's products follow from those of its input (see `nn.ReadThrough`)."""
        return True

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Split the axis into two, ``[count, width]``."""
        pieces = self.pieces(x.shape[dim])
        return cut(x, dim, pieces.count, pieces.width)

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Inverse of `split`: the axes ``dim`` and ``dim + 1`` become one."""
        return x.flatten(dim, dim + 1)

    def vectors(self, x: Tensor, *, dual: bool) -> Tensor:
        """Rows ``[…, n]`` as vectors of each piece, ``[…, count, k]``, real or complex.

        The invariant product of a plain and a dual row is ``Σ_k vectors(x) vectors(y)`` for
        each piece; nothing finer is invariant.
        """
        return self.split(x, x.ndim - 1)


class Free(Action):
    """The trivial group; its element holds no numbers, ``[*sites, 0]``.

    >>> Free().size(8)
    Size(continuous=0, finite=0.0)
    """

    word: ClassVar[str] = "free"

    def axis_error(self, name: str, size: int, of: str | None) -> str | None:
        return f"free axis '{name}' cannot belong to another axis" if of is not None else None

    def describe(self, size: int) -> str:
        return "nothing"

    def size(self, n: int) -> Size:
        return Size()

    def identity(self, size: int, sites: Sites, dtype: torch.dtype, device: Device) -> Tensor:
        return torch.empty(*sites, 0, dtype=dtype, device=device)

    def draw(self, size: int, sites: Sites, how: Drawing) -> Tensor:
        return self.identity(size, sites, torch.float64, how.device)

    def invert(self, part: Tensor) -> Tensor:
        return part

    def compose(self, first: Tensor, then: Tensor) -> Tensor:
        return first

    def act(self, x: Tensor, part: Tensor, place: Place, *, dual: bool = False) -> Tensor:
        return x

    def solve(self, plain: Pair, dual: Pair, unit: float) -> Solution | None:
        part = plain[0].new_empty(*plain[0].shape[:-2], 0)
        return Solution(part, part)

    def balance(self, plain: Tensor, dual: Tensor) -> Pair:
        return plain, dual

    def commutes_with(self, fn: Pointwise) -> bool:
        return True


def cut(x: Tensor, dim: int, first: int, second: int) -> Tensor:
    """``x`` with one axis reshaped to two, ``[first, second]``."""
    return x.reshape(*x.shape[:dim], first, second, *x.shape[dim + 1 :])


def spread(x: Tensor, part: Tensor, place: Place) -> Tensor:
    """``x`` expanded along the batch where it holds one network for many elements."""
    if place.sites and place.sites[0] == 0 and x.shape[0] == 1 and part.shape[0] > 1:
        return x.expand(part.shape[0], *x.shape[1:])
    return x


def line_up(part: Tensor, dims: tuple[int, ...], ndim: int) -> Tensor:
    """``part`` with its first axes at ``dims`` of a tensor of ``ndim`` axes, size 1 elsewhere.

    ``[*first, *rest] → [*ndim axes, *rest]``; unchanged where broadcasting does the same.
    """
    if dims == tuple(range(ndim - len(dims), ndim)):
        return part
    shape = [1] * ndim
    for i, dim in enumerate(dims):
        shape[dim] = part.shape[i]
    rest = part.shape[len(dims) :]
    if any(first > then for first, then in pairwise(dims)):
        order = sorted(range(len(dims)), key=lambda i: dims[i])
        part = part.permute(*order, *range(len(dims), part.ndim))
    return part.reshape(*shape, *rest)
