"""How are the tensors that E writes activated and summed over their places, without writing them?

At its largest level an entry of a tensor is ``W x_jk``, what the levels of one axis add is the same
along the other one, and what the level ∅ adds is the same everywhere: the sums of `pooled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.nn.activation import Activation
from transformer_nfn.nn.equivariant import Equivariant
from transformer_nfn.nn.pooled import pooled


@dataclass(frozen=True)
class _Share:
    """The rows of one tensor in the map of one level."""

    level: int
    axes: tuple[str, ...]
    rows: slice


class PooledTensors:
    """``Σ act(E(U))`` over all permuted axes, for the tensors without a linear axis.

    Args:
        equivariant: E, without gates and dictionaries.
        activation: acts before the sums.
    """

    def __init__(self, equivariant: Equivariant, activation: Activation) -> None:
        self.layers = (equivariant, activation)
        self.groups = equivariant.groups
        self.read = [m.level.family is None for m in equivariant.level_maps]
        self.shares: dict[str, list[_Share]] = {
            t.name: [] for t in equivariant.targets if t.family is None
        }
        for i, linear in enumerate(equivariant.level_maps):
            for target, start, width in linear.offsets():
                if target.name in self.shares:
                    share = _Share(i, linear.level.axes, slice(start, start + width))
                    self.shares[target.name].append(share)

    @staticmethod
    def fits(equivariant: Equivariant) -> bool:
        """Whether no tensor to be summed has places along more than two axes."""
        return all(len(t.perms) <= 2 for t in equivariant.targets if t.family is None)

    def __call__(self, terms: Sequence[Sequence[Tensor]], groups: slice) -> dict[str, Tensor]:
        """The sums of each tensor, ``[groups, e * free axes, batch]``.

        Args:
            terms: what E has gathered, by level, for some of its groups.
            groups: which ones.
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
