"""Which products of two tensors no re-basing can change: derived from the axes, never listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


@dataclass(frozen=True)
class Product:
    """A plain and a dual tensor contracted along the linear axis ``over``.

    For the paper's block these are ``W_Q·W_K`` = [WW]^(QK,s) and ``W_V·W_O`` = [WW]^(VO,s)
    (eq. 17). ``axes`` are those of the result: the axes ``over`` belongs to, then the rest of
    ``plain``, then the rest of ``dual``. A perm axis may stand in it twice (a permuted stream
    does in QK). Along an axis of complex form every frequency stays separate, so the result
    ends in two free axes more: frequency, and (real, imaginary).
    """

    name: str
    over: str
    plain: str
    dual: str
    axes: tuple[str, ...]


def derive_products(space: WeightSpace) -> tuple[Product, ...]:
    """Every contraction of a plain with a dual tensor over a linear axis of ``space``.

    Tensors that a shift may set to anything (`Shift.tensor`) say nothing once the shift is
    folded away, so they take no part.
    """
    silent = {shift.tensor for shift in space.shifts}
    out: list[Product] = []
    for axis in space.axes.values():
        if not axis.action.rebases:
            continue
        carriers = [
            t for t in space.tensors.values() if axis.name in t.axes and t.name not in silent
        ]
        shared = space.ancestors(axis.name)
        for plain in (t for t in carriers if axis.name not in t.dual):
            for dual in (t for t in carriers if axis.name in t.dual):
                drop = {axis.name, *shared}
                rest = [a for t in (plain, dual) for a in t.axes if a not in drop]
                name = f"{plain.name}·{dual.name}"
                out.append(Product(name, axis.name, plain.name, dual.name, (*shared, *rest)))
    return tuple(out)
