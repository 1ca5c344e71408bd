"""Which products of tensors can no re-basing change? Derived from the axes, never listed.

Axes on which matrices act are eliminated one after the other: every plain tensor that carries the
axis is joined with every dual one. What is left of two tensors with such an axis each is an
invariant product; a tensor with two such axes (the reader behind an affine norm) is first joined
along one of them into a tensor with fewer, so that a product is never formed along one axis while
another could still change it. A tensor that no such product would see makes the space refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import TYPE_CHECKING

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.tensors import TensorSpec

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


Pair = tuple[TensorSpec, TensorSpec, TensorSpec]
"""A plain tensor, a dual one, and what joining them gives."""


@dataclass(frozen=True)
class Product:
    """A plain and a dual tensor contracted along the axis ``over``.

    For the paper's block these are ``W_Q·W_K`` = [WW]^(QK,s) and ``W_V·W_O`` = [WW]^(VO,s)
    (eq. 17). ``axes`` are those of the result: the axes ``over`` belongs to, then the rest of
    ``plain``, then the rest of ``dual``. A perm axis may stand in it twice (a permuted stream
    does in QK). Where the action cuts ``over`` into pieces (the frequencies of rotary positions)
    each stays separate, so the result ends in free axes more: the piece, and for complex scales
    (real, imaginary).
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
    """What was derived from the axes of a space.

    Attributes:
        products: every invariant product.
        joined: the tensors that were made on the way, by name.
        left_out: pairs of tensors that cannot be joined, for the most part because the result
            would carry one re-based axis twice; such tensors are seen through others only.
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


def derive(space: WeightSpace) -> Derivation:
    """Every invariant product of ``space``.

    Tensors that a shift may set to anything (`Shift.tensor`) say nothing once the shift is
    folded away, so they take no part.
    """
    pool = [t for n, t in space.tensors.items() if n not in space.shifted and space.rebased(n)]
    products: list[Product] = []
    joined: dict[str, Joined] = {}
    left_out: list[tuple[str, str]] = []
    waiting = [a for a in space.axes if space.is_rebased(a)]
    while waiting:
        axis = min(waiting, key=lambda a: (*_obstacles(space, pool, a), waiting.index(a)))
        waiting.remove(axis)
        pairs = [(x, y, _join(space, x, y, axis)) for x, y in _pairs(space, pool, axis)]
        faults = [_fault(space, spec, axis) for _, _, spec in pairs]
        _refuse_unseen(space, pairs, faults)
        made = []
        for (plain, dual, spec), fault in zip(pairs, faults, strict=True):
            if fault is not None:
                left_out.append((plain.name, dual.name))
            elif any(space.is_rebased(a) for a in spec.axes):
                joined[spec.name] = Joined(axis, plain.name, dual.name, spec)
                made.append(spec)
            else:
                products.append(Product(spec.name, axis, plain.name, dual.name, spec.axes))
        pool = [t for t in pool if axis not in t.axes] + made
    return Derivation(tuple(products), joined, tuple(left_out))


def _pairs(
    space: WeightSpace, pool: list[TensorSpec], axis: str
) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    carriers = [t for t in pool if axis in t.axes]
    if space.axes[axis].action.self_dual:
        return combinations_with_replacement(carriers, 2)
    plain = [t for t in carriers if axis not in t.dual]
    return product(plain, [t for t in carriers if axis in t.dual])


def _join(space: WeightSpace, plain: TensorSpec, dual: TensorSpec, axis: str) -> TensorSpec:
    owners = space.ancestors(axis)
    rest = [a for t in (plain, dual) for a in t.axes if a not in (axis, *owners)]
    name = "·".join(f"({t.name})" if "·" in t.name else t.name for t in (plain, dual))
    return TensorSpec(name, (*owners, *rest), (plain.dual | dual.dual) - {axis})


def _fault(space: WeightSpace, spec: TensorSpec, axis: str) -> str | None:
    """Why two tensors joined along ``axis`` cannot be used; None if they can."""
    names = list(spec.axes)
    rebased = [a for a in names if space.is_rebased(a)]
    for twice in dict.fromkeys(a for a in rebased if rebased.count(a) > 1):
        return f"could still change along '{twice}', which it carries twice"
    if rebased and not space.axes[axis].pieces.whole:
        what = space.axes[axis].action.describe(space.axes[axis].size)
        return f"along '{axis}', on which {what} act, could still change along '{rebased[0]}'"
    for twice in dict.fromkeys(a for a in names if names.count(a) > 1 and space.is_permuted(a)):
        if space.axes[twice].of is not None:
            return f"would carry axis '{twice}', which belongs to another, twice"
        if any(twice in space.ancestors(a) for a in names):
            return f"would carry axis '{twice}', to which another belongs, twice"
        if names.count(twice) > 2:
            return f"would carry perm axis '{twice}' more than twice"
    return None


def _obstacles(space: WeightSpace, pool: list[TensorSpec], axis: str) -> tuple[int, int]:
    """What speaks against eliminating an axis now: unseen tensors, pairs left out."""
    pairs = [(x, y, _join(space, x, y, axis)) for x, y in _pairs(space, pool, axis)]
    faults = [_fault(space, spec, axis) for _, _, spec in pairs]
    return len(_unseen(pairs, faults)), sum(fault is not None for fault in faults)


def _unseen(pairs: list[Pair], faults: list[str | None]) -> set[str]:
    """The tensors that have partners along an axis, but none that can be used."""
    everyone = {t.name for x, y, _ in pairs for t in (x, y)}
    return everyone - {
        t.name
        for (x, y, _), fault in zip(pairs, faults, strict=True)
        if fault is None
        for t in (x, y)
    }


def _refuse_unseen(space: WeightSpace, pairs: list[Pair], faults: list[str | None]) -> None:
    unseen = _unseen(pairs, faults)
    for (x, y, spec), fault in zip(pairs, faults, strict=True):
        for tensor in (x, y):
            if fault is not None and tensor.name in unseen:
                raise SpaceError(
                    f"no invariant of space '{space.name}' would see '{tensor.name}': "
                    f"the product {spec.name} {fault}"
                )
