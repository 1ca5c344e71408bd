"""Layout of the tensors of a space in a file: names, merged axes, fused and tied tensors.

A layout names, for each axis of the tensor in the file, the axes of the space that it is made of:
``"(head qk) stream"`` is a matrix ``[heads · d_k, D]``. Axes of size 1 may be left out. Where one
tensor of the file holds several of the space, a plus marks the axis along which they are joined:
``"stream +(head qk)"`` one after the other, ``"(head + qk) stream"`` in turn for every head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Weights, WeightSpace

PLUS = "+"
COUNTED = re.compile(r"\{([^{}]+)\}")

Sizes = Mapping[str, int]
"""Size of each axis by name."""


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
        """Parse a layout.

        >>> Layout.parse("(head qk) stream").dims
        (('head', 'qk'), ('stream',))
        """
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

    def misfit(self, sizes: Sizes, axes: Sequence[str]) -> str | None:
        """Reason why the layout does not fit a tensor with these axes; None if it does."""
        named = [axis for axis in self.atoms if axis != PLUS]
        for axis in named:
            if axis not in axes or named.count(axis) > 1:
                return f"names '{axis}' {named.count(axis)} times, the tensor {axes.count(axis)}"
        for axis in axes:
            if axis not in named and sizes[axis] > 1:
                return f"leaves out '{axis}', which has size {sizes[axis]}"
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


def file_shape(sizes: Sizes, parts: Sequence[Slot]) -> tuple[int, ...]:
    """The shape of the tensor of the file that holds ``parts``."""
    shapes = [
        tuple(prod(_size(sizes, a, len(parts)) for a in dim) for dim in part.layout.dims)
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
        turns = along is None and _turns(sizes, part) != _turns(sizes, parts[0])
        if len(shape) != len(first) or part.layout.joined != along or set(apart) - {along} or turns:
            raise SpaceError(
                f"'{parts[0].tensor}' ({parts[0].layout.text}) and '{part.tensor}' "
                f"({part.layout.text}) cannot stand side by side in one tensor"
            )
    if along is None:
        return first
    return (*first[:along], sum(shape[along] for shape in shapes), *first[along + 1 :])


def _turns(sizes: Sizes, part: Slot) -> list[int]:
    """Sizes of all axes in the order of the file, 0 where parts take turns."""
    return [0 if a == PLUS else sizes[a] for a in part.layout.atoms]


def _size(sizes: Sizes, axis: str, parts: int) -> int:
    return parts if axis == PLUS else sizes[axis]


def take(sizes: Sizes, x: Tensor, parts: Sequence[Slot]) -> dict[str, Tensor]:
    """The tensors of the space out of one tensor of a file, ``[*file_shape]``."""
    along = parts[0].layout.joined
    pieces: Sequence[Tensor] = [x] * len(parts)
    if along is not None:
        lengths = [prod(sizes[a] for a in part.layout.dims[along]) for part in parts]
        pieces = x.split(lengths, along)
    out = {}
    for i, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
        atoms = list(part.layout.atoms)
        value = piece.reshape([_size(sizes, a, len(parts)) for a in atoms])
        if PLUS in atoms:
            value = value.select(atoms.index(PLUS), i)
            atoms.remove(PLUS)
        order = [atoms.index(a) for a in part.axes if a in atoms]
        value = value.permute(order).reshape([sizes[a] for a in part.axes])
        out[part.tensor] = value.contiguous()
    return out


def put(sizes: Sizes, weights: dict[str, Tensor], parts: Sequence[Slot]) -> Tensor:
    """One tensor of a file from tensors of the space; the inverse of `take`, bit for bit."""
    along = parts[0].layout.joined
    pieces = []
    for part in parts:
        stored = [a for a in part.layout.atoms if a != PLUS]
        value = weights[part.tensor].reshape([sizes[a] for a in part.axes if a in stored])
        value = value.permute([[a for a in part.axes if a in stored].index(a) for a in stored])
        if PLUS in part.layout.atoms:
            value = value.unsqueeze(part.layout.atoms.index(PLUS))
        if along is not None:
            value = value.reshape(file_shape(sizes, [part]))
        pieces.append(value)
    if along is None:
        along = parts[0].layout.atoms.index(PLUS) if PLUS in parts[0].layout.atoms else 0
    whole = torch.cat(pieces, along) if len(parts) > 1 else pieces[0]
    return whole.reshape(file_shape(sizes, parts)).contiguous()


@dataclass(frozen=True)
class _Line:
    """A line of a naming in a space.

    Attributes:
        file: as it is written.
        names: in the file: one, or one for each index of the axis in braces.
        counted: that axis.
        readings: the tensors that it holds; several that are tied hold the same numbers.
    """

    file: str
    names: list[str]
    counted: str | None
    readings: list[list[Slot]]

    @property
    def holds(self) -> list[str]:
        """Names of the tensors in the space."""
        return [part.tensor for parts in self.readings for part in parts]


@dataclass(frozen=True)
class Naming:
    """The map between the tensors of a file and those of a space, both ways.

    One line for each tensor of the file says which tensor of the space it holds, and how (see
    `transformer_nfn.io.layout`):

    - ``"q_proj.weight": "W_Q: (head qk) stream"``: merged and transposed axes;
    - ``"c_attn.weight": "W_Q: stream +(head qk), W_K: stream +(head qk), W_V: stream +(head vo)"``:
      several tensors fused into one;
    - ``"wte.weight": "W_E: token stream = W_C: token stream"``: two tensors tied;
    - ``"experts.{expert}.w1": "W_A: neuron stream"``: one tensor split over files' tensors, one
      for each index of the axis ``expert``.

    Two tensors of the file may hold the same tensor of the space: one of them may be missing,
    and where both are there they must agree.

    Attributes:
        lines: as above.
        shapes: of tensors of the file whose shape is not what the layout says, but as many
            numbers in the same order (the kernel of a convolution).
        constants: what a file holds besides weights; written, never read.
    """

    lines: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def identity(space: WeightSpace) -> Naming:
        """Every tensor under its own name, as it is."""
        return Naming({name: f"{name}: {' '.join(s.axes)}" for name, s in space.tensors.items()})

    def check(self, space: WeightSpace) -> None:
        """Raises `SpaceError` unless every tensor of the space can be read and written."""
        held: set[str] = set()
        for line in self._resolved(space):
            for parts in line.readings:
                file_shape(_sizes(space), parts)
                counted = [p for p in parts if p.axes != space.tensors[p.tensor].axes]
                if len(counted) != (len(parts) if line.counted else 0):
                    raise SpaceError(f"'{line.file}' counts an axis that not all its tensors carry")
            held.update(line.holds)
        missing = [name for name in space.tensors if name not in held]
        if missing:
            raise SpaceError(f"no line of the naming holds '{missing[0]}' of '{space.name}'")

    def read(self, space: WeightSpace, tensors: Mapping[str, Tensor]) -> Weights:
        """The tensors ``[*axes]`` of one network out of those of a file.

        Args:
            tensors: by name in the file; may be lazy. Names that no line knows are ignored.
        """
        out: Weights = {}
        lines = list(self._resolved(space))
        for line in lines:
            absent = [name for name in line.names if name not in tensors]
            if absent:
                present = [each for each in lines if all(name in tensors for name in each.names)]
                if not {*line.holds}.difference(*(each.holds for each in present)):
                    continue
                raise SpaceError(
                    f"state dict lacks '{absent[0]}', which holds {_words(line.holds)}"
                )
            for parts in line.readings:
                each = [self._take(space, n, line.file, tensors[n], parts) for n in line.names]
                for part in parts:
                    whole = each[0][part.tensor]
                    if line.counted:
                        at = space.tensors[part.tensor].position(line.counted)
                        whole = torch.stack([one[part.tensor] for one in each], at)
                    if part.tensor in out and not torch.equal(out[part.tensor], whole):
                        raise SpaceError(
                            f"'{line.names[0]}' disagrees with another tensor of the file about "
                            f"'{part.tensor}', to which both are tied"
                        )
                    out[part.tensor] = whole
        return {name: out[name] for name in space.tensors}

    def write(self, space: WeightSpace, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file from those of one network, ``[*axes]``; undoes `read`."""
        out = dict(self.constants)
        for line in self._resolved(space):
            for parts in line.readings:
                for i, name in enumerate(line.names):
                    slices = {part.tensor: weights[part.tensor] for part in parts}
                    if line.counted:
                        for tensor, whole in slices.items():
                            at = space.tensors[tensor].position(line.counted)
                            slices[tensor] = whole.select(at, i)
                    value = put(_sizes(space), slices, parts)
                    value = value.reshape(self.shapes.get(line.file, value.shape))
                    if name in out and not torch.equal(out[name], value):
                        raise SpaceError(
                            f"'{name}' ties {_words(line.holds)}, which are not equal"
                        )
                    out[name] = value
        return out

    def _resolved(self, space: WeightSpace) -> Iterator[_Line]:
        for file, text in self.lines.items():
            axes = COUNTED.findall(file)
            if len(axes) > 1 or any(axis not in space.axes for axis in axes):
                raise SpaceError(
                    f"'{file}' must count the indices of one axis of '{space.name}' at most"
                )
            counts = range(space.axes[axes[0]].size if axes else 1)
            readings = [
                [_part(space, file, axes, words) for words in reading.split(",")]
                for reading in text.split("=")
            ]
            names = [COUNTED.sub(str(i), file) for i in counts]
            yield _Line(file, names, axes[0] if axes else None, readings)

    def _take(
        self, space: WeightSpace, name: str, file: str, value: Tensor, parts: list[Slot]
    ) -> dict[str, Tensor]:
        plain = file_shape(_sizes(space), parts)
        expected = self.shapes.get(file, plain)
        if tuple(value.shape) != expected:
            where = f"which holds {_words(p.tensor for p in parts)}"
            if len(expected) == value.ndim == len(plain):
                i = next(i for i, n in enumerate(expected) if value.shape[i] != n)
                where = f"axis {i} ({' '.join(parts[0].layout.dims[i])}), {where}"
            raise SpaceError(
                f"'{name}': expected shape {list(expected)}, found {list(value.shape)}: {where}"
            )
        return take(_sizes(space), value.reshape(plain), parts)


def _sizes(space: WeightSpace) -> dict[str, int]:
    return {name: axis.size for name, axis in space.axes.items()}


def _part(space: WeightSpace, file: str, counted: Sequence[str], words: str) -> Slot:
    name, colon, text = words.partition(":")
    name = name.strip()
    if not colon or name not in space.tensors:
        raise SpaceError(
            f"the naming's line '{file}' must say 'TENSOR: LAYOUT' with a tensor of "
            f"'{space.name}', found '{words.strip()}'"
        )
    axes = tuple(a for a in space.tensors[name].axes if a not in counted)
    layout = Layout.parse(text.strip())
    misfit = layout.misfit(_sizes(space), axes)
    if misfit is not None:
        raise SpaceError(f"the layout of '{name}' in '{file}' {misfit}")
    return Slot(name, layout, axes)


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in dict.fromkeys(names))
