"""What a comparison looks at: every invariant quantity of a network, with its rounding error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from transformer_nfn.spaces import Weights, WeightSpace, fold
from transformer_nfn.symmetry.sketch import sketch

HALF = (torch.float16, torch.bfloat16)
WIDE = 64
"""So many numbers describe an index at most; more are sketched."""
PORTION = 2**18
"""So many entries are in float64 at a time."""


def rounding_unit(dtype: torch.dtype) -> float:
    """The largest relative error to expect in one weight.

    Weights kept in float64 have usually come through a few steps of float64 arithmetic, each
    with its own error; narrower ones were rounded once, at the end.
    """
    return torch.finfo(dtype).eps / 2 * (16 if dtype == torch.float64 else 1)


def allowed_error(dtype: torch.dtype) -> float:
    """The relative error of one weight up to which a difference counts as none.

    In half precision storing a weight is all that changes it, and many errors add up to what
    their mean square says: with room for more a change of 1 % would be hidden. In single and
    double precision there is room for what arithmetic adds to storing.
    """
    return (1.25 if dtype in HALF else 16.0) * rounding_unit(dtype)


@dataclass(frozen=True)
class Gap:
    """How far two aligned sources are apart.

    Attributes:
        relative: ``‖u − v‖ / max(‖u‖, ‖v‖)``.
        ratio: the same in allowed errors, at the worst site; up to 1 is no difference.
    """

    relative: float
    ratio: float


@dataclass(frozen=True)
class Source(ABC):
    """An invariant quantity of one network, that only permutations move.

    Attributes:
        name: of the tensor or product.
        axes: names of its axes.
    """

    name: str
    axes: tuple[str, ...]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its numbers are."""

    @abstractmethod
    def gap(self, other: Self) -> Gap:
        """How far it is from another network's, both in the same order."""

    @abstractmethod
    def hidden(self) -> float:
        """The largest relative difference at one site that rounding could hide."""

    @abstractmethod
    def reorder(self, space: WeightSpace, axis: str, index: Tensor) -> Self:
        """The source with ``axis`` gathered by ``index [*ancestors, n]``, in today's order."""

    @abstractmethod
    def views(
        self, space: WeightSpace, axis: str, known: set[str], *, sort: bool
    ) -> list[Tensor]:
        """What the source says about each index of ``axis``: ``[*ancestors, n, features]``.

        Perm axes of unknown order are sorted away, or with ``sort=False`` the view is left out;
        free axes and those of known order are sketched where they are many.
        """


def gap_of(
    away: Tensor, norms: tuple[Tensor, Tensor], errors: tuple[Tensor, Tensor]
) -> Gap:
    """The gap from one number for each site: differences, norms, allowed errors."""
    size = max(float(norm.norm()) for norm in norms)
    allowed = (errors[0] + errors[1]).clamp_min(1e-300)
    ratio = float((away / allowed).max()) if away.numel() else 0.0
    return Gap(float(away.norm()) / size if size > 0 else 0.0, ratio)


def hidden_share(norms: Tensor, errors: Tensor) -> float:
    """The largest share of a site's norm that rounding could hide, where it leaves anything."""
    alive = norms > errors
    return float((errors / norms)[alive].max()) if bool(alive.any()) else 0.0


@dataclass(frozen=True)
class Entries(Source):
    """A tensor that no matrix acts on.

    Attributes:
        value: ``[*axes]`` in the dtype of the weights; float64 a portion at a time.
        unit: relative error allowed in one entry.
        folded: size of what was folded into the tensor, whose rounding error came along: such a
            tensor has one error as a whole. None where entries are only moved, so that each has
            an error of its own.
    """

    value: Tensor
    unit: float
    folded: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """That of the tensor."""
        return self.value.device

    def gap(self, other: Self) -> Gap:
        """Entry by entry, or as a whole."""
        if self.folded is not None:
            away = (self.value.double() - other.value.double()).norm()
            return gap_of(away, (self._norm, other._norm), (self._error, other._error))
        size = max(float(self._norm), float(other._norm))
        # An entry near zero has the error of a tenth of a typical one.
        floor = 0.1 * float(self._norm + other._norm) / max(self.value.numel(), 1) ** 0.5
        unit = max(self.unit, other.unit)
        squares, ratio = 0.0, 0.0
        for x, y in zip(_portions(self.value), _portions(other.value), strict=True):
            away = (x - y).abs_()
            squares += float(away.square().sum())
            allowed = x.abs().add_(y.abs()).add_(floor).mul_(unit)
            ratio = max(ratio, float(away.div_(allowed.clamp_min_(1e-300)).max()))
        return Gap(squares**0.5 / size if size > 0 else 0.0, ratio)

    def hidden(self) -> float:
        """Nothing where entries are only moved."""
        return 0.0 if self.folded is None else hidden_share(self._norm, self._error)

    @cached_property
    def _norm(self) -> Tensor:
        squares = [x.square().sum() for x in _portions(self.value)]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(()).double()

    @property
    def _error(self) -> Tensor:
        """Of the whole."""
        assert self.folded is not None
        return self.unit * (self._norm + self.folded)

    def reorder(self, space: WeightSpace, axis: str, index: Tensor) -> Self:
        """The entries gathered."""
        if axis not in self.axes:
            return self
        return replace(self, value=gathered(space, self.value, self.axes, axis, index))

    def views(
        self, space: WeightSpace, axis: str, known: set[str], *, sort: bool
    ) -> list[Tensor]:
        """One for each time the axis stands in the tensor, and its diagonal."""
        at = [d for d, name in enumerate(self.axes) if name == axis]
        out = []
        for d in at:
            out.append(self._view(space, self.value, self.axes, d, known, sort))
        if len(at) == 2:
            names = [*(a for d, a in enumerate(self.axes) if d not in at), axis]
            diagonal = self.value.diagonal(dim1=at[0], dim2=at[1])
            out.append(self._view(space, diagonal, names, len(names) - 1, known, sort))
        return [view for view in out if view is not None]

    def _view(
        self,
        space: WeightSpace,
        value: Tensor,
        axes: Sequence[str],
        d: int,
        known: set[str],
        sort: bool,
    ) -> Tensor | None:
        front = [*(list(axes).index(a) for a in space.ancestors(axes[d])), d]
        blind = [e for e in unknown(space, axes, known) if e not in front]
        if blind and not sort:
            return None
        plain = [e for e in range(value.ndim) if e not in (*front, *blind)]
        value = value.permute(*front, *blind, *plain).unsqueeze(-1)
        value = value.flatten(len(front) + len(blind)).to(torch.float64, copy=True)
        if value.shape[-1] > WIDE:
            value = sketch(value, [value.ndim - 1], WIDE, self.name)
        return sorted_away(value, len(front), len(blind))


def unknown(space: WeightSpace, axes: Sequence[str], known: set[str]) -> list[int]:
    """Where perm axes of unknown order stand, inner axes first."""
    return [d for d in space.permuted_dims(axes) if axes[d] not in known]


def sorted_away(value: Tensor, front: int, blind: int) -> Tensor:
    """``[*front, *blind, *rest] → [*front, features]``, blind to the order of ``blind`` axes.

    Sorts in place.
    """
    for d in range(front, front + blind):
        value = sorted_along(value, d)
    return value.flatten(front)


def sorted_along(value: Tensor, dim: int) -> Tensor:
    """``value`` sorted along one axis, in place where that is faster."""
    if value.device.type != "cpu":
        return value.sort(dim=dim).values
    # NumPy sorts twice as fast on the CPU, and keeps no indices.
    value = value.contiguous()
    value.numpy().sort(axis=dim)
    return value


def gathered(
    space: WeightSpace, x: Tensor, axes: Sequence[str], axis: str, index: Tensor
) -> Tensor:
    """``x [*axes, …]`` with a perm axis gathered wherever it stands."""
    for dim, name in enumerate(axes):
        if name == axis:
            place = space.place(axes, dim, lead=0, batched=False)
            x = space.axes[axis].action.act(x, index, place)
    return x


def single(space: WeightSpace, weights: Mapping[str, Tensor]) -> Weights:
    """One network's tensors ``[*axes]``, from ``[1, 1, *axes]`` or ``[*axes]``; nothing copied."""
    return {name: weights[name].detach().reshape(shape) for name, shape in space.shapes.items()}


def in_float64(weights: Weights, only: Collection[str] | None = None) -> Weights:
    """The weights in float64; with ``only``, no more of them than those tensors."""
    return {n: w.double() if only is None or n in only else w for n, w in weights.items()}


def folded(space: WeightSpace, weights: Weights) -> Weights:
    """Weights without shifts (`fold`); those that take part in one come back in float64."""
    names = {n for s in space.shifts for n in (s.tensor, s.through, s.into) if n is not None}
    return fold(space, in_float64(weights, names))


def _portions(x: Tensor) -> Iterator[Tensor]:
    """The entries in float64, a few at a time: ``[PORTION]`` and what is left."""
    for part in x.reshape(-1).split(PORTION) if x.numel() else ():
        yield part.double()
