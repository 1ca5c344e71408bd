"""The symmetry group of a weight space: the identity, random elements, elements from parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError
from transformer_nfn.spaces.actions import MAX_CONDITION, Action, Drawing, Size
from transformer_nfn.spaces.element import Element

WORST_CONDITION = 1e12
"""Beyond it double precision keeps less than four digits of what a matrix acts on."""

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


@dataclass(frozen=True)
class Group:
    """Everything that may be done to the weights of ``space`` without changing the function."""

    space: WeightSpace

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
        """The element that changes nothing."""
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
            generator: where the randomness comes from; drawn on its device.
            batch: one element for each item of a batch of this size; None for one for all.
            dtype: of the matrices. They are drawn and inverted in float64 whatever it is,
                because errors grow with the condition number.
            device: where the element goes; the generator's device if not given.
            max_condition: matrices worse than this are drawn again; None for no limit.
            entries: matrix entries uniform on ``(low, high)``, as in the paper's augmentation
                (Table 6); standard normal if not given.
            condition: every matrix gets exactly this condition number, as ``X diag(s) Y`` with
                random orthogonal X and Y; nothing is drawn twice, so large ones cost no more.
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
        place = device if device is not None else how.device
        perms, linears, inverses, shifts = {}, {}, {}, {}
        for name, action, sites, n in self._sites(batch):
            if action.permutes:
                perms[name] = action.draw(n, sites, how).to(place)
        for name, action, sites, n in self._sites(batch):
            if action.rebases:
                try:
                    matrix = action.draw(n, sites, how)
                except GroupError as error:
                    raise GroupError(f"{error} for axis '{name}'; raise max_condition") from None
                linears[name] = matrix.to(place, dtype)
                inverses[name] = action.invert(matrix).to(place, dtype)
        for name, shape in self._shift_shapes(batch):
            noise = torch.randn(
                shape, generator=generator, dtype=torch.float64, device=how.device
            )
            shifts[name] = noise.to(place, dtype)
        return Element(self.space, perms, linears, inverses, shifts, batch)

    def element(
        self,
        perms: Mapping[str, Tensor] | None = None,
        linears: Mapping[str, Tensor] | None = None,
        shifts: Mapping[str, Tensor] | None = None,
        *,
        batch: int | None = None,
        max_condition: float | None = MAX_CONDITION,
    ) -> Element:
        """An element from its parts, checked; what is not given is the identity.

        Args:
            perms: for perm axes, ``[*batch, *ancestors, n]``, each row a permutation.
            linears: for axes on which matrices act, ``[*batch, *ancestors, n, n]``.
            shifts: for shifted tensors, ``[*batch, *axes]``.
            batch: how many elements these are; None for one.
            max_condition: matrices worse than this are refused; None for no limit.
        """
        perms, linears, shifts = dict(perms or {}), dict(linears or {}), dict(shifts or {})
        tensors = [*linears.values(), *shifts.values(), *perms.values()]
        floats = [*linears.values(), *shifts.values()]
        base = self.identity(
            batch=batch,
            dtype=floats[0].dtype if floats else torch.float64,
            device=tensors[0].device if tensors else None,
        )
        self._check_parts("perm axis", perms, base.perms)
        self._check_parts("linear axis", linears, base.linears)
        self._check_parts("shifted tensor", shifts, base.shifts)
        for name, part in (*perms.items(), *linears.items()):
            action = self.space.axes[name].action
            reason = action.element_error(part, max_condition)
            if reason is not None:
                raise GroupError(f"{action.word} axis '{name}': {reason}")
        inverses = {
            name: self.space.axes[name].action.invert(matrix) for name, matrix in linears.items()
        }
        return Element(
            self.space,
            {**base.perms, **perms},
            {**base.linears, **linears},
            {**base.inverses, **inverses},
            {**base.shifts, **shifts},
            batch,
        )

    def _check_parts(
        self, what: str, given: Mapping[str, Tensor], base: Mapping[str, Tensor]
    ) -> None:
        for name, part in given.items():
            if name not in base:
                raise GroupError(f"space '{self.space.name}' has no {what} '{name}'")
            want = base[name]
            if part.shape != want.shape:
                raise GroupError(
                    f"{what} '{name}': expected shape {list(want.shape)}, found {list(part.shape)}"
                )
            if part.dtype != want.dtype or part.device != want.device:
                raise GroupError(
                    f"mixed parts: {what} '{name}' is {part.dtype} on {part.device}, "
                    f"expected {want.dtype} on {want.device}"
                )

    def _sites(self, batch: int | None) -> Iterator[tuple[str, Action, tuple[int, ...], int]]:
        """Every axis with its action, the shape of its sites, and its size."""
        front = () if batch is None else (batch,)
        for axis in self.space.axes.values():
            owners = (self.space.axes[a].size for a in self.space.ancestors(axis.name))
            yield axis.name, axis.action, (*front, *owners), axis.size

    def _shift_shapes(self, batch: int | None) -> list[tuple[str, tuple[int, ...]]]:
        front = () if batch is None else (batch,)
        return [(s.tensor, (*front, *self.space.shape(s.tensor))) for s in self.space.shifts]
