"""The symmetry group of a weight space, and its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError, SpaceError
from transformer_nfn.spaces.actions import MAX_CONDITION, Action, Drawing, Size
from transformer_nfn.spaces.axis import TensorSpec, Weights
from transformer_nfn.spaces.layout import Layout, Moves
from transformer_nfn.spaces.weights import check_weights, contract, leading_axes

WORST_CONDITION = 1e12
"""Beyond it double precision keeps less than four digits of what a matrix acts on."""


@dataclass(frozen=True)
class Element:
    r"""A group element ``g``; make one with ``space.group.random()``.

    For the paper's block (eqs. 13, 14) ``g = (τ, M, N, π_O, π_A)`` with ``τ = perms["head"]``,
    ``M = linears["qk"].mT``, ``N = linears["vo"]``, ``π_O = perms["feature"]``,
    ``π_A = perms["neuron"]``. The group is a semidirect product: permuting heads moves the
    matrices too, so two elements do not multiply component by component.

    Attributes:
        space: the space acted on.
        perms: for each perm axis the indices gathered, ``[*batch, *ancestors, n]``.
        linears: for each axis on which matrices act, ``G``, ``[*batch, *ancestors, n, n]``.
        inverses: their inverses, kept so that inverting costs no accuracy.
        shifts: for each shifted tensor the constant added, ``[*batch, *axes]``.
        batch: number of elements; None for a single one.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(8, 2, 3, 4)
    >>> g = space.group.random(torch.Generator().manual_seed(0))
    >>> U = space.randn(batch=1, dtype=torch.float64)
    >>> restored = g.inverse().act(g.act(U))
    >>> all(torch.allclose(restored[name], U[name]) for name in U)
    True
    """

    space: Layout
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
        """Device of the element."""
        for tensor in (*self.perms.values(), *self.linears.values(), *self.shifts.values()):
            return tensor.device
        return torch.device("cpu")

    def act(self, weights: Mapping[str, Tensor]) -> Weights:
        """``gU``: new weights that compute the same function.

        Arithmetic runs in the wider of the two dtypes and is rounded to that of the weights.
        Differentiable in the weights. NaN passes through; `WeightSpace.check` detects it.

        Args:
            weights: ``[batch, channels, *axes]``; all channels are transformed alike. A single
                element also acts on weights without batch and channels, ``[*axes]``.

        >>> from transformer_nfn import spaces
        >>> space = spaces.multi_head(8, 2, 3, 4)
        >>> U = space.randn(batch=1)
        >>> V = space.group.random().act(U)
        >>> {name: list(w.shape) for name, w in V.items()}["W_Q"]
        [1, 1, 2, 8, 3]
        """
        space = self.space
        check_weights(space, weights, finite=False, lead=None)
        first = next(iter(space.tensors))
        lead = leading_axes(space, weights)
        self._check_fits(weights[first], lead)
        dtype = weights[first].dtype
        moved = self._shifted(weights, lead)
        out = {name: self._move(moved[name], spec, lead) for name, spec in space.tensors.items()}
        out = {name: w if w.dtype == dtype else w.to(dtype) for name, w in out.items()}
        if self.batch is None or weights[first].shape[0] == self.batch:
            return out
        # One network becomes many, also in tensors on which nothing acts.
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
                moved = contract(self.space, shift, constant, weights[shift.through])
                out[shift.into] = out[shift.into] - moved
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
        """``g @ h``: first ``h``, then ``g``; ``(g @ h).act(U) == g.act(h.act(U))``.

        >>> from transformer_nfn import spaces
        >>> group = spaces.multi_head(8, 2, 3, 4).group
        >>> g, h = group.random(), group.random()
        >>> bool(((g @ h).perms["head"] == h.perms["head"][g.perms["head"]]).all())
        True
        """
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
        """The inverse element."""
        perms = {
            name: self.move_sites(self.space.axes[name].action.invert(perm), name)
            for name, perm in self.perms.items()
        }
        linears = {name: self.move_sites(m, name) for name, m in self.inverses.items()}
        inverses = {name: self.move_sites(m, name) for name, m in self.linears.items()}
        shifts = {name: -self.move_constant(c, name) for name, c in self.shifts.items()}
        return Element(self.space, perms, linears, inverses, shifts, self.batch)

    def linear_part(self) -> Element:
        """This element without its shifts: its action on differences of weights."""
        shifts = {name: torch.zeros_like(c) for name, c in self.shifts.items()}
        return Element(self.space, self.perms, self.linears, self.inverses, shifts, self.batch)

    def move_sites(self, x: Tensor, name: str) -> Tensor:
        """Permute values stored for each index of the ancestors of ``name`` along with them."""
        batched = self.batch is not None
        return self._permute(x, self.space.moves(self.space.ancestors(name), int(batched), batched))

    def move_constant(self, x: Tensor, tensor: str) -> Tensor:
        """Transform a constant added to a tensor, ``[*batch, *axes]``, as the tensor itself."""
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
        """Upper bound on how much the rounding error of a tensor grows under the action."""
        conditions = self.condition()
        return max(prod(conditions[a] for a in self.space.rebased(t)) for t in self.space.tensors)

    def __repr__(self) -> str:
        count = "one element" if self.batch is None else f"{self.batch} elements"
        worst = ", ".join(f"{name} {c:.3g}" for name, c in self.condition().items())
        return f"Element({count} of the group of '{self.space.name}'; condition: {worst or 'none'})"


@dataclass(frozen=True)
class Group:
    """The group of weight transformations that the axes of ``space`` declare.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(8, 2, 3, 4)
    >>> space.group.size.continuous  # two matrices of 3 × 3 and two of 4 × 4
    50
    >>> g = space.group.random(torch.Generator().manual_seed(0))
    >>> sorted(g.linears), sorted(g.perms)
    (['qk', 'vo'], ['head'])
    """

    space: Layout

    @property
    def size(self) -> Size:
        """Continuous parameters of an element, and log10 of the order of the finite part."""
        shifts = sum(prod(shape) for _, shape in self._shift_shapes(None))
        return sum(
            (prod(sites) * action.size(n) for _, action, sites, n in self._sites(None)),
            Size(shifts),
        )

    def identity(
        self,
        *,
        batch: int | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Element:
        """The identity element."""
        parts = {
            name: (action, action.identity(n, sites, dtype, device))
            for name, action, sites, n in self._sites(batch)
        }
        perms = {name: part for name, (action, part) in parts.items() if action.permutes}
        linears = {name: part for name, (action, part) in parts.items() if action.rebases}
        shifts = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, shape in self._shift_shapes(batch)
        }
        return Element(self.space, perms, linears, dict(linears), shifts, batch)

    def random(
        self,
        generator: torch.Generator | None = None,
        *,
        batch: int | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
        max_condition: float | None = MAX_CONDITION,
        entries: tuple[float, float] | None = None,
        condition: float | None = None,
    ) -> Element:
        """A random element, or ``batch`` of them.

        Args:
            generator: source of randomness; numbers are drawn on its device.
            batch: number of elements, one for each network of a batch; None for a single one.
            dtype: of the matrices. They are drawn and inverted in float64 regardless,
                because errors grow with the condition number.
            device: of the element; the generator's device by default.
            max_condition: matrices with a larger condition number are redrawn; None for no limit.
            entries: matrix entries uniform on ``(low, high)``, as in the paper's augmentation
                (Table 7); standard normal by default.
            condition: prescribed condition number of every matrix, ``X diag(s) Y`` with random
                orthogonal X and Y; nothing is redrawn, so large ones cost no more.

        >>> from transformer_nfn import spaces
        >>> g = spaces.multi_head(8, 2, 3, 4).group.random(condition=10.0)
        >>> {axis: round(value, 6) for axis, value in g.condition().items()}
        {'qk': 10.0, 'vo': 10.0}
        """
        if entries is not None and not entries[0] < entries[1]:
            raise GroupError(f"entries must be (low, high) with low < high, found {entries}")
        for name, limit in (("max_condition", max_condition), ("condition", condition)):
            if limit is not None and not limit >= 1:
                raise GroupError(f"{name} must be at least 1, found {limit}")
        if condition is not None and condition > WORST_CONDITION:
            raise GroupError(
                f"condition must be at most {WORST_CONDITION:g}, found {condition:g}: beyond it "
                "rounding leaves nothing of the function"
            )
        how = Drawing(generator, entries, max_condition, condition)
        target = device if device is not None else how.device
        perms, linears, inverses, shifts = {}, {}, {}, {}
        for name, action, sites, n in self._sites(batch):
            if action.permutes:
                perms[name] = action.draw(n, sites, how).to(target)
        for name, action, sites, n in self._sites(batch):
            if action.rebases:
                try:
                    matrix = action.draw(n, sites, how)
                except GroupError as error:
                    raise GroupError(f"{error} for axis '{name}'; raise max_condition") from None
                linears[name] = matrix.to(target, dtype)
                inverses[name] = action.invert(matrix).to(target, dtype)
        for name, shape in self._shift_shapes(batch):
            noise = torch.randn(
                shape, generator=generator, dtype=torch.float64, device=how.device
            )
            shifts[name] = noise.to(target, dtype)
        return Element(self.space, perms, linears, inverses, shifts, batch)

    def _sites(self, batch: int | None) -> Iterator[tuple[str, Action, tuple[int, ...], int]]:
        """Every axis with its action, the shape of its sites, and its size."""
        front = () if batch is None else (batch,)
        for axis in self.space.axes.values():
            owners = (self.space.axes[a].size for a in self.space.ancestors(axis.name))
            yield axis.name, axis.action, (*front, *owners), axis.size

    def _shift_shapes(self, batch: int | None) -> list[tuple[str, tuple[int, ...]]]:
        front = () if batch is None else (batch,)
        return [(s.tensor, (*front, *self.space.shape(s.tensor))) for s in self.space.shifts]
