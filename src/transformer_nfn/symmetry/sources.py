"""What a comparison looks at: every invariant quantity of a network, with its rounding error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from transformer_nfn.spaces import Product, Weights, WeightSpace, product

ROUNDING = 16.0
"""Differences up to this many expected rounding errors count as none."""


def rounding_unit(dtype: torch.dtype) -> float:
    """The relative error to expect in one weight.

    Weights kept in float64 have usually come through a few steps of float64 arithmetic, each
    with its own error; narrower ones were rounded once, at the end.
    """
    return torch.finfo(dtype).eps / 2 * (16 if dtype == torch.float64 else 1)


@dataclass(frozen=True)
class Source:
    """A tensor without linear axes, or an invariant product, of one network.

    Attributes:
        name: of the tensor or product.
        value: shape ``[*axes, *rest]``, float64.
        axes: names of the axes (a frequency and its parts may follow).
        sites: how many of the first axes have an error of their own (heads do; all axes of a
            tensor whose entries are only moved).
        error: expected rounding error, Frobenius norm for each site, ``value.shape[:sites]``.
    """

    name: str
    value: Tensor
    axes: tuple[str, ...]
    sites: int
    error: Tensor

    def select(self, axis: str, index: Tensor) -> Source:
        """The source with an axis gathered, wherever it stands."""
        value, error = self.value, self.error
        for dim, name in enumerate(self.axes):
            if name == axis:
                value = value.index_select(dim, index)
                if dim < self.sites:
                    error = error.index_select(dim, index)
        return replace(self, value=value, error=error)

    def norms(self) -> Tensor:
        """Frobenius norm of each site."""
        return _norms(self.value, self.sites)

    @property
    def entrywise(self) -> bool:
        """Whether every entry has an error of its own."""
        return self.sites == self.value.ndim


def _norms(value: Tensor, sites: int) -> Tensor:
    if sites == value.ndim:
        return value.abs()
    norms: Tensor = torch.linalg.vector_norm(value.flatten(sites), dim=-1)
    return norms


def single(space: WeightSpace, weights: Mapping[str, Tensor]) -> Weights:
    """One network's tensors ``[*axes]`` in float64, from ``[1, 1, *axes]`` or ``[*axes]``."""
    out = {}
    for name, spec in space.tensors.items():
        w = weights[name].detach()
        out[name] = w.reshape(w.shape[w.ndim - len(spec.axes) :]).double()
    return out


def sources(space: WeightSpace, weights: Weights, unit: float) -> list[Source]:
    """Everything about (folded) weights that only permutations move.

    Args:
        space: the space of the weights.
        weights: one network, ``[*axes]`` in float64.
        unit: relative error to expect in one weight, see `rounding_unit`.
    """
    touched = {shift.into for shift in space.shifts}
    out = []
    for name in space.entry_tensors:
        spec = space.tensors[name]
        value = weights[name]
        if name in touched:
            error = unit * (value.norm() + _folded_size(space, weights, name))
            out.append(Source(name, value, spec.axes, 0, error))
        else:
            # Entries are only moved, so each has an error of its own.
            error = unit * (value.abs() + 0.1 * value.square().mean().sqrt())
            out.append(Source(name, value, spec.axes, value.ndim, error))
    for p in space.products:
        out.append(_product_source(space, weights, p, unit))
    return out


def _folded_size(space: WeightSpace, weights: Weights, name: str) -> Tensor:
    """Norms of what was folded into a bias: its rounding error came along."""
    total = weights[name].new_zeros(())
    for shift in space.shifts:
        if shift.into == name and shift.through is not None:
            total = total + weights[shift.through].norm()
    return total


def _product_source(space: WeightSpace, weights: Weights, p: Product, unit: float) -> Source:
    value = product(space, weights, p)
    sites = len(space.ancestors(p.over))
    squares = {p.plain: weights[p.plain].square(), p.dual: weights[p.dual].square()}
    # Entry (x, y) of the product has an expected error of u·√(Σ_k q²_xk k²_yk); its Frobenius
    # norm over all entries needs the column norms alone.
    left, right = (_column_sums(space, squares[t], t, p.over) for t in (p.plain, p.dual))
    error = unit * (left * right).sum(-1).sqrt()
    return Source(p.name, value, p.axes, sites, error)


def _column_sums(space: WeightSpace, x: Tensor, tensor: str, over: str) -> Tensor:
    spec = space.tensors[tensor]
    keep = [*space.ancestors(over), over]
    order = [spec.position(a) for a in keep]
    rest = [d for d in range(x.ndim) if d not in order]
    return x.permute(*order, *rest).flatten(len(order)).sum(-1) if rest else x.permute(*order)


def ratio(u: Source, v: Source) -> float:
    """How many allowed rounding errors two aligned sources are apart; up to 1 is no difference."""
    difference = _norms(u.value - v.value, u.sites)
    allowed = ROUNDING * (u.error + v.error)
    worst = torch.where(difference > 0, difference / allowed.clamp_min(1e-300), 0.0)
    return float(worst.max())


def difference(u: Source, v: Source) -> float:
    """The relative difference of two aligned sources, ``‖u − v‖ / max(‖u‖, ‖v‖)``."""
    size = max(float(u.value.norm()), float(v.value.norm()))
    return float((u.value - v.value).norm()) / size if size > 0 else 0.0


def resolution(given: list[Source]) -> float:
    """The largest relative difference that rounding could hide in any product of any head."""
    worst = 0.0
    for source in (s for s in given if not s.entrywise):
        norms = source.norms()
        alive = norms > ROUNDING * source.error
        if bool(alive.any()):
            worst = max(worst, float((ROUNDING * source.error / norms)[alive].max()))
    return worst
