"""Structure of a weight space: how tensors carry axes, and the invariant products they form.

The products are derived from the axes. Axes on which matrices act are eliminated one after the
other: every plain tensor that carries the axis is joined with every dual one. Two tensors with one
such axis each give an invariant product. A tensor with two such axes (the reader behind an affine
norm) is first joined along one of them into a tensor with fewer, so that a product is never formed
along one axis while another could still change it. A space with a tensor that no product would
contain is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product
from math import prod
from typing import NamedTuple

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.actions import Action, Place
from transformer_nfn.spaces.axis import Axis, Shift, TensorSpec


class Move(NamedTuple):
    """An axis that an element changes: its name, its action, and its place in the tensor."""

    axis: str
    action: Action
    place: Place


class Moves(NamedTuple):
    """Moves of a tensor under an element: first matrices, then permutations.

    Inner axes are permuted before the axes they belong to, so that each is still at the index its
    permutation was stored for: ``(gx)[i, a] = x[τ(i), π_τ(i)(a)]``.
    """

    rebasing: tuple[Move, ...]
    permuting: tuple[Move, ...]


@dataclass(frozen=True)
class Product:
    """Invariant product of a plain and a dual tensor, contracted along the axis ``over``.

    For the paper's block these are ``W_Q·W_K`` = [WW]^(QK,s) and ``W_V·W_O`` = [WW]^(VO,s)
    (eq. 17). ``axes`` are those of the result: the axes ``over`` belongs to, then the rest of
    ``plain``, then the rest of ``dual``. A perm axis may occur in it twice (a permuted stream does
    in QK). Where the action splits ``over`` into pieces (the frequencies of rotary positions) each
    stays separate, so the result ends in extra free axes: the piece, and for complex scales
    (real, imaginary).

    >>> from transformer_nfn import spaces
    >>> [(p.name, p.axes) for p in spaces.multi_head(8, 2, 3, 4).products]
    [('W_Q·W_K', ('head', 'input', 'input')), ('W_V·W_O', ('head', 'input', 'feature'))]
    """

    name: str
    over: str
    plain: str
    dual: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Joined:
    """Two tensors contracted along ``over`` that other matrices still act on."""

    over: str
    plain: str
    dual: str
    spec: TensorSpec


@dataclass(frozen=True)
class Derivation:
    """The products derived from the axes of a space.

    Attributes:
        products: every invariant product.
        joined: intermediate tensors by name.
        left_out: pairs of tensors that cannot be joined, mostly because the result would carry
            one axis with matrices twice; such tensors enter products with others only.
    """

    products: tuple[Product, ...]
    joined: Mapping[str, Joined]
    left_out: tuple[tuple[str, str], ...]

    def made_of(self, *names: str) -> set[str]:
        """The tensors of the space from which tensors, or joined ones, are made."""
        out = set()
        for name in names:
            join = self.joined.get(name)
            out |= {name} if join is None else self.made_of(join.plain, join.dual)
        return out


@dataclass(frozen=True, eq=False)
class Layout:
    """Axes, tensors and shifts of a space, and what follows from them; see `WeightSpace`."""

    name: str
    axes: Mapping[str, Axis]
    tensors: Mapping[str, TensorSpec]
    shifts: tuple[Shift, ...] = ()

    def validate(self) -> None:
        """Raise `SpaceError` if the declaration contradicts itself."""
        for axis in self.axes.values():
            if axis.of is None:
                continue
            parent = self.axes.get(axis.of)
            if parent is None or not parent.action.permutes or axis.of == axis.name:
                raise SpaceError(
                    f"axis '{axis.name}' belongs to '{axis.of}', which is not a perm axis of "
                    f"space '{self.name}'"
                )
            if axis.name in self.ancestors(axis.of):
                raise SpaceError(f"axes '{axis.name}' and '{axis.of}' belong to each other")
        for spec in self.tensors.values():
            self._validate_tensor(spec)
        _validate_shifts(self)
        _ = self.derivation  # rejects a space with tensors that no invariant contains

    def _validate_tensor(self, spec: TensorSpec) -> None:
        for name in spec.axes:
            if name not in self.axes:
                raise SpaceError(f"tensor '{spec.name}' carries unknown axis '{name}'")
            axis = self.axes[name]
            if name in spec.dual and not axis.action.rebases:
                raise SpaceError(
                    f"tensor '{spec.name}' marks {axis.action.word} axis '{name}' as dual"
                )
            if spec.axes.count(name) > 2 and axis.action.permutes:
                raise SpaceError(f"tensor '{spec.name}' carries perm axis '{name}' three times")
            if spec.axes.count(name) > 1 and (axis.action.rebases or axis.of is not None):
                raise SpaceError(f"tensor '{spec.name}' carries axis '{name}' twice")
            for parent in self.ancestors(name):
                if spec.axes.count(parent) != 1:
                    raise SpaceError(
                        f"tensor '{spec.name}' carries axis '{name}' and so must carry "
                        f"'{parent}' once, found {spec.axes.count(parent)} times"
                    )

    def ancestors(self, axis: str) -> tuple[str, ...]:
        """The perm axes that ``axis`` belongs to, outermost first: ``('head',)`` for ``qk``."""
        chain: list[str] = []
        of = self.axes[axis].of
        while of is not None and of not in chain:
            chain.append(of)
            of = self.axes[of].of
        return tuple(reversed(chain))

    def innermost_first(self, axes: Sequence[str]) -> list[int]:
        """Positions in ``axes``, axes that belong to others before their owners."""
        return sorted(range(len(axes)), key=lambda d: -len(self.ancestors(axes[d])))

    def place(self, axes: Sequence[str], dim: int, *, lead: int, batched: bool) -> Place:
        """Place of the axis ``axes[dim]`` and its sites in a tensor ``[*lead, *axes, …]``."""
        owners = (lead + list(axes).index(a) for a in self.ancestors(axes[dim]))
        return Place(lead + dim, (*((0,) if batched else ()), *owners))

    def moves(self, axes: tuple[str, ...], lead: int, batched: bool) -> Moves:
        """Moves of a tensor ``[*lead, *axes, …]`` under an element, in order.

        Args:
            lead: number of axes before them.
            batched: whether there is one element for each index of the first leading axis.
        """
        # Cached: needed for every tensor, and planning costs more than moving a small network.
        key = axes, lead, batched
        if key not in self._moves:

            def move(dim: int) -> Move:
                place = self.place(axes, dim, lead=lead, batched=batched)
                return Move(axes[dim], self.axes[axes[dim]].action, place)

            self._moves[key] = Moves(
                tuple(move(dim) for dim, axis in enumerate(axes) if self.is_rebased(axis)),
                tuple(move(dim) for dim in self.permuted_dims(axes)),
            )
        return self._moves[key]

    @cached_property
    def _moves(self) -> dict[tuple[tuple[str, ...], int, bool], Moves]:
        return {}

    def is_permuted(self, axis: str) -> bool:
        """Whether permutations act on an axis."""
        return self.axes[axis].action.permutes

    def is_rebased(self, axis: str) -> bool:
        """Whether matrices act on an axis."""
        return self.axes[axis].action.rebases

    def is_free(self, axis: str) -> bool:
        """Whether nothing acts on an axis."""
        return not (self.is_permuted(axis) or self.is_rebased(axis))

    def permuted_dims(self, axes: Sequence[str]) -> list[int]:
        """Positions of perm axes in ``axes``, inner ones before the axes they belong to."""
        return [d for d in self.innermost_first(axes) if self.is_permuted(axes[d])]

    def free_axes(self, tensor: str) -> tuple[str, ...]:
        """The axes of a tensor on which nothing acts: ``('input',)`` for W_Q."""
        return tuple(a for a in self.tensors[tensor].axes if self.is_free(a))

    def rebased(self, tensor: str) -> tuple[str, ...]:
        """The axes of a tensor on which matrices act: ``('qk',)`` for W_Q."""
        return tuple(a for a in self.tensors[tensor].axes if self.is_rebased(a))

    @cached_property
    def rebased_axes(self) -> tuple[str, ...]:
        """Every axis on which matrices act."""
        return tuple(a for a in self.axes if self.is_rebased(a))

    @cached_property
    def twice_rebased(self) -> tuple[str, ...]:
        """The tensors on which matrices act along more than one axis."""
        return tuple(t for t in self.tensors if len(self.rebased(t)) > 1)

    def is_dual(self, tensor: str, axis: str) -> bool:
        """Whether a tensor carries an axis dual; False where plain and dual agree."""
        return axis in self.tensors[tensor].dual and not self.axes[axis].action.self_dual

    def carriers(self, axis: str, *, dual: bool) -> list[str]:
        """The tensors that carry an axis plain (or dual), except shifted ones."""
        return [
            name
            for name, spec in self.tensors.items()
            if axis in spec.axes and name not in self.shifted and self.is_dual(name, axis) == dual
        ]

    @cached_property
    def shifted(self) -> frozenset[str]:
        """The tensors that a shift may set to anything; they are zero once folded."""
        return frozenset(shift.tensor for shift in self.shifts)

    @cached_property
    def entry_tensors(self) -> tuple[str, ...]:
        """The tensors whose entries are at most permuted: neither matrices nor shifts act."""
        return tuple(t for t in self.tensors if t not in self.shifted and not self.rebased(t))

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor, without batch and channels."""
        return self.shapes[tensor]

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, without batch and channels."""
        return {
            name: tuple(self.axes[a].size for a in spec.axes)
            for name, spec in self.tensors.items()
        }

    @property
    def num_weights(self) -> int:
        """Number of weights of one network."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def products(self) -> tuple[Product, ...]:
        """The invariant products, derived from the axes (QK and VO in the paper's block)."""
        return self.derivation.products

    @cached_property
    def derivation(self) -> Derivation:
        """Derivation of the invariant products."""
        return _derive(self)

    @cached_property
    def products_separate(self) -> bool:
        """Whether equal products and other invariants imply equal functions."""
        rebased = (axis.action for axis in self.axes.values() if axis.action.rebases)
        return not self.derivation.left_out and all(action.separating for action in rebased)

    def spec(self, name: str) -> TensorSpec:
        """The axes of a tensor, or of an intermediate one of the derivation."""
        return self.tensors[name] if name in self.tensors else self.derivation.joined[name].spec


def _validate_shifts(layout: Layout) -> None:
    """Reject shifts that contradict the axes or each other: folding must be invariant."""
    for shift in layout.shifts:
        for tensor in (shift.tensor, shift.through, shift.into):
            if tensor is not None and tensor not in layout.tensors:
                raise SpaceError(f"a shift names tensor '{tensor}', unknown to '{layout.name}'")
    moved = [shift.tensor for shift in layout.shifts]
    for shift in layout.shifts:
        if moved.count(shift.tensor) > 1:
            raise SpaceError(f"tensor '{shift.tensor}' of space '{layout.name}' is shifted twice")
        if shift.through is not None and shift.into is not None:
            _validate_compensation(layout, shift, shift.through, shift.into)


def _validate_compensation(layout: Layout, shift: Shift, through: str, into: str) -> None:
    """``into − Σ c through`` must transform as ``into`` does."""
    moved = {s.tensor for s in layout.shifts}
    changed = moved | {s.into for s in layout.shifts}
    what = f"the shift of '{shift.tensor}' through '{through}' into '{into}'"
    if into in moved or through in changed:
        raise SpaceError(f"{what} uses a tensor that another shift changes")
    constant, via, target = (layout.tensors[name] for name in (shift.tensor, through, into))
    for spec in (constant, via, target):
        if len(set(spec.axes)) < len(spec.axes):
            raise SpaceError(f"{what} needs tensors that carry every axis once")
    for word in target.words():
        if word not in via.words() or word.rstrip("*") in constant.axes:
            raise SpaceError(
                f"{what} needs '{through}', but not '{shift.tensor}', to carry every axis of "
                f"'{into}' as it does, found '{word}'"
            )
    for axis in layout.rebased(through):
        if axis not in (*constant.axes, *target.axes):
            raise SpaceError(f"{what} would sum over '{axis}', on which matrices act")
    for axis in layout.rebased(shift.tensor):
        opposite = (axis in constant.dual) != (axis in via.dual)
        if axis not in via.axes or not (opposite or layout.axes[axis].action.self_dual):
            raise SpaceError(
                f"{what} could still change along '{axis}': one of the two must carry it plain, "
                "the other dual"
            )


class _Pair(NamedTuple):
    """A plain and a dual tensor, what joining them gives, and why that cannot be used, if so."""

    plain: TensorSpec
    dual: TensorSpec
    joined: TensorSpec
    fault: str | None


def _derive(layout: Layout) -> Derivation:
    """Every invariant product; shifted tensors are zero once folded and take no part."""
    pool = [t for n, t in layout.tensors.items() if n not in layout.shifted and layout.rebased(n)]
    products: list[Product] = []
    joined: dict[str, Joined] = {}
    left_out: list[tuple[str, str]] = []
    waiting = list(layout.rebased_axes)
    while waiting:
        # First the axis that leaves out the fewest tensors, then the fewest pairs.
        candidates = {axis: _pairs(layout, pool, axis) for axis in waiting}
        axis, pairs = min(candidates.items(), key=lambda item: _obstacles(item[1]))
        waiting.remove(axis)
        _reject_unseen(layout, pairs)
        made = []
        for plain, dual, spec, fault in pairs:
            if fault is not None:
                left_out.append((plain.name, dual.name))
            elif any(layout.is_rebased(a) for a in spec.axes):
                joined[spec.name] = Joined(axis, plain.name, dual.name, spec)
                made.append(spec)
            else:
                products.append(Product(spec.name, axis, plain.name, dual.name, spec.axes))
        pool = [t for t in pool if axis not in t.axes] + made
    return Derivation(tuple(products), joined, tuple(left_out))


def _pairs(layout: Layout, pool: list[TensorSpec], axis: str) -> list[_Pair]:
    carriers = [t for t in pool if axis in t.axes]
    candidates: Iterator[tuple[TensorSpec, TensorSpec]]
    if layout.axes[axis].action.self_dual:
        candidates = combinations_with_replacement(carriers, 2)
    else:
        plain = [t for t in carriers if axis not in t.dual]
        candidates = product(plain, [t for t in carriers if axis in t.dual])
    out = []
    for x, y in candidates:
        spec = _join(layout, x, y, axis)
        out.append(_Pair(x, y, spec, _fault(layout, spec, axis)))
    return out


def _join(layout: Layout, plain: TensorSpec, dual: TensorSpec, axis: str) -> TensorSpec:
    owners = layout.ancestors(axis)
    rest = [a for t in (plain, dual) for a in t.axes if a not in (axis, *owners)]
    name = "·".join(f"({t.name})" if "·" in t.name else t.name for t in (plain, dual))
    return TensorSpec(name, (*owners, *rest), (plain.dual | dual.dual) - {axis})


def _fault(layout: Layout, spec: TensorSpec, axis: str) -> str | None:
    """Reason why two tensors joined along ``axis`` cannot be used; None if they can."""
    names = list(spec.axes)
    rebased = [a for a in names if layout.is_rebased(a)]
    for twice in dict.fromkeys(a for a in rebased if rebased.count(a) > 1):
        return f"could still change along '{twice}', which it carries twice"
    if rebased and not layout.axes[axis].pieces.single:
        what = layout.axes[axis].action.describe(layout.axes[axis].size)
        return f"along '{axis}', on which {what} act, could still change along '{rebased[0]}'"
    for twice in dict.fromkeys(a for a in names if names.count(a) > 1 and layout.is_permuted(a)):
        if layout.axes[twice].of is not None:
            return f"would carry axis '{twice}', which belongs to another, twice"
        if any(twice in layout.ancestors(a) for a in names):
            return f"would carry axis '{twice}', to which another belongs, twice"
        if names.count(twice) > 2:
            return f"would carry perm axis '{twice}' more than twice"
    return None


def _obstacles(pairs: list[_Pair]) -> tuple[int, int]:
    return len(_unseen(pairs)), sum(pair.fault is not None for pair in pairs)


def _unseen(pairs: list[_Pair]) -> set[str]:
    """The tensors that have partners along an axis, but none that can be used."""
    usable = {t.name for pair in pairs if pair.fault is None for t in pair[:2]}
    return {t.name for pair in pairs for t in pair[:2]} - usable


def _reject_unseen(layout: Layout, pairs: list[_Pair]) -> None:
    unseen = _unseen(pairs)
    for plain, dual, spec, fault in pairs:
        for tensor in (plain, dual):
            if fault is not None and tensor.name in unseen:
                raise SpaceError(
                    f"no invariant of space '{layout.name}' would see '{tensor.name}': "
                    f"the product {spec.name} {fault}"
                )
