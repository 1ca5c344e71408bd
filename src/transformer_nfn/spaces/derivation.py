"""Which products of tensors can no re-basing change? Derived from the axes, never listed.

Axes on which matrices act are eliminated one after the other: every plain tensor that carries the
axis is joined with every dual one. What is left of two tensors with such an axis each is an
invariant product; a tensor with two such axes (the reader behind an affine norm) is first joined
along one of them into a tensor with fewer, so that a product is never formed along one axis while
another could still change it.
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
        left_out: pairs of tensors whose join carries one re-based axis twice, so that it has no
            end; such tensors are seen through their other partners only.
    """

    products: tuple[Product, ...]
    joined: Mapping[str, Joined]
    left_out: tuple[tuple[str, str], ...]


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
        made = []
        for plain, dual in _pairs(space, pool, axis):
            if _shared(space, plain, dual) - {axis}:
                left_out.append((plain.name, dual.name))
                continue
            spec = _join(space, plain, dual, axis)
            if any(space.is_rebased(a) for a in spec.axes):
                _refuse_pieces(space, spec, axis)
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


def _shared(space: WeightSpace, first: TensorSpec, second: TensorSpec) -> set[str]:
    return {a for a in first.axes if a in second.axes and space.is_rebased(a)}


def _obstacles(space: WeightSpace, pool: list[TensorSpec], axis: str) -> tuple[int, int]:
    """What speaks against eliminating an axis now: joins without an end, pieces carried on."""
    pairs = list(_pairs(space, pool, axis))
    endless = sum(bool(_shared(space, x, y) - {axis}) for x, y in pairs)
    onward = any(space.is_rebased(a) for x, y in pairs for a in (*x.axes, *y.axes) if a != axis)
    return endless, int(onward and space.axes[axis].pieces.count > 1)


def _join(space: WeightSpace, plain: TensorSpec, dual: TensorSpec, axis: str) -> TensorSpec:
    owners = space.ancestors(axis)
    rest = [a for t in (plain, dual) for a in t.axes if a not in (axis, *owners)]
    name = "·".join(f"({t.name})" if "·" in t.name else t.name for t in (plain, dual))
    spec = TensorSpec(name, (*owners, *rest), (plain.dual | dual.dual) - {axis})
    for twice in {a for a in rest if rest.count(a) > 1 and space.is_permuted(a)}:
        owned = any(twice in space.ancestors(a) for a in spec.axes)
        if space.axes[twice].of is not None or owned or rest.count(twice) > 2:
            raise SpaceError(
                f"the product {name} of space '{space.name}' would carry perm axis '{twice}' "
                "twice, which is understood only for an axis that belongs to no other, owns none, "
                "and stands in it at most twice"
            )
    return spec


def _refuse_pieces(space: WeightSpace, spec: TensorSpec, axis: str) -> None:
    if space.axes[axis].pieces.count > 1:
        other = next(a for a in spec.axes if space.is_rebased(a))
        raise SpaceError(
            f"the product {spec.name} of space '{space.name}' along '{axis}', on which "
            f"{space.axes[axis].action.describe(space.axes[axis].size)} act, could still change "
            f"along '{other}'; put the two axes on different tensors"
        )
