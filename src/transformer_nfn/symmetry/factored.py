"""An invariant product that is never formed: two factors, with norms and sketches of them.

A product of two factors of width D is a D × D matrix for each head. Its norm, its distance from
another one and its scalar product with a rank-one matrix need the factors alone: ``L Rᵀ`` with
``L = Q_L T_L`` and ``R = Q_R T_R`` has the norm of ``T_L T_Rᵀ``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from transformer_nfn.spaces import Product, Weights, WeightSpace
from transformer_nfn.spaces.weights import factors, tensor_value
from transformer_nfn.symmetry.sketch import multiply_sketches, sketch
from transformer_nfn.symmetry.sources import (
    Entries,
    Gap,
    Source,
    gap_of,
    gathered,
    hidden_share,
    in_float64,
    sorted_away,
    unknown,
)

SKETCH = 32
"""Numbers that stand for the free axes of a product."""


@dataclass(frozen=True)
class Factored(Source):
    """A product ``Σ_k left · right`` for each site and piece.

    Attributes:
        rounding: allowed rounding error (Frobenius norm) at each site.
        sites: names of the axes that both factors run along together (heads).
        left: ``[*sites, *axes of its own, pieces, k]``; ``left_axes`` names its own axes.
        right: likewise. Complex where the action is.
    """

    rounding: Tensor
    sites: tuple[str, ...]
    left_axes: tuple[str, ...]
    right_axes: tuple[str, ...]
    left: Tensor
    right: Tensor

    @property
    def device(self) -> torch.device:
        """That of the factors."""
        return self.left.device

    @cached_property
    def norms(self) -> Tensor:
        """Norm of the product at each site."""
        return self._norm(self.left, self.right)

    def gap(self, other: Self) -> Gap:
        """By the norm of the difference at each site."""
        left = torch.cat([self.left, other.left], -1)
        away = self._norm(left, torch.cat([self.right, -other.right], -1))
        return gap_of(away, (self.norms, other.norms), (self.rounding, other.rounding))

    def hidden(self) -> float:
        """In the product of any head."""
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
        """Both factors gathered."""
        if axis not in self.axes:
            return self
        return replace(
            self,
            left=gathered(space, self.left, (*self.sites, *self.left_axes), axis, index),
            right=gathered(space, self.right, (*self.sites, *self.right_axes), axis, index),
            rounding=gathered(space, self.rounding, self.sites, axis, index),
        )

    def views(
        self, space: WeightSpace, axis: str, known: set[str], *, sort: bool
    ) -> list[Tensor]:
        """One for each time the axis stands in the product, and its diagonal."""
        at = [d for d, name in enumerate(self.axes) if name == axis]
        out = [self._view(space, [d], known, sort) for d in at]
        if len(at) == 2:
            out.append(self._view(space, at, known, sort))
        return [view for view in out if view is not None]

    def _view(
        self, space: WeightSpace, at: list[int], known: set[str], sort: bool
    ) -> Tensor | None:
        """The product with the axes at ``at`` (one, or two as a diagonal) in front."""
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
            own = range(start, start + len(names))
            start += len(names)
            plain = [first + i for i, d in enumerate(own) if d not in kept]
            values.append(sketch(factor, plain, SKETCH, f"{self.name} {side}"))
            words.append("".join(letters[d] for d in (*range(first), *own) if d in kept))
        front = [*owners, at[0]]
        rest = [d for d in range(first) if d not in (*front, *blind)]
        out = "".join(letters[d] for d in (*front, *blind, *rest))
        value = multiply_sketches(values[0], values[1], (words[0], words[1]), out)
        return sorted_away(value, len(front), len(blind))


def sources(space: WeightSpace, weights: Weights, unit: float) -> list[Source]:
    """Everything about (folded) weights that only permutations move.

    Args:
        space: the space of the weights.
        weights: one network, ``[*axes]``; what is multiplied becomes float64.
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
    """Norms of what was folded into a bias: its rounding error came along."""
    total = torch.zeros((), dtype=torch.float64, device=weights[name].device)
    for shift in space.shifts:
        if shift.into == name and shift.through is not None:
            total = total + weights[shift.through].double().norm()
    return total


def _factored(space: WeightSpace, weights: Weights, product: Product, unit: float) -> Factored:
    sites = space.ancestors(product.over)
    weights = in_float64(weights, space.derivation.made_of(product.plain, product.dual))
    left, right = factors(space, weights, product)
    own = [
        tuple(a for a in space.spec(name).axes if a not in (*sites, product.over))
        for name in (product.plain, product.dual)
    ]
    # Entry (x, y) of the product has an allowed error of u·√(Σ_k q²_xk k²_yk); its Frobenius
    # norm over all entries needs the column norms alone.
    squares = [_column_sums(space, weights, n, product.over) for n in (product.plain, product.dual)]
    error = unit * (squares[0] * squares[1]).sum(-1).sqrt()
    return Factored(product.name, product.axes, error, sites, own[0], own[1], left, right)


def _column_sums(space: WeightSpace, weights: Weights, name: str, over: str) -> Tensor:
    """Sums of squares over all axes but the contracted one and its owners."""
    axes = space.spec(name).axes
    value = tensor_value(space, weights, name)
    order = [axes.index(a) for a in (*space.ancestors(over), over)]
    rest = [d for d in range(len(axes)) if d not in order]
    value = value.permute(*order, *rest)
    if not rest:
        return value.square()
    norms: Tensor = torch.linalg.vector_norm(value.flatten(len(order)), dim=-1)
    return norms.square()
