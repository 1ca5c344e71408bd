"""Tensors that two files in one basis have different numbers in, before any rounding is allowed.

Where a disguise stands between two files, rounding hides small changes. Where none does, nothing is
hidden: a tensor holds the same numbers, those of the other file rounded to another dtype, or an
edit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.symmetries import ValueOutputBasis
from transformer_nfn.symmetry.rounding import HALF, differing, is_rounding

SHOWN = 4
"""Tensors that a sentence names."""


@dataclass(frozen=True)
class Edit:
    """One tensor that differs.

    Attributes:
        name: canonical name.
        block: that it belongs to, empty outside of blocks.
        entries: number of entries that differ, of ``size``.
        size: number of all entries.
        largest: change of one entry at most, in units of the root mean square of A's entries; None
            of a tensor that is zero in A.
        relative: ``‖b − a‖`` over the larger of both norms.
        vector: whether it is a bias, a gain or another vector.

    Example:
        >>> print(Edit("norm.g", "", 1, 1024, 0.01, 0.0003))
        norm.g (1 of 1,024 entries, by up to 0.01 of its root mean square)
    """

    name: str
    block: str
    entries: int
    size: int
    largest: float | None
    relative: float
    vector: bool = False

    @staticmethod
    def of(name: str, block: str, a: Tensor, b: Tensor, mask: Tensor) -> Edit:
        """From both tensors, and the mask of the entries that differ."""
        dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        x, y = a.to(dtype), b.to(dtype)
        away = y - x
        rms, most = float(x.square().mean().sqrt()), float(away.abs().max())
        relative = float(away.norm() / torch.maximum(x.norm(), y.norm()))
        largest = most / rms if rms else None
        return Edit(name, block, int(mask.sum()), a.numel(), largest, relative, _vector(name, a))

    def __str__(self) -> str:
        entries = f"{self.entries:,} of {self.size:,} entries"
        if self.entries == self.size:
            entries = "its one entry" if self.size == 1 else f"all {self.size:,} entries"
        if self.largest is None:
            return f"{self.name} ({entries}, zero in A)"
        return f"{self.name} ({entries}, by up to {self.largest:.2g} of its root mean square)"

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class AsStored:
    """Two files compared as they lie, tensor by tensor, from `compare_stored`.

    Attributes:
        edits: tensors that differ; none where rounding reached every value and output matrix, as
            it does where a change of basis stands between the files.
        equal: how all tensors of one architecture agree, one sentence; None where they do not.
    """

    edits: tuple[Edit, ...] = ()
    equal: str | None = None


def compare_stored(A: Model, B: Model) -> AsStored:
    """Compare the tensors that two models have in one shape, bit by bit or up to a cast."""
    edits, rebased = [], []
    sites = ValueOutputBasis().sites(A.description)
    carriers = {name for site in sites for name in site.names.values()}
    casts: list[tuple[torch.dtype | None, torch.dtype | None]] = []
    for name in (n for n, shape in A.names.items() if B.names.get(n) == shape):
        a, b = A.stored(name), B.stored(name)
        mask = differing(a, b)
        block = next((x for x in A.description.blocks if name.startswith(f"{x}.")), "")
        edit = Edit.of(name, block, a, b, mask) if bool(mask.any()) else None
        if edit is not None:
            edits.append(edit)
        # A bias may have been set to that of the other file, where another one makes up for it.
        if name in carriers and not _vector(name, a) and bool(a.any() | b.any()):
            rebased.append(is_rounding(mask))
        if edit is not None or a.dtype != b.dtype:
            casts.append((_cast(a, b), _cast(b, a)))
    if A.description == B.description:
        if not casts:
            return AsStored(equal="both hold the same bytes")
        copy, original = (all(cast[i] is not None for cast in casts) for i in (0, 1))
        if copy and original:
            return AsStored(equal="both hold the same numbers, in other dtypes")
        if (copy or original) and (all(rebased) or not edits):
            rounded = sorted({str(cast[original]).removeprefix("torch.") for cast in casts})
            words = "B holds the numbers of A" if copy else "A holds the numbers of B"
            return AsStored(equal=f"{words} rounded to {', '.join(rounded)}")
    in_one_basis = A.description.blocks.keys() == B.description.blocks.keys() and not all(rebased)
    return AsStored(tuple(edits) if in_one_basis else ())


def _vector(name: str, w: Tensor) -> bool:
    """Whether a tensor is a bias, a gain or another vector."""
    last = name.rpartition(".")[2]
    return w.ndim == 1 or last.startswith("b_") or last in ("g", "b")


def _cast(a: Tensor, b: Tensor) -> torch.dtype | None:
    """The dtype that ``b`` is ``a`` rounded to, with nothing of size lost to underflow."""
    for dtype in (b.dtype, *(d for d in HALF if d.itemsize < b.dtype.itemsize)):
        if torch.equal(a.to(dtype).to(b.dtype), b):
            distance = (a.double() - b.double()).norm()
            return dtype if distance <= torch.finfo(dtype).eps * a.double().norm() else None
    return None


def describe_edits(edits: Sequence[Edit]) -> str:
    """Name the tensors that differ, at the end of a sentence.

    >>> describe_edits([Edit("cls", "", 1, 9, None, 1.0)])
    'tensors of one name and shape are equal but for cls (1 of 9 entries, zero in A)'
    """
    shown = ", ".join(map(str, edits[:SHOWN]))
    if len(edits) > SHOWN:
        shown = f"{len(edits)} tensors: {shown} …"
    return f"tensors of one name and shape are equal but for {shown}"


class ExactModel(Model):
    """A model with some tensors of another of the same shapes, all numbers of both exact."""

    def __init__(self, model: Model, other: Model, names: Collection[str]) -> None:
        self._sources = dict.fromkeys(model.names, model) | dict.fromkeys(names, other)
        self.description, self.names, self.where = model.description, model.names, model.where

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the numbers are exact."""
        return torch.float64

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Some tensors, in float64 by default."""
        return {name: self._sources[name][name].to(dtype or torch.float64) for name in names}
