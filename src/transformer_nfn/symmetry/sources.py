"""What a comparison looks at: every invariant quantity of a network, with its rounding error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from transformer_nfn.spaces import Weights, WeightSpace
from transformer_nfn.symmetry.sketch import sketch

ROUNDING = 16.0
"""Differences up to this many expected rounding errors count as none."""
WIDE = 64
"""So many numbers describe an index at most; more are sketched."""


def rounding_unit(dtype: torch.dtype) -> float:
    """The relative error to expect in one weight.

    Weights kept in float64 have usually come through a few steps of float64 arithmetic, each
    with its own error; narrower ones were rounded once, at the end.
    """
    return torch.finfo(dtype).eps / 2 * (16 if dtype == torch.float64 else 1)


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
    def error(self) -> Tensor:
        """Expected rounding error for each *site*: a head of a product, an entry of a tensor."""

    @property
    @abstractmethod
    def norms(self) -> Tensor:
        """Frobenius norm of each site."""

    @abstractmethod
    def apart(self, other: Self) -> Tensor:
        """Frobenius norm of the difference of two aligned sources, for each site."""

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


@dataclass(frozen=True)
class Entries(Source):
    """A tensor that no matrix acts on.

    Attributes:
        value: ``[*axes]`` in float64.
        unit: relative error to expect in one entry.
        folded: size of what was folded into the tensor, whose rounding error came along: such a
            tensor has one error as a whole. None where entries are only moved, so that each has
            an error of its own.
    """

    value: Tensor
    unit: float
    folded: Tensor | None = None

    @property
    def error(self) -> Tensor:
        """Of each entry, or of the whole."""
        if self.folded is not None:
            whole: Tensor = self.unit * (self.value.norm() + self.folded)
            return whole
        typical = float(self.value.norm()) / max(self.value.numel(), 1) ** 0.5
        return self.value.abs().add_(0.1 * typical).mul_(self.unit)

    @property
    def norms(self) -> Tensor:
        """Of each entry, or of the whole."""
        return self.value if self.folded is None else self.value.norm()

    def apart(self, other: Self) -> Tensor:
        """Differences of entries, or one norm."""
        away = self.value - other.value
        return away.abs_() if self.folded is None else away.norm()

    def reorder(self, space: WeightSpace, axis: str, index: Tensor) -> Self:
        """The entries gathered, with their errors."""
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
        value = value.flatten(len(front) + len(blind))
        if value.shape[-1] > WIDE:
            value = sketch(value, [value.ndim - 1], WIDE, self.name)
        return sorted_away(value, len(front), len(blind))


def unknown(space: WeightSpace, axes: Sequence[str], known: set[str]) -> list[int]:
    """Where perm axes of unknown order stand, inner axes first.

    Each moves on its own only while the axis it belongs to stands still.
    """
    return [
        d
        for d in space.innermost_first(axes)
        if space.is_permuted(axes[d]) and axes[d] not in known
    ]


def sorted_away(value: Tensor, front: int, blind: int) -> Tensor:
    """``[*front, *blind, *rest] → [*front, features]``, blind to the order of ``blind`` axes."""
    for d in range(front, front + blind):
        value = value.sort(dim=d).values
    return value.flatten(front)


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
    """One network's tensors ``[*axes]`` in float64, from ``[1, 1, *axes]`` or ``[*axes]``."""
    out = {}
    for name, spec in space.tensors.items():
        w = weights[name].detach()
        out[name] = w.reshape(w.shape[w.ndim - len(spec.axes) :]).double()
    return out


def ratio(u: Source, v: Source, away: Tensor) -> float:
    """How many allowed rounding errors two aligned sources are apart; up to 1 is no difference.

    ``away`` is ``u.apart(v)``.
    """
    allowed = u.error.add(v.error).mul_(ROUNDING).clamp_min_(1e-300)
    return float(torch.div(away, allowed, out=allowed).max()) if allowed.numel() else 0.0


def difference(u: Source, v: Source, away: Tensor) -> float:
    """The relative difference of two aligned sources, ``‖u − v‖ / max(‖u‖, ‖v‖)``."""
    size = max(float(u.norms.norm()), float(v.norms.norm()))
    return float(away.norm()) / size if size > 0 else 0.0
