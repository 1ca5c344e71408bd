"""Invariants of an equivariant layer's output, computed without writing Q, K, V, O.

The layer E maps Q linearly, ``Q'_e = Φ_e Q``, and so K, V and O; for one input channel the
invariant products of its output follow from those of its input, ``Q'_e K'_eᵀ = Φ_e (Q Kᵀ) Ψ_eᵀ``
(heads summed). An invariant layer that reads them with Θ reads the input's product with
``Σ_e Φ_eᵀ Θ_e Ψ_e``, a matrix shared by the batch. Tensors without a linear axis are activated and
summed without being written either: at the largest level an entry is ``W x_jk``, the levels of one
axis add a constant along the other one, and the level ∅ adds a constant (`pooled`). Function and
parameters are those of the two layers in sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.nn.gather import run_gathers
from transformer_nfn.nn.layers import Activation, Equivariant, Invariant, enter
from transformer_nfn.nn.pooled import pooled
from transformer_nfn.spaces import Product


@dataclass(frozen=True)
class _Rows:
    """The rows of one tensor in the map of one level."""

    level: int
    axes: tuple[str, ...]
    rows: slice


class PooledTensors:
    """``Σ act(E(U))`` over all permuted axes, for the tensors without a linear axis.

    Args:
        equivariant: E, without gates and dictionaries.
        activation: applied before the sums.
    """

    def __init__(self, equivariant: Equivariant, activation: Activation) -> None:
        self.layers = (equivariant, activation)
        self.groups = equivariant.groups
        self.read = [m.level.family is None for m in equivariant.level_maps]
        self.shares: dict[str, list[_Rows]] = {
            t.name: [] for t in equivariant.targets if t.family is None
        }
        for i, linear in enumerate(equivariant.level_maps):
            for target, start, width in linear.offsets():
                if target.name in self.shares:
                    share = _Rows(i, linear.level.axes, slice(start, start + width))
                    self.shares[target.name].append(share)

    @staticmethod
    def fits(equivariant: Equivariant) -> bool:
        """Whether every tensor to be summed has at most two permuted axes."""
        return all(len(t.perms) <= 2 for t in equivariant.targets if t.family is None)

    def __call__(self, terms: Sequence[Sequence[Tensor]], groups: slice) -> dict[str, Tensor]:
        """The sums of each tensor, ``[groups, e * free axes, batch]``.

        Args:
            terms: terms of E by level, for some of its groups.
        """
        inputs: dict[int, Tensor] = {}
        weights: dict[int, Tensor] = {}
        constants: dict[str, Tensor] = {}
        for i, linear in enumerate(self.layers[0].level_maps):
            if not self.read[i]:
                continue
            x = linear.stack(terms[i], (groups.stop - groups.start,))
            if linear.level.axes:
                inputs[i] = x
                weights[i] = self._of_groups(linear.scaled_weight(), groups)
                continue
            assert linear.bias is not None
            x = x * linear.scale[:, None] if linear.scaled else x
            bias = self._of_groups(linear.bias.unsqueeze(-1), groups)
            y = torch.baddbmm(bias, self._of_groups(linear.weight, groups), x)
            for target, part in zip(
                linear.level.targets, torch.split(y, linear.widths, 1), strict=True
            ):
                constants[target.name] = part
        return {name: self._sum(name, inputs, weights, constants[name]) for name in self.shares}

    def _of_groups(self, x: Tensor, groups: slice) -> Tensor:
        """Parameters ``[groups, …]`` of some groups."""
        x = x.view(self.groups, *x.shape[-2:])
        return x if groups.stop - groups.start == self.groups else x[groups]

    def _sum(
        self,
        name: str,
        inputs: dict[int, Tensor],
        weights: dict[int, Tensor],
        constant: Tensor,
    ) -> Tensor:
        fn = self.layers[1].fn
        shares = [share for share in self.shares[name] if share.axes]
        if not shares:
            return fn(constant)
        largest, *others = shares
        x = inputs[largest.level]
        if len(largest.axes) == 1:
            x = x.unsqueeze(-2)
        a, c = constant.unsqueeze(-1), None
        for share in others:
            part = _product(weights[share.level][:, share.rows], inputs[share.level])
            if share.axes == largest.axes[:1]:
                a = a + part
            else:
                c = part
        a = a.expand(*a.shape[:-1], x.shape[-2])
        return pooled(fn, weights[largest.level][:, largest.rows], x, a, c)


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """``[groups, m, q]`` by ``[groups, q, *places]``."""
    return torch.bmm(weight, x.flatten(2)).view(*weight.shape[:2], *x.shape[2:])


@dataclass(frozen=True)
class _Share:
    """Rows of one tensor and columns of one member of its family in a map of E."""

    level: int
    rows: slice
    columns: slice
    factor: float
    shape: tuple[int, ...]
    sliced: bool


class ReadThrough(nn.Module):
    """``invariant(activation(equivariant(U)))`` for a layer with one input channel per group.

    Has no parameters; `ReadThrough.fits` checks whether two layers allow it.

    Args:
        equivariant: E, with one input channel.
        activation: between the two, never on tensors with a linear axis.
        invariant: I, reading the channels that E writes.

    >>> from transformer_nfn import spaces
    >>> space = spaces.attention_block(4, 2, 2, 2, 3)
    >>> layers = Equivariant(space, 1, 5), Activation(space), Invariant(space, 5, 6)
    >>> U = space.randn(3)
    >>> torch.allclose(ReadThrough(*layers)(U), nn.Sequential(*layers)(U), atol=1e-5)
    True
    """

    def __init__(
        self, equivariant: Equivariant, activation: Activation, invariant: Invariant
    ) -> None:
        super().__init__()
        space = equivariant.space
        self.layers = (equivariant, activation, invariant)  # a tuple, so not registered twice
        self.sums = PooledTensors(equivariant, activation)
        self.shares = {
            t.name: _shares(equivariant, t.name) for t in equivariant.targets if t.family
        }
        self.products = {p.name: p for p in space.products}
        terms = invariant.map.level.terms
        self.widths = [term.features * invariant.map.in_channels for term in terms]
        self.groups = equivariant.groups
        self.known = {
            g.term.source.name: (i, j)
            for i, row in enumerate(equivariant.plan)
            for j, g in enumerate(row)
            if g.term.source.name in self.products and not g.term.kept
        }

    @staticmethod
    def fits(equivariant: Equivariant, invariant: Invariant) -> bool:
        """Whether the products of E's output follow from those of its input."""
        space = equivariant.space
        return (
            equivariant.in_channels == equivariant.groups == invariant.groups
            and invariant.space == space
            and not (equivariant.gated or equivariant.quadratic or invariant.quadratic)
            and equivariant.rank is None
            and invariant.rank is None
            and not space.shifts
            and all(axis.action.reads_through(axis.size) for axis in space.axes.values())
            and not any(t.pattern for t in invariant.map.level.terms)
            and PooledTensors.fits(equivariant)
        )

    def forward(self, *parts: Mapping[str, Tensor]) -> Tensor:
        """``[batch, n]`` from weights ``[batch, groups, *axes]``.

        Args:
            parts: the weights, or several that hold the groups in order and are read one after
                the other: less memory, more calls.
        """
        linear = self.layers[2].map
        assert linear.bias is not None
        bias, weight = linear.bias.view(self.groups, linear.fan_out, 1), self._weight()
        out, first = [], 0
        for weights in parts:
            groups = slice(first, first + next(iter(weights.values())).shape[1])
            features = self._features(weights, groups)
            out.append(torch.baddbmm(bias[groups], weight[groups], features))
            first = groups.stop
        if first != self.groups:
            raise SpaceError(f"the layers read {self.groups} channels, the weights have {first}")
        return torch.cat(out).flatten(0, 1).t()

    def _features(self, weights: Mapping[str, Tensor], groups: slice) -> Tensor:
        """Inputs of the invariant layer: sums over E's output, products of E's input.

        ``[groups, features, batch]``.
        """
        equivariant, _, invariant = self.layers
        number = groups.stop - groups.start
        inputs = enter(equivariant.space, weights, number, equivariant)
        terms = run_gathers(equivariant.plan, inputs, None, self.sums.read)
        sums = self.sums(terms, groups)
        names = [g.term.source.name for g in invariant.plan[0]]
        features = [sums[name] for name in names if name not in self.products]
        for name in self.products:
            x = self._product(name, inputs, terms)
            features.append(x.reshape(number, x.shape[:-1].numel() // number, x.shape[-1]))
        return torch.cat(features, 1)

    def _weight(self) -> Tensor:
        """The invariant layer's matrix for `_features`: Θ, and Θ pulled back through E."""
        linear = self.layers[2].map
        theta = linear.weight.view(self.groups, linear.fan_out, linear.fan_in)
        columns = torch.split(theta, self.widths, 2)
        plain = []
        pulled: dict[str, Tensor] = {}
        for term, theta in zip(linear.level.terms, columns, strict=True):
            product = self.products.get(term.source.name)
            if product is None:
                plain.append(theta * term.scale if term.scale != 1 else theta)
                continue
            for name, matrix in self._pull_back(product, theta, term.scale).items():
                pulled[name] = pulled[name] + matrix if name in pulled else matrix
        return torch.cat([*plain, *(pulled[name] for name in self.products)], -1)

    def _product(
        self, name: str, weights: Mapping[str, Tensor], terms: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """A pooled product of the input, from E's terms where they include it."""
        if name in self.known:
            level, place = self.known[name]
            return terms[level][place]
        gathers = self.layers[2].plan[0]
        gather = next(g for g in gathers if g.term.source.name == name)
        return gather.run(weights, None, ())

    def _pull_back(self, product: Product, theta: Tensor, scale: float) -> dict[str, Tensor]:
        """``Σ_e Φ_eᵀ Θ_e Ψ_e`` for every product of the input that contributes to this one."""
        groups, out = theta.shape[:2]
        plain, dual = self._effective(product.plain), self._effective(product.dual)
        e, n_x = next(iter(plain.values())).shape[1:3]
        n_y = next(iter(dual.values())).shape[2]
        theta = theta.view(groups, out, e, n_x, n_y)
        pulled = {}
        for y_name, psi in dual.items():
            half = torch.einsum("gnepr,gerj->gepnj", theta, psi if scale == 1 else psi * scale)
            for x_name, phi in plain.items():
                name = f"{x_name}·{y_name}"
                i, j = phi.shape[3], psi.shape[3]
                left = phi.reshape(groups, e * n_x, i).mT
                matrix = torch.bmm(left, half.reshape(groups, e * n_x, out * j))
                matrix = matrix.view(groups, i, out, j).transpose(1, 2)
                pulled[name] = matrix.reshape(groups, out, i * j)
        return pulled

    def _effective(self, tensor: str) -> dict[str, Tensor]:
        """Linear dependence of a pooled output tensor on the pooled tensors of its family.

        ``[groups, e, out, in]``.
        """
        effective: dict[str, Tensor] = {}
        for member, shares in self.shares[tensor].items():
            for share in shares:
                part: Tensor = self.layers[0].level_maps[share.level].weight
                if share.sliced:
                    part = part[..., share.rows, share.columns]
                part = part.reshape(self.groups, *share.shape)
                part = part * share.factor if share.factor != 1 else part
                effective[member] = effective[member] + part if member in effective else part
        return effective


def _shares(equivariant: Equivariant, tensor: str) -> dict[str, list[_Share]]:
    out: dict[str, list[_Share]] = {}
    for i, linear in enumerate(equivariant.level_maps):
        for target, row, rows in linear.offsets():
            if target.name != tensor:
                continue
            # The result of a level is repeated along axes it lacks.
            spread = prod(target.sizes[a] for a in target.perms if a not in linear.level.axes)
            column = 0
            for term in linear.level.terms:
                columns = term.features * linear.in_channels
                shape = (linear.out_channels, target.features, columns)
                share = _Share(
                    i,
                    slice(row, row + rows),
                    slice(column, column + columns),
                    term.scale * spread,
                    shape,
                    (rows, columns) != (linear.fan_out, linear.fan_in),
                )
                out.setdefault(term.source.name, []).append(share)
                column += columns
    return out
