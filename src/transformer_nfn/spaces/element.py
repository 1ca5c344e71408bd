"""One element of a space's symmetry group: how it acts, composes and is undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError, SpaceError
from transformer_nfn.spaces.invariants import contract
from transformer_nfn.spaces.moves import Moves
from transformer_nfn.spaces.tensors import TensorSpec, Weights

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


@dataclass(frozen=True)
class Element:
    r"""A group element ``g``; make one with ``space.group.random()`` or ``space.group.element``.

    For the paper's block (eqs. 13, 14) ``g = (τ, M, N, π_O, π_A)`` with ``τ = perms["head"]``,
    ``M = linears["qk"].mT``, ``N = linears["vo"]``, ``π_O = perms["feature"]``,
    ``π_A = perms["neuron"]``. The group is a semidirect product: permuting heads moves the
    matrices too, so two elements do not multiply component by component.

    Attributes:
        space: the space acted on.
        perms: for each perm axis the indices gathered, ``[*batch, *ancestors, n]``.
        linears: for each axis on which matrices act, ``G``, ``[*batch, *ancestors, n, n]``.
        inverses: their inverses, kept so that undoing costs no accuracy.
        shifts: for each shifted tensor the constant added, ``[*batch, *axes]``.
        batch: None for one element, else how many there are.
    """

    space: WeightSpace
    perms: Mapping[str, Tensor]
    linears: Mapping[str, Tensor]
    inverses: Mapping[str, Tensor]
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    batch: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices (and shifts); float64 where there are none."""
        for tensor in (*self.linears.values(), *self.shifts.values()):
            return tensor.dtype
        return torch.float64

    @property
    def device(self) -> torch.device:
        """Where the element lives."""
        for tensor in (*self.perms.values(), *self.linears.values(), *self.shifts.values()):
            return tensor.device
        return torch.device("cpu")

    def act(self, weights: Mapping[str, Tensor]) -> Weights:
        """``gU``: new weights that compute the same function.

        Arithmetic runs in the wider of the two dtypes and is rounded to that of the weights.
        Differentiable in the weights. NaN passes through; `WeightSpace.check` finds it.

        Args:
            weights: ``[batch, channels, *axes]``; every channel is moved alike. Without batch
                and channels (``[*axes]``) an element that is not batched acts too.
        """
        space = self.space
        space.check(weights, finite=False, lead=None)
        first = next(iter(space.tensors))
        lead = weights[first].ndim - len(space.tensors[first].axes)
        self._check_fits(weights[first], lead)
        dtype = weights[first].dtype
        moved = self._shifted(weights, lead)
        out = {name: self._move(moved[name], spec, lead) for name, spec in space.tensors.items()}
        out = {name: w if w.dtype == dtype else w.to(dtype) for name, w in out.items()}
        if self.batch is None or weights[first].shape[0] == self.batch:
            return out
        # One network becomes many, also in tensors that nothing acts on.
        return {name: w.expand(self.batch, *w.shape[1:]) for name, w in out.items()}

    def _check_fits(self, sample: Tensor, lead: int) -> None:
        if sample.device != self.device:
            raise GroupError(
                f"weights are on {sample.device} but the group element is on {self.device}; "
                "move one with .to(device)"
            )
        if self.batch is None:
            return
        if lead == 0:
            raise SpaceError(
                f"{self.batch} group elements need weights with a batch axis, found none"
            )
        if sample.shape[0] not in (1, self.batch):
            raise SpaceError(
                f"axis 'batch': expected 1 or {self.batch} as in the group element, "
                f"found {sample.shape[0]}"
            )

    def _shifted(self, weights: Mapping[str, Tensor], lead: int) -> dict[str, Tensor]:
        out = dict(weights)
        for shift in self.space.shifts:
            constant = self.shifts[shift.tensor]
            if self.batch is not None:
                constant = constant.reshape(self.batch, *[1] * (lead - 1), *constant.shape[1:])
            out[shift.tensor] = out[shift.tensor] + constant
            if shift.into is not None and shift.through is not None:
                given = contract(self.space, shift, constant, weights[shift.through])
                out[shift.into] = out[shift.into] - given
        return out

    def _move(self, x: Tensor, spec: TensorSpec, lead: int) -> Tensor:
        """Matrices first, then permutations: ``Q_i ← Q_τ(i) M_τ(i)ᵀ``."""
        moves = self.space.moves(spec.axes, lead, self.batch is not None)
        for axis, action, place in moves.rebasing:
            dual = axis in spec.dual
            matrix = (self.inverses if dual else self.linears)[axis]
            if x.dtype != matrix.dtype:
                wide = torch.promote_types(x.dtype, matrix.dtype)
                x, matrix = x.to(wide), matrix.to(wide)
            x = action.act(x, matrix, place, dual=dual)
        return self._permute(x, moves)

    def _permute(self, x: Tensor, moves: Moves) -> Tensor:
        for axis, action, place in moves.permuting:
            x = action.act(x, self.perms[axis], place)
        return x

    def __matmul__(self, other: Element) -> Element:
        """``g @ h``: first ``h``, then ``g``; ``(g @ h).act(U) == g.act(h.act(U))``."""
        if self.space != other.space:
            raise GroupError(
                f"cannot compose elements of '{self.space.name}' and '{other.space.name}': "
                "the spaces differ"
            )
        if self.batch is not None and other.batch is not None and self.batch != other.batch:
            raise GroupError(f"cannot compose {self.batch} elements with {other.batch}")
        if self.device != other.device:
            raise GroupError(f"cannot compose elements on {self.device} and {other.device}")
        if self.dtype != other.dtype:
            raise GroupError(
                f"cannot compose elements of mixed dtypes: {self.dtype}, {other.dtype}"
            )
        batch = self.batch if self.batch is not None else other.batch
        g, h = self._expand(batch), other._expand(batch)
        undo = h.inverse()
        actions = {name: axis.action for name, axis in self.space.axes.items()}
        perms = {
            name: actions[name].compose(h.perms[name], undo.move_sites(part, name))
            for name, part in g.perms.items()
        }
        linears, inverses = {}, {}
        for name in g.linears:
            here, back = (undo.move_sites(part[name], name) for part in (g.linears, g.inverses))
            linears[name] = actions[name].compose(h.linears[name], here)
            inverses[name] = actions[name].compose(back, h.inverses[name])
        shifts = {
            name: h.shifts[name] + undo.move_constant(g.shifts[name], name) for name in g.shifts
        }
        return Element(self.space, perms, linears, inverses, shifts, batch)

    def inverse(self) -> Element:
        """The element that undoes this one."""
        perms = {
            name: self.move_sites(self.space.axes[name].action.invert(perm), name)
            for name, perm in self.perms.items()
        }
        linears = {name: self.move_sites(m, name) for name, m in self.inverses.items()}
        inverses = {name: self.move_sites(m, name) for name, m in self.linears.items()}
        shifts = {name: -self.move_constant(c, name) for name, c in self.shifts.items()}
        return Element(self.space, perms, linears, inverses, shifts, self.batch)

    def linear_part(self) -> Element:
        """This element without its shifts: what it does to differences of weights."""
        shifts = {name: torch.zeros_like(c) for name, c in self.shifts.items()}
        return Element(self.space, self.perms, self.linears, self.inverses, shifts, self.batch)

    def move_sites(self, x: Tensor, name: str) -> Tensor:
        """Moves what is given for each index of the ancestors of ``name`` along with them."""
        batched = self.batch is not None
        return self._permute(x, self.space.moves(self.space.ancestors(name), int(batched), batched))

    def move_constant(self, x: Tensor, tensor: str) -> Tensor:
        """Moves what is added to a tensor, ``[*batch, *axes]``, as the tensor itself moves."""
        return self._move(x, self.space.tensors[tensor], int(self.batch is not None))

    def _expand(self, batch: int | None) -> Element:
        if batch is None or self.batch is not None:
            return self
        return self._each(lambda t: t.expand(batch, *t.shape), batch)

    def _each(self, change: Callable[[Tensor], Tensor], batch: int | None) -> Element:
        perms, linears, inverses, shifts = (
            {name: change(t) for name, t in part.items()}
            for part in (self.perms, self.linears, self.inverses, self.shifts)
        )
        return Element(self.space, perms, linears, inverses, shifts, batch)

    def __getitem__(self, item: int) -> Element:
        """One element out of a batch of them."""
        if self.batch is None:
            raise GroupError("this is one group element, not a batch of them")
        return self._each(lambda t: t[item], None)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Element:
        """The same element on another device, or with matrices of another dtype."""
        return self._each(
            lambda t: t.to(device, dtype if t.dtype.is_floating_point else None), self.batch
        )

    def condition(self) -> dict[str, float]:
        """The largest condition number among the matrices of each axis."""
        return {
            name: float(torch.linalg.cond(m.double()).max()) for name, m in self.linears.items()
        }

    def inflation(self) -> float:
        """How many times the rounding error of a tensor may grow under the action, at most."""
        conditions = self.condition()
        return max(prod(conditions[a] for a in self.space.rebased(t)) for t in self.space.tensors)

    def __repr__(self) -> str:
        many = "one element" if self.batch is None else f"{self.batch} elements"
        worst = ", ".join(f"{name} {c:.3g}" for name, c in self.condition().items())
        return f"Element({many} of the group of '{self.space.name}'; condition: {worst or 'none'})"
