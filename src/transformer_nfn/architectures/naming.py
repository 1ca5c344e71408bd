"""Which tensor of a file is which tensor of a space? Names, layouts, fused and tied parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from transformer_nfn.architectures.layout import Layout, Slot, file_shape, put, take
from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Weights, WeightSpace

COUNTED = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True)
class Naming:
    """The map between the tensors of a file and those of a space, both ways.

    One line for each tensor of the file says which tensor of the space it holds, and how (see
    `transformer_nfn.architectures.layout`):

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
        prefixes: what may stand before every name in a file; the first one is written.
    """

    lines: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("",)

    @staticmethod
    def identity(space: WeightSpace) -> Naming:
        """Every tensor under its own name, as it is."""
        return Naming({name: f"{name}: {' '.join(s.axes)}" for name, s in space.tensors.items()})

    def check(self, space: WeightSpace) -> None:
        """Raises `SpaceError` unless every tensor of the space can be read and written."""
        held: set[str] = set()
        for file in self.lines:
            names = list(_counted(space, file))
            for parts in self._readings(space, file):
                file_shape(space, parts)
                counted = [p for p in parts if p.axes != space.tensors[p.tensor].axes]
                if len(counted) != (len(parts) if names != [file] else 0):
                    raise SpaceError(f"'{file}' counts an axis that not all its tensors carry")
                held |= {part.tensor for part in parts}
        missing = [name for name in space.tensors if name not in held]
        if missing:
            raise SpaceError(f"no line of the naming holds '{missing[0]}' of '{space.name}'")

    def read(
        self,
        space: WeightSpace,
        tensors: Mapping[str, Tensor],
        only: Iterable[str] | None = None,
    ) -> Weights:
        """The tensors ``[*axes]`` of one network out of those of a file.

        Args:
            space: of the network.
            tensors: by name in the file; may be lazy, each is asked for when it is needed. Names
                that no line knows are left alone.
            only: names in the space, to read no more than those.
        """
        wanted = set(space.tensors if only is None else only)
        prefix = self._prefix(tensors)
        out: Weights = {}
        for file in self.lines:
            readings = self._readings(space, file)
            holds = {part.tensor for parts in readings for part in parts}
            if not holds & wanted:
                continue
            names = [prefix + name for name in _counted(space, file)]
            absent = [name for name in names if name not in tensors]
            if absent and self._elsewhere(space, file, holds, prefix, tensors):
                continue
            if absent:
                raise SpaceError(f"state dict lacks '{absent[0]}', which holds {_words(holds)}")
            for parts in readings:
                each = [self._take(space, name, file, tensors[name], parts) for name in names]
                for part in parts:
                    whole = _stacked(space, file, part, [one[part.tensor] for one in each])
                    if part.tensor in out and not torch.equal(out[part.tensor], whole):
                        raise SpaceError(
                            f"'{names[0]}' disagrees with another tensor of the file about "
                            f"'{part.tensor}', to which both are tied"
                        )
                    out[part.tensor] = whole
        return {name: out[name] for name in space.tensors if name in wanted}

    def write(self, space: WeightSpace, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file from those of one network, ``[*axes]``; undoes `read`."""
        out = dict(self.constants)
        for file in self.lines:
            names = list(_counted(space, file))
            for parts in self._readings(space, file):
                for i, name in enumerate(names):
                    slices = {p.tensor: _slice(space, file, p, weights, i) for p in parts}
                    value = put(space, slices, parts)
                    value = value.reshape(self.shapes.get(file, value.shape))
                    if name in out and not torch.equal(out[name], value):
                        tied = _words(p.tensor for r in self._readings(space, file) for p in r)
                        raise SpaceError(f"'{name}' ties {tied}, which are not equal")
                    out[name] = value
        return {self.prefixes[0] + name: value for name, value in out.items()}

    def _prefix(self, tensors: Mapping[str, Tensor]) -> str:
        names = [name for name in self.lines if not COUNTED.search(name)]
        hits = {p: sum(p + name in tensors for name in names) for p in self.prefixes}
        return max(self.prefixes, key=lambda p: hits[p])

    def _readings(self, space: WeightSpace, file: str) -> list[list[Slot]]:
        return [
            [_part(space, file, words) for words in reading.split(",")]
            for reading in self.lines[file].split("=")
        ]

    def _elsewhere(
        self,
        space: WeightSpace,
        file: str,
        holds: set[str],
        prefix: str,
        tensors: Mapping[str, Tensor],
    ) -> bool:
        """Whether other tensors that the file has hold all that an absent one would."""
        for other in self.lines:
            names = (prefix + name for name in _counted(space, other))
            if other != file and all(name in tensors for name in names):
                holds = holds - {p.tensor for r in self._readings(space, other) for p in r}
        return not holds

    def _take(
        self, space: WeightSpace, name: str, file: str, value: Tensor, parts: list[Slot]
    ) -> dict[str, Tensor]:
        plain = file_shape(space, parts)
        expected = self.shapes.get(file, plain)
        if tuple(value.shape) != expected:
            where = f"which holds {_words(p.tensor for p in parts)}"
            if len(expected) == value.ndim == len(plain):
                i = next(i for i, n in enumerate(expected) if value.shape[i] != n)
                where = f"axis {i} ({' '.join(parts[0].layout.dims[i])}), {where}"
            raise SpaceError(
                f"'{name}': expected shape {list(expected)}, found {list(value.shape)}: {where}"
            )
        return take(space, value.detach().reshape(plain), parts)


def _part(space: WeightSpace, file: str, words: str) -> Slot:
    name, colon, text = words.partition(":")
    name = name.strip()
    if not colon or name not in space.tensors:
        raise SpaceError(
            f"the naming's line '{file}' must say 'TENSOR: LAYOUT' with a tensor of "
            f"'{space.name}', found '{words.strip()}'"
        )
    counted = COUNTED.findall(file)
    axes = tuple(a for a in space.tensors[name].axes if a not in counted)
    layout = Layout.parse(text.strip())
    misfit = layout.misfit(space, axes)
    if misfit is not None:
        raise SpaceError(f"the layout of '{name}' in '{file}' {misfit}")
    return Slot(name, layout, axes)


def _counted(space: WeightSpace, file: str) -> Iterator[str]:
    """The names in the file: one, or one for each index of the axis in braces."""
    axes = COUNTED.findall(file)
    if len(axes) > 1 or any(axis not in space.axes for axis in axes):
        raise SpaceError(f"'{file}' must count the indices of one axis of '{space.name}' at most")
    if not axes:
        yield file
    for i in range(space.axes[axes[0]].size if axes else 0):
        yield COUNTED.sub(str(i), file)


def _stacked(space: WeightSpace, file: str, part: Slot, values: list[Tensor]) -> Tensor:
    axes = COUNTED.findall(file)
    if not axes:
        return values[0]
    return torch.stack(values, space.tensors[part.tensor].position(axes[0]))


def _slice(
    space: WeightSpace, file: str, part: Slot, weights: Mapping[str, Tensor], i: int
) -> Tensor:
    axes = COUNTED.findall(file)
    whole = weights[part.tensor]
    return whole.select(space.tensors[part.tensor].position(axes[0]), i) if axes else whole


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in dict.fromkeys(names))
