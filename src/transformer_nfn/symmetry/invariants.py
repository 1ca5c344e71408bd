"""What no group element can change: folded biases, and the products of plain with dual tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from transformer_nfn.spaces import Product, Weights, WeightSpace
from transformer_nfn.symmetry.element import contract
from transformer_nfn.symmetry.forms import as_complex


def fold(space: WeightSpace, weights: Mapping[str, Tensor]) -> Weights:
    """Weights of the same function with every shifted bias moved out and set to zero.

    ``b_K → 0`` and ``b_V → 0`` with ``b_O → b_O + Σ b_V W_O``: afterwards no shift is left, so
    ``fold(gU) == g.linear_part() fold(U)``. Weights of a space without shifts come back as
    they are.
    """
    out = dict(weights)
    for shift in space.shifts:
        if shift.into is not None and shift.through is not None:
            given = contract(
                weights[shift.tensor],
                space.tensors[shift.tensor],
                weights[shift.through],
                space.tensors[shift.through],
            )
            out[shift.into] = out[shift.into] + given
        out[shift.tensor] = torch.zeros_like(out[shift.tensor])
    return out


def product(space: WeightSpace, weights: Mapping[str, Tensor], which: Product) -> Tensor:
    """One invariant product (eq. 17), e.g. ``[WW]^(QK,s) = W_Q,s W_K,sᵀ``.

    Returns:
        ``[*lead, *which.axes]``; along an axis of complex form every frequency stays separate,
        ``[*lead, *which.axes, n/2, 2]`` with real and imaginary part of ``q k̄`` last.
    """
    plain, dual = space.tensors[which.plain], space.tensors[which.dual]
    x, y = weights[which.plain], weights[which.dual]
    shared = space.ancestors(which.over)
    names: dict[tuple[int, str], str] = {}
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    for side, spec in enumerate((plain, dual)):
        for axis in spec.axes:
            key = (2, axis) if axis in shared or axis == which.over else (side, axis)
            if key not in names:
                names[key] = next(letters)

    def word(side: int, axes: tuple[str, ...]) -> str:
        return "".join(names.get((2, a), names.get((side, a), "")) for a in axes)

    left = [a for a in plain.axes if a not in shared and a != which.over]
    right = [a for a in dual.axes if a not in shared and a != which.over]
    out = word(2, shared) + word(0, tuple(left)) + word(1, tuple(right))
    equation = f"...{word(0, plain.axes)},...{word(1, dual.axes)}->...{out}"
    if space.axes[which.over].form == "general":
        return torch.einsum(equation, x, y)
    lead_x, lead_y = x.ndim - len(plain.axes), y.ndim - len(dual.axes)
    zx = as_complex(x.movedim(lead_x + plain.position(which.over), -1))
    zy = as_complex(y.movedim(lead_y + dual.position(which.over), -1))
    over = names[(2, which.over)]
    lhs = word(0, tuple(a for a in plain.axes if a != which.over)) + over
    rhs = word(1, tuple(a for a in dual.axes if a != which.over)) + over
    z = torch.einsum(f"...{lhs},...{rhs}->...{out}{over}", zx, zy.conj())
    return torch.view_as_real(z)


def products(space: WeightSpace, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every invariant product of the (folded) weights, by name."""
    folded = fold(space, weights)
    return {p.name: product(space, folded, p) for p in space.products}
