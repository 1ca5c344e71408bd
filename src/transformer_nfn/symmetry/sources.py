"""Invariant quantities of a network with their rounding errors, as compared by `compare`.

A *source* is a tensor on which no matrix acts (`Entries`), or an invariant product (`Factored`).
Products are never formed: a product of two factors of width D is a D × D matrix for each head, but
its norm, its distance from another one and its scalar product with a rank-one matrix need the
factors only: ``L Rᵀ`` with ``L = Q_L T_L`` and ``R = Q_R T_R`` has the norm of ``T_L T_Rᵀ``.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.spaces import Product, Weights, WeightSpace, fold
from transformer_nfn.spaces.weights import factors, tensor_value

WIDE = 64
"""Largest number of features of an index; more are sketched."""
PORTION = 2**18
"""Number of entries converted to float64 at a time."""
SKETCH = 32
"""Numbers that represent the free axes of a product."""


@dataclass(frozen=True)
class Gap:
    """Distance of two aligned sources.

    Attributes:
        relative: ``‖u − v‖ / max(‖u‖, ‖v‖)``.
        ratio: the same in units of the allowed error, at the worst site; at most 1 if equal.
    """

    relative: float
    ratio: float


@dataclass(frozen=True)
class Source(ABC):
    """An invariant quantity of one network, changed by permutations only.

    Attributes:
        name: of the tensor or product.
        axes: names of its axes.
    """

    name: str
    axes: tuple[str, ...]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the values."""

    @abstractmethod
    def gap(self, other: Self) -> Gap:
        """Distance from another network's source in the same order."""

    @abstractmethod
    def hidden(self) -> float:
        """The largest relative difference at one site that rounding may hide."""

    @abstractmethod
    def reorder(self, space: WeightSpace, axis: str, index: Tensor) -> Self:
        """The source with ``axis`` gathered by ``index [*ancestors, n]``."""

    def views(
        self, space: WeightSpace, axis: str, known: set[str], *, sort: bool
    ) -> list[Tensor]:
        """Features of each index of ``axis``: ``[*ancestors, n, features]``.

        One for each occurrence of the axis, and its diagonal. Perm axes of unknown order are
        sorted, or with ``sort=False`` the view is left out; free axes and those of known order are
        sketched where they are large.
        """
        at = [d for d, name in enumerate(self.axes) if name == axis]
        out = [self._view(space, [d], known, sort) for d in at]
        if len(at) == 2:
            out.append(self._view(space, at, known, sort))
        return [view for view in out if view is not None]

    @abstractmethod
    def _view(
        self, space: WeightSpace, at: list[int], known: set[str], sort: bool
    ) -> Tensor | None:
        """The view with the axes at ``at`` (one, or two as a diagonal) in front."""


def gap_of(
    distance: Tensor, norms: tuple[Tensor, Tensor], errors: tuple[Tensor, Tensor]
) -> Gap:
    """The gap from differences, norms and allowed errors of each site."""
    size = max(float(norm.norm()) for norm in norms)
    allowed = (errors[0] + errors[1]).clamp_min(1e-300)
    ratio = float((distance / allowed).max()) if distance.numel() else 0.0
    return Gap(float(distance.norm()) / size if size > 0 else 0.0, ratio)


def hidden_share(norms: Tensor, errors: Tensor) -> float:
    """The largest share of a site's norm that rounding may hide, over sites above rounding."""
    alive = norms > errors
    return float((errors / norms)[alive].max()) if bool(alive.any()) else 0.0


@dataclass(frozen=True)
class Entries(Source):
    """A tensor on which no matrix acts.

    Attributes:
        value: ``[*axes]`` in the dtype of the weights.
        unit: relative error allowed in one entry.
        folded: norm of what was folded into the tensor, with its rounding error: such a tensor has
            one error in total. None where entries are only permuted, so that each has its own.
    """

    value: Tensor
    unit: float
    folded: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.value.device

    def gap(self, other: Self) -> Gap:
        if self.folded is not None:
            distance = (self.value.double() - other.value.double()).norm()
            return gap_of(distance, (self._norm, other._norm), (self._error, other._error))
        size = max(float(self._norm), float(other._norm))
        # An entry near zero is allowed the error of a tenth of a typical one.
        floor = 0.1 * float(self._norm + other._norm) / max(self.value.numel(), 1) ** 0.5
        unit = max(self.unit, other.unit)
        squares, ratio = 0.0, 0.0
        for x, y in zip(_portions(self.value), _portions(other.value), strict=True):
            distance = (x - y).abs_()
            squares += float(distance.square().sum())
            allowed = x.abs().add_(y.abs()).add_(floor).mul_(unit)
            ratio = max(ratio, float(distance.div_(allowed.clamp_min_(1e-300)).max()))
        return Gap(squares**0.5 / size if size > 0 else 0.0, ratio)

    def hidden(self) -> float:
        return 0.0 if self.folded is None else hidden_share(self._norm, self._error)

    @cached_property
    def _norm(self) -> Tensor:
        squares = [x.square().sum() for x in _portions(self.value)]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(()).double()

    @property
    def _error(self) -> Tensor:
        assert self.folded is not None
        return self.unit * (self._norm + self.folded)

    def reorder(self, space: WeightSpace, axis: str, index: Tensor) -> Self:
        if axis not in self.axes:
            return self
        return replace(self, value=gathered(space, self.value, self.axes, axis, index))

    def _view(
        self, space: WeightSpace, at: list[int], known: set[str], sort: bool
    ) -> Tensor | None:
        value, axes, d = self.value, self.axes, at[0]
        if len(at) == 2:
            axes = (*(a for e, a in enumerate(axes) if e not in at), axes[d])
            value, d = value.diagonal(dim1=at[0], dim2=at[1]), len(axes) - 1
        front = [*(axes.index(a) for a in space.ancestors(axes[d])), d]
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
    """Positions of perm axes of unknown order, inner axes first."""
    return [d for d in space.permuted_dims(axes) if axes[d] not in known]


def sorted_away(value: Tensor, front: int, blind: int) -> Tensor:
    """``[*front, *blind, *rest] → [*front, features]``, sorted (in place) along ``blind`` axes."""
    for d in range(front, front + blind):
        value = sorted_along(value, d)
    return value.flatten(front)


def sorted_along(value: Tensor, dim: int) -> Tensor:
    """``value`` sorted along one axis, in place where that is faster."""
    if value.device.type != "cpu":
        return value.sort(dim=dim).values
    # NumPy sorts twice as fast on the CPU and stores no indices.
    value = value.contiguous()
    value.numpy().sort(axis=dim)
    return value


def gathered(
    space: WeightSpace, x: Tensor, axes: Sequence[str], axis: str, index: Tensor
) -> Tensor:
    """``x [*axes, …]`` with every occurrence of a perm axis gathered."""
    for dim, name in enumerate(axes):
        if name == axis:
            place = space.place(axes, dim, lead=0, batched=False)
            x = space.axes[axis].action.act(x, index, place)
    return x


def single(space: WeightSpace, weights: Mapping[str, Tensor]) -> Weights:
    """One network's tensors ``[*axes]``, from ``[1, 1, *axes]`` or ``[*axes]``, as views."""
    return {name: weights[name].detach().reshape(shape) for name, shape in space.shapes.items()}


def in_float64(weights: Weights, only: Collection[str] | None = None) -> Weights:
    """The weights in float64; with ``only``, just those tensors."""
    return {n: w.double() if only is None or n in only else w for n, w in weights.items()}


def folded(space: WeightSpace, weights: Weights) -> Weights:
    """Weights without shifts (`fold`); tensors involved in one are returned in float64."""
    names = {n for s in space.shifts for n in (s.tensor, s.through, s.into) if n is not None}
    return fold(space, in_float64(weights, names))


def _portions(x: Tensor) -> Iterator[Tensor]:
    """The entries in float64, at most ``PORTION`` at a time."""
    for part in x.reshape(-1).split(PORTION) if x.numel() else ():
        yield part.double()


@dataclass(frozen=True)
class Factored(Source):
    """A product ``Σ_k left · right`` for each site and piece.

    Attributes:
        rounding: allowed rounding error (Frobenius norm) at each site.
        sites: names of the axes that both factors share (heads).
        left: ``[*sites, *left_axes, pieces, k]``, complex where the action is.
        right: ``[*sites, *right_axes, pieces, k]``.
    """

    rounding: Tensor
    sites: tuple[str, ...]
    left_axes: tuple[str, ...]
    right_axes: tuple[str, ...]
    left: Tensor
    right: Tensor

    @property
    def device(self) -> torch.device:
        return self.left.device

    @cached_property
    def norms(self) -> Tensor:
        """Norm of the product at each site."""
        return self._norm(self.left, self.right)

    def gap(self, other: Self) -> Gap:
        left = torch.cat([self.left, other.left], -1)
        distance = self._norm(left, torch.cat([self.right, -other.right], -1))
        return gap_of(distance, (self.norms, other.norms), (self.rounding, other.rounding))

    def hidden(self) -> float:
        return hidden_share(self.norms, self.rounding)

    def between(self, i: int, j: int) -> float:
        """Norm of the difference of two sites of this product (with one axis of sites)."""
        left = torch.cat([self.left[i], self.left[j]], -1)
        right = torch.cat([self.right[i], -self.right[j]], -1)
        return float(self._norm(left.unsqueeze(0), right.unsqueeze(0)))

    def _norm(self, left: Tensor, right: Tensor) -> Tensor:
        sites = len(self.sites)
        triangles = []
        for factor in (left, right):
            # [*sites, pieces, rows, k]
            x = factor.flatten(sites, -3) if factor.ndim > sites + 2 else factor.unsqueeze(-3)
            triangles.append(torch.linalg.qr(x.movedim(-2, -3), mode="r").R)
        core = triangles[0] @ triangles[1].mT
        norms: Tensor = torch.linalg.vector_norm(core, dim=(-3, -2, -1))
        return norms

    def reorder(self, space: WeightSpace, axis: str, index: Tensor) -> Self:
        if axis not in self.axes:
            return self
        return replace(
            self,
            left=gathered(space, self.left, (*self.sites, *self.left_axes), axis, index),
            right=gathered(space, self.right, (*self.sites, *self.right_axes), axis, index),
            rounding=gathered(space, self.rounding, self.sites, axis, index),
        )

    def _view(
        self, space: WeightSpace, at: list[int], known: set[str], sort: bool
    ) -> Tensor | None:
        owners = [self.axes.index(a) for a in space.ancestors(self.axes[at[0]])]
        blind = [d for d in unknown(space, self.axes, known) if d not in (*owners, *at)]
        if blind and not sort:
            return None
        first = len(self.sites)
        kept = {*range(first), *owners, *at, *blind}
        letters = {d: chr(ord("a") + d) for d in kept}
        for d in at:
            letters[d] = letters[at[0]]
        words, values, start = [], [], first
        for side, factor, names in (
            ("left", self.left, self.left_axes),
            ("right", self.right, self.right_axes),
        ):
            dims = range(start, start + len(names))
            start += len(names)
            plain = [first + i for i, d in enumerate(dims) if d not in kept]
            values.append(sketch(factor, plain, SKETCH, f"{self.name} {side}"))
            words.append("".join(letters[d] for d in (*range(first), *dims) if d in kept))
        front = [*owners, at[0]]
        rest = [d for d in range(first) if d not in (*front, *blind)]
        out = "".join(letters[d] for d in (*front, *blind, *rest))
        value = multiply_sketches(values[0], values[1], (words[0], words[1]), out)
        return sorted_away(value, len(front), len(blind))


def sources(space: WeightSpace, weights: Weights, unit: float) -> list[Source]:
    """All invariants of (folded) weights that only permutations change.

    Args:
        weights: one network, ``[*axes]``; factors of products are converted to float64.
        unit: relative error allowed in one weight, see `allowed_error`.
    """
    touched = {shift.into for shift in space.shifts}
    out: list[Source] = []
    for name in space.entry_tensors:
        folded = _folded_size(space, weights, name) if name in touched else None
        out.append(Entries(name, space.tensors[name].axes, weights[name], unit, folded))
    for product in space.products:
        out.append(_factored(space, weights, product, unit))
    return out


def _folded_size(space: WeightSpace, weights: Weights, name: str) -> Tensor:
    """Norm of what was folded into a bias, for its rounding error."""
    total = torch.zeros((), dtype=torch.float64, device=weights[name].device)
    for shift in space.shifts:
        if shift.into == name and shift.through is not None:
            total = total + weights[shift.through].double().norm()
    return total


def _factored(space: WeightSpace, weights: Weights, product: Product, unit: float) -> Factored:
    sites = space.ancestors(product.over)
    weights = in_float64(weights, space.derivation.made_of(product.plain, product.dual))
    left, right = factors(space, weights, product)
    rest = [
        tuple(a for a in space.spec(name).axes if a not in (*sites, product.over))
        for name in (product.plain, product.dual)
    ]
    # Entry (x, y) of the product has an allowed error of u·√(Σ_k q²_xk k²_yk); its Frobenius
    # norm over all entries needs the column norms only.
    squares = [_column_sums(space, weights, n, product.over) for n in (product.plain, product.dual)]
    error = unit * (squares[0] * squares[1]).sum(-1).sqrt()
    return Factored(product.name, product.axes, error, sites, rest[0], rest[1], left, right)


def _column_sums(space: WeightSpace, weights: Weights, name: str, over: str) -> Tensor:
    """Sums of squares over all axes except the contracted one and its owners."""
    axes = space.spec(name).axes
    value = tensor_value(space, weights, name)
    order = [axes.index(a) for a in (*space.ancestors(over), over)]
    rest = [d for d in range(len(axes)) if d not in order]
    value = value.permute(*order, *rest)
    if not rest:
        return value.square()
    norms: Tensor = torch.linalg.vector_norm(value.flatten(len(order)), dim=-1)
    return norms.square()


def directions(key: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """Fixed pseudo-random directions ``[rows, columns]``, the same on every machine.

    >>> directions("key", 2, 3, torch.zeros(())).shape
    torch.Size([2, 3])
    """
    state = np.random.RandomState(zlib.crc32(key.encode()))
    noise = state.standard_normal((rows, columns))
    return torch.as_tensor(noise, dtype=like.dtype, device=like.device)


def sketch(x: Tensor, dims: Sequence[int], columns: int, key: str) -> Tensor:
    """``x`` with the axes ``dims`` projected to one last axis of ``columns`` numbers.

    Number r is the scalar product with ``u_r ⊗ v_r ⊗ …``, one fixed vector for each axis, so the
    sketch of a product of two factors follows from the sketch of each. Without ``dims`` the last
    axis has size 1.

    >>> sketch(torch.ones(2, 5, 6), [1, 2], 4, "key").shape
    torch.Size([2, 4])
    """
    if not dims:
        return x.unsqueeze(-1)
    vectors = {d: directions(f"{key} {i}", x.shape[d], columns, x) for i, d in enumerate(dims)}
    # The longest axis goes first, by a matrix product: the rest is small.
    order = sorted(dims, key=lambda d: x.shape[d])
    x = x.movedim(order, list(range(-len(order), 0)))
    x = x @ vectors[order.pop()]
    while order:
        x = torch.einsum("...nr,nr->...r", x, vectors[order.pop()])
    return x


def multiply_sketches(left: Tensor, right: Tensor, words: tuple[str, str], out: str) -> Tensor:
    """The sketch of a product from those of its factors, direction by direction.

    Args:
        left: ``[*axes, pieces, k, columns]``, with one letter for each of ``axes`` in
            ``words[0]``; 1 column if there was nothing to sketch.
        right: likewise, with ``words[1]``.
        words: letters of the axes of both.
        out: letters of the axes of the result, ``[*out, pieces, columns]``.

    Returns:
        A real tensor; complex pieces have real and imaginary part as two.
    """
    sides = []
    for x, word in zip((left, right), words, strict=True):
        # A side without columns is not expanded in memory.
        alone = x.shape[-1] == 1
        sides.append((x.squeeze(-1), f"{word}YZ") if alone else (x, f"{word}YZX"))
    many = any(word.endswith("X") for _, word in sides)
    (x, first), (y, second) = sides
    value = torch.einsum(f"{first},{second}->{out}Y{'X' * many}", x, y)
    value = value if many else value.unsqueeze(-1)
    if value.is_complex():
        value = torch.view_as_real(value).movedim(-1, -2).flatten(-3, -2)
    return value
