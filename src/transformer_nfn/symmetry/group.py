"""The symmetry group of a weight space: the identity, random elements, elements from parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from transformer_nfn.errors import GroupError
from transformer_nfn.spaces import WeightSpace
from transformer_nfn.symmetry.element import Element
from transformer_nfn.symmetry.forms import draw, nearest

MAX_CONDITION = 1e4
MAX_DRAWS = 1000


@dataclass(frozen=True)
class Group:
    """Everything that may be done to the weights of ``space`` without changing the function."""

    space: WeightSpace

    def identity(
        self,
        *,
        batch: int | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> Element:
        """The element that changes nothing."""
        perms, linears, shifts = {}, {}, {}
        for name, sites, n in self._sites("perm", batch):
            perms[name] = torch.arange(n, device=device).expand(*sites, n).contiguous()
        for name, sites, n in self._sites("linear", batch):
            eye = torch.eye(n, dtype=dtype, device=device)
            linears[name] = eye.expand(*sites, n, n).contiguous()
        for name, shape in self._shift_shapes(batch):
            shifts[name] = torch.zeros(shape, dtype=dtype, device=device)
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
        """
        if entries is not None and not entries[0] < entries[1]:
            raise GroupError(f"entries must be (low, high) with low < high, found {entries}")
        if max_condition is not None and not max_condition >= 1:
            raise GroupError(f"max_condition must be at least 1, found {max_condition}")
        source = generator.device if generator is not None else None
        place = device if device is not None else source
        perms, linears, inverses, shifts = {}, {}, {}, {}
        for name, sites, n in self._sites("perm", batch):
            noise = torch.rand((*sites, n), generator=generator, device=source)
            perms[name] = noise.argsort(-1).to(place)
        for name, sites, n in self._sites("linear", batch):
            matrix = self._draw(name, (*sites, n, n), generator, entries, max_condition)
            linears[name] = matrix.to(place, dtype)
            inverses[name] = torch.linalg.inv(matrix).to(place, dtype)
        for name, shape in self._shift_shapes(batch):
            noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=source)
            shifts[name] = noise.to(place, dtype)
        return Element(self.space, perms, linears, inverses, shifts, batch)

    def _draw(
        self,
        name: str,
        shape: tuple[int, ...],
        generator: torch.Generator | None,
        entries: tuple[float, float] | None,
        max_condition: float | None,
    ) -> Tensor:
        form = self.space.axes[name].form
        n = shape[-1]
        flat = draw((prod(shape[:-2]), n, n), form, entries=entries, generator=generator)
        limit = max_condition if max_condition is not None else 1 / torch.finfo(torch.float64).eps
        for _ in range(MAX_DRAWS):
            bad = ~(torch.linalg.cond(flat) <= limit)
            count = int(bad.sum())
            if count == 0:
                return flat.reshape(shape)
            flat[bad] = draw((count, n, n), form, entries=entries, generator=generator)
        raise GroupError(
            f"no {n}×{n} matrix of condition at most {limit:g} for axis '{name}' "
            f"in {MAX_DRAWS} draws; raise max_condition"
        )

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
            linears: for linear axes, ``[*batch, *ancestors, n, n]``, each invertible.
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
        for name, perm in perms.items():
            if not torch.equal(perm.sort(-1).values, base.perms[name]):
                raise GroupError(f"perm axis '{name}': some row is not a permutation")
        inverses = {
            name: self._inverted(name, matrix, max_condition) for name, matrix in linears.items()
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

    def _inverted(self, name: str, matrix: Tensor, max_condition: float | None) -> Tensor:
        wide = matrix.double()
        form = self.space.axes[name].form
        if not bool(torch.isfinite(wide).all()):
            raise GroupError(f"linear axis '{name}': a matrix holds values that are not finite")
        if not torch.allclose(wide, nearest(wide, form), rtol=1e-6, atol=1e-12):
            raise GroupError(
                f"linear axis '{name}' takes one complex scale for each pair of entries; "
                "the matrix given is of no such form"
            )
        # 0/0 for the zero matrix, which is as singular as can be.
        condition = torch.linalg.cond(wide).nan_to_num(nan=float("inf"))
        worst = float(condition.max())
        at = (condition == condition.max()).nonzero()[0].tolist()
        singular = 1 / torch.finfo(torch.float64).eps
        if not worst < singular:
            raise GroupError(f"linear axis '{name}': the matrix at {at} is singular")
        if max_condition is not None and worst > max_condition:
            raise GroupError(
                f"linear axis '{name}': the matrix at {at} has condition {worst:.3g}, "
                f"over the limit {max_condition:g}"
            )
        inverse: Tensor = torch.linalg.inv(wide)
        return inverse.to(matrix.dtype)

    def _sites(self, kind: str, batch: int | None) -> list[tuple[str, tuple[int, ...], int]]:
        front = () if batch is None else (batch,)
        return [
            (
                axis.name,
                (*front, *(self.space.axes[a].size for a in self.space.ancestors(axis.name))),
                axis.size,
            )
            for axis in self.space.axes.values()
            if axis.kind == kind
        ]

    def _shift_shapes(self, batch: int | None) -> list[tuple[str, tuple[int, ...]]]:
        front = () if batch is None else (batch,)
        return [(s.tensor, (*front, *self.space.shape(s.tensor))) for s in self.space.shifts]
