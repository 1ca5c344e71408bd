"""How does a tensor of a space lie in a file? Axes merged, transposed, side by side with others.

A layout names, for each axis of the tensor in the file, the axes of the space that it is made of:
``"(head qk) stream"`` is a matrix ``[heads · d_k, D]``. Axes of size 1 may be left out. Where one
tensor of the file holds several of the space, a plus says along what they stand side by side:
``"stream +(head qk)"`` one after the other, ``"(head + qk) stream"`` in turn for every head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError

PLUS = "+"


class Sized(Protocol):
    """An axis, of which a layout needs no more than the size."""

    @property
    def size(self) -> int:
        """How many indices it has."""


class Axes(Protocol):
    """Axes by name: a `WeightSpace`, or the sizes of a checkpoint."""

    @property
    def axes(self) -> Mapping[str, Sized]:
        """Every axis."""


@dataclass(frozen=True)
class Layout:
    """The axes of one tensor of a file, each as axes of the space; see the module.

    Attributes:
        text: as it was written.
        dims: for each axis in the file the axes of the space, outermost first.
        joined: the axis in the file along which whole parts follow each other, if there is one.
    """

    text: str
    dims: tuple[tuple[str, ...], ...]
    joined: int | None = None

    @staticmethod
    def parse(text: str) -> Layout:
        """Reads ``"(head qk) stream"``."""
        words = re.findall(r"\+?\([^()]*\)|[^\s()]+", text)
        if re.sub(r"\s", "", text) != re.sub(r"\s", "", "".join(words)):
            raise SpaceError(f"layout '{text}' has a parenthesis that does not close or open")
        first = [i for i, word in enumerate(words) if word.startswith(PLUS) and word != PLUS]
        bare = [word[1:] if i in first else word for i, word in enumerate(words)]
        dims = [tuple(word.strip("()").split()) for word in bare]
        atoms = [axis for dim in dims for axis in dim]
        if len(first) + atoms.count(PLUS) > 1:
            raise SpaceError(f"layout '{text}' has more than one plus")
        return Layout(text, tuple(dims), first[0] if first else None)

    @property
    def atoms(self) -> tuple[str, ...]:
        """All axes in the order of the file."""
        return tuple(axis for dim in self.dims for axis in dim)

    def misfit(self, space: Axes, axes: Sequence[str]) -> str | None:
        """Why a tensor with these axes cannot lie so; None if it can."""
        own = [axis for axis in self.atoms if axis != PLUS]
        for axis in own:
            if axis not in axes or own.count(axis) > 1:
                return f"names '{axis}' {own.count(axis)} times, the tensor {axes.count(axis)}"
        for axis in axes:
            if axis not in own and space.axes[axis].size > 1:
                return f"leaves out '{axis}', which has size {space.axes[axis].size}"
        return None


@dataclass(frozen=True)
class Slot:
    """One tensor of the space in a tensor of the file.

    Attributes:
        tensor: its name in the space.
        layout: how it lies.
        axes: of the tensor in the space, without one that counts files.
    """

    tensor: str
    layout: Layout
    axes: tuple[str, ...]


def file_shape(space: Axes, parts: Sequence[Slot]) -> tuple[int, ...]:
    """The shape of the tensor of the file that holds ``parts``."""
    shapes = [
        tuple(prod(_size(space, a, len(parts)) for a in dim) for dim in part.layout.dims)
        for part in parts
    ]
    first, along = shapes[0], parts[0].layout.joined
    if len(parts) > 1 and along is None and PLUS not in parts[0].layout.atoms:
        raise SpaceError(
            f"'{parts[0].tensor}' ({parts[0].layout.text}) shares a tensor with others, so a plus "
            "must say along which axis"
        )
    for part, shape in zip(parts, shapes, strict=True):
        apart = [i for i, (n, m) in enumerate(zip(first, shape, strict=False)) if n != m]
        turns = along is None and _turns(space, part) != _turns(space, parts[0])
        if len(shape) != len(first) or part.layout.joined != along or set(apart) - {along} or turns:
            raise SpaceError(
                f"'{parts[0].tensor}' ({parts[0].layout.text}) and '{part.tensor}' "
                f"({part.layout.text}) cannot stand side by side in one tensor"
            )
    if along is None:
        return first
    return (*first[:along], sum(shape[along] for shape in shapes), *first[along + 1 :])


def _turns(space: Axes, part: Slot) -> list[int]:
    """Sizes of all axes in the order of the file, 0 where parts take turns."""
    return [0 if a == PLUS else space.axes[a].size for a in part.layout.atoms]


def _size(space: Axes, axis: str, parts: int) -> int:
    return parts if axis == PLUS else space.axes[axis].size


def take(space: Axes, x: Tensor, parts: Sequence[Slot]) -> dict[str, Tensor]:
    """The tensors of the space out of one tensor of a file, ``[*file_shape]``."""
    along = parts[0].layout.joined
    pieces: Sequence[Tensor] = [x] * len(parts)
    if along is not None:
        sizes = [prod(space.axes[a].size for a in part.layout.dims[along]) for part in parts]
        pieces = x.split(sizes, along)
    out = {}
    for i, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        atoms = list(part.layout.atoms)
        value = piece.reshape([_size(space, a, len(parts)) for a in atoms])
        if PLUS in atoms:
            value = value.select(atoms.index(PLUS), i)
            atoms.remove(PLUS)
        order = [atoms.index(a) for a in part.axes if a in atoms]
        value = value.permute(order).reshape([space.axes[a].size for a in part.axes])
        out[part.tensor] = value.contiguous()
    return out


def put(space: Axes, weights: dict[str, Tensor], parts: Sequence[Slot]) -> Tensor:
    """The inverse of `take`, bit for bit."""
    pieces = []
    for part in parts:
        own = [a for a in part.layout.atoms if a != PLUS]
        value = weights[part.tensor].reshape([space.axes[a].size for a in part.axes if a in own])
        value = value.permute([[a for a in part.axes if a in own].index(a) for a in own])
        if PLUS in part.layout.atoms:
            value = value.unsqueeze(part.layout.atoms.index(PLUS))
        pieces.append(value)
    along = parts[0].layout.joined
    if along is None:
        at = parts[0].layout.atoms.index(PLUS) if PLUS in parts[0].layout.atoms else 0
        whole = torch.cat(pieces, at) if len(parts) > 1 else pieces[0]
        return whole.reshape(file_shape(space, parts)).contiguous()
    flat = [
        piece.reshape([prod(space.axes[a].size for a in dim) for dim in part.layout.dims])
        for part, piece in zip(parts, pieces, strict=True)
    ]
    return torch.cat(flat, along).contiguous()
