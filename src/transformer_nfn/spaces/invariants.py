"""What no group element can change: folded biases, and the products of plain with dual tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.spaces.derivation import Product
from transformer_nfn.spaces.tensors import TensorSpec, Weights

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


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
        ``[*lead, *which.axes]``; where the contracted axis falls into pieces (frequencies,
        scales) each stays separate, ``[*lead, *which.axes, pieces]``, and complex products have
        real and imaginary part last, ``[*lead, *which.axes, n/2, 2]``.
    """
    left, right = factors(space, weights, which)
    count = len(space.ancestors(which.over))
    lead = weights[which.plain].ndim - len(space.tensors[which.plain].axes) + count
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    own_x, own_y = ("".join(next(letters) for _ in range(f.ndim - lead - 2)) for f in (left, right))
    shared = "".join(next(letters) for _ in range(count))
    equation = f"...{shared}{own_x}YZ,...{shared}{own_y}YZ->...{shared}{own_x}{own_y}Y"
    value = torch.einsum(equation, left, right)
    if value.is_complex():
        return torch.view_as_real(value)
    return value if space.axes[which.over].pieces.count > 1 else value.squeeze(-1)


def factors(
    space: WeightSpace, weights: Mapping[str, Tensor], which: Product
) -> tuple[Tensor, Tensor]:
    """The two sides of a product, each ``[*lead, *ancestors, *rest, pieces, k]``.

    Multiplied entry by entry and summed over ``k`` they give `product`.
    """
    out = []
    for name, dual in ((which.plain, False), (which.dual, True)):
        spec = space.tensors[name]
        lead = weights[name].ndim - len(spec.axes)
        first = [*space.ancestors(which.over)]
        rest = [a for a in range(len(spec.axes)) if spec.axes[a] not in (*first, which.over)]
        order = [*(spec.position(a) for a in first), *rest, spec.position(which.over)]
        x = weights[name].permute(*range(lead), *(lead + d for d in order))
        out.append(space.axes[which.over].action.vectors(x, dual=dual))
    return out[0], out[1]


def products(space: WeightSpace, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every invariant product of the (folded) weights, by name."""
    folded = fold(space, weights)
    return {p.name: product(space, folded, p) for p in space.products}


def contract(constant: Tensor, spec: TensorSpec, through: Tensor, via: TensorSpec) -> Tensor:
    """``Σ c W`` over every axis of the constant: what the bias it moves into must lose."""
    letters = {
        axis: chr(ord("a") + i) for i, axis in enumerate(dict.fromkeys(spec.axes + via.axes))
    }
    left = "".join(letters[a] for a in spec.axes)
    right = "".join(letters[a] for a in via.axes)
    rest = "".join(letters[a] for a in via.axes if a not in spec.axes)
    wide = torch.promote_types(constant.dtype, through.dtype)
    return torch.einsum(f"...{left},...{right}->...{rest}", constant.to(wide), through.to(wide))
