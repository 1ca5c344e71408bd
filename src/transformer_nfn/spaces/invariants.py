"""What no group element can change: folded biases, and the products of plain with dual tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.spaces.derivation import Joined, Product
from transformer_nfn.spaces.tensors import Shift, Weights

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
            given = contract(space, shift, weights[shift.tensor], weights[shift.through])
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
    value = multiply(left, right, leading_axes(space, weights) + len(space.ancestors(which.over)))
    if value.is_complex():
        return torch.view_as_real(value)
    return value.squeeze(-1) if space.axes[which.over].pieces.whole else value


def factors(
    space: WeightSpace, weights: Mapping[str, Tensor], which: Product | Joined
) -> tuple[Tensor, Tensor]:
    """The two sides of a product, each ``[*lead, *ancestors, *rest, pieces, k]``.

    Multiplied along ``k`` (`multiply`) they give the product; complex for complex scales.
    """
    lead, owners = leading_axes(space, weights), space.ancestors(which.over)
    out = []
    for name, dual in ((which.plain, False), (which.dual, True)):
        axes = space.spec(name).axes
        rest = [d for d, a in enumerate(axes) if a not in (*owners, which.over)]
        order = [*(axes.index(a) for a in owners), *rest, axes.index(which.over)]
        value = tensor_value(space, weights, name)
        x = value.permute(*range(lead), *(lead + d for d in order))
        out.append(space.axes[which.over].action.vectors(x, dual=dual))
    return out[0], out[1]


def tensor_value(space: WeightSpace, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of the space, or one that the derivation of its products joins from several."""
    if name in space.tensors:
        return weights[name]
    join = space.derivation.joined[name]
    sites = leading_axes(space, weights) + len(space.ancestors(join.over))
    return multiply(*factors(space, weights, join), sites).squeeze(-1)


def multiply(left: Tensor, right: Tensor, sites: int) -> Tensor:
    """``[*sites, *x, pieces, k], [*sites, *y, pieces, k] → [*sites, *x, *y, pieces]``."""
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW")
    first = "".join(next(letters) for _ in range(sites))
    x, y = ("".join(next(letters) for _ in range(f.ndim - sites - 2)) for f in (left, right))
    return torch.einsum(f"{first}{x}YZ,{first}{y}YZ->{first}{x}{y}Y", left, right)


def leading_axes(space: WeightSpace, weights: Mapping[str, Tensor]) -> int:
    """How many axes stand before those of the space: batch and channels, or none."""
    name, spec = next(iter(space.tensors.items()))
    return weights[name].ndim - len(spec.axes)


def products(space: WeightSpace, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every invariant product of the (folded) weights, by name."""
    folded = fold(space, weights)
    return {p.name: product(space, folded, p) for p in space.products}


def contract(space: WeightSpace, shift: Shift, constant: Tensor, through: Tensor) -> Tensor:
    """``Σ c W`` over every axis that the bias it moves into lacks: what that bias must lose."""
    if shift.through is None or shift.into is None:
        raise ValueError(f"nothing takes up the shift of '{shift.tensor}'")
    own, via, into = (space.tensors[t].axes for t in (shift.tensor, shift.through, shift.into))
    letters = {a: chr(ord("a") + i) for i, a in enumerate(dict.fromkeys((*own, *via)))}
    left, right, rest = ("".join(letters[a] for a in axes) for axes in (own, via, into))
    wide = torch.promote_types(constant.dtype, through.dtype)
    return torch.einsum(f"...{left},...{right}->...{rest}", constant.to(wide), through.to(wide))
