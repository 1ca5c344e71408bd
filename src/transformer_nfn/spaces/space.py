"""A weight space as data: named axes, tensors over them, and the group they declare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.notebook import to_html
from transformer_nfn.spaces.axis import Axis, Shift, TensorSpec, Weights
from transformer_nfn.spaces.group import Group
from transformer_nfn.spaces.layout import Layout
from transformer_nfn.spaces.weights import check_weights

FORMAT = 1


@dataclass(frozen=True, eq=False)
class WeightSpace(Layout):
    """The space of all weights of one architecture, with the action on every axis.

    Build one with `WeightSpace.build`, or take a ready-made one from `transformer_nfn.spaces`.
    Weights in the space are plain ``dict[str, Tensor]`` of shape ``[batch, channels, *axes]``.

    Attributes:
        name: name in tables and messages.
        axes: every axis by name.
        tensors: every tensor by name, in order.
        shifts: biases that may be shifted (see `Shift`).
        architecture: name of its architecture in `transformer_nfn.functional.KNOWN`, if any.
        options: further options of that architecture (JSON values).

    >>> attention = WeightSpace.build(
    ...     "attention",
    ...     [Axis.free("input", 8), Axis.perm("head", 2), Axis.linear("qk", 3, of="head")],
    ...     {"W_Q": "head input qk", "W_K": "head input qk*"},
    ... )
    >>> attention
    WeightSpace('attention', 96 weights)
    >>> [product.name for product in attention.products]
    ['W_Q·W_K']
    >>> attention.shape("W_Q"), attention.rebased("W_Q"), attention.ancestors("qk")
    ((2, 8, 3), ('qk',), ('head',))
    """

    architecture: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def build(
        name: str,
        axes: Iterable[Axis],
        tensors: Mapping[str, str],
        *,
        shifts: Iterable[Shift] = (),
        architecture: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> WeightSpace:
        """A validated space from its axes and one text per tensor.

        >>> WeightSpace.build("map", [Axis.free("in", 2), Axis.perm("out", 3)], {"W": "in out"})
        WeightSpace('map', 6 weights)
        """
        by_name: dict[str, Axis] = {}
        for axis in axes:
            if axis.name in by_name:
                raise SpaceError(f"space '{name}' has two axes named '{axis.name}'")
            by_name[axis.name] = axis
        specs = {key: TensorSpec.parse(key, words) for key, words in tensors.items()}
        space = WeightSpace(name, by_name, specs, tuple(shifts), architecture, dict(options or {}))
        space.validate()
        return space

    @cached_property
    def group(self) -> Group:
        """The symmetry group that the axes declare."""
        return Group(self)

    def randn(
        self,
        batch: int,
        channels: int = 1,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Weights:
        """Standard normal weights, each tensor of shape ``[batch, channels, *axes]``.

        >>> from transformer_nfn import spaces
        >>> spaces.multi_head(8, 2, 3, 4).randn(batch=5)["W_O"].shape
        torch.Size([5, 1, 2, 4, 8])
        """
        target = device if device is not None else (generator.device if generator else None)
        return {
            name: torch.randn(
                (batch, channels, *shape), generator=generator, dtype=dtype, device=target
            )
            for name, shape in self.shapes.items()
        }

    def check(
        self, weights: Mapping[str, Tensor], *, finite: bool = True, lead: int | None = 2
    ) -> None:
        """Raise `SpaceError` with one sentence if ``weights`` do not lie in this space.

        Args:
            weights: tensors by name, each ``[batch, channels, *axes]``.
            finite: also reject NaN and infinity (reads every weight once).
            lead: number of axes before those of the space; None for any number, the same for all
                tensors.

        >>> from transformer_nfn import spaces
        >>> spaces.multi_head(8, 2, 3, 4).check(spaces.multi_head(8, 2, 3, 5).randn(1))
        Traceback (most recent call last):
        ...
        transformer_nfn.errors.SpaceError: 'W_V' axis 'vo': expected 4, found 5 ...
        """
        check_weights(self, weights, finite=finite, lead=lead)

    def network(self, weights: Mapping[str, Tensor], item: int = 0, channel: int = 0) -> Weights:
        """One network of a batch, each tensor of shape ``[1, 1, *axes]``."""
        return {name: w[item : item + 1, channel : channel + 1] for name, w in weights.items()}

    def to_json(self, *, indent: int | None = None) -> str:
        """The space as JSON; inverse of `WeightSpace.from_json`.

        >>> from transformer_nfn import spaces
        >>> space = spaces.rope_block(8, 2, 4, 4, 16)
        >>> WeightSpace.from_json(space.to_json()) == space
        True
        """
        out: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "axes": [axis.to_json() for axis in self.axes.values()],
            "tensors": {name: " ".join(spec.words()) for name, spec in self.tensors.items()},
        }
        if self.shifts:
            out["shifts"] = [
                {k: v for k, v in vars(shift).items() if v is not None} for shift in self.shifts
            ]
        if self.architecture is not None:
            out["architecture"] = self.architecture
        if self.options:
            out["options"] = dict(self.options)
        return json.dumps(out, indent=indent, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> WeightSpace:
        """Parse the output of `to_json`; anything else is a `SpaceError`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpaceError(f"a weight space must be JSON: {error}") from error
        return WeightSpace.from_object(data)

    @staticmethod
    def from_object(data: object) -> WeightSpace:
        """The space described by parsed JSON; see `from_json`."""
        if not isinstance(data, dict) or "axes" not in data or "tensors" not in data:
            raise SpaceError("a weight space in JSON needs the keys 'axes' and 'tensors'")
        if data.get("format", FORMAT) != FORMAT:
            raise SpaceError(
                f"weight space format {data['format']!r} is not known here (expected {FORMAT})"
            )
        tensors = data["tensors"]
        if not isinstance(tensors, dict) or not all(isinstance(w, str) for w in tensors.values()):
            raise SpaceError("a weight space in JSON names the axes of each tensor as one text")
        try:
            return WeightSpace.build(
                data.get("name", "space"),
                [Axis(**axis) for axis in data["axes"]],
                tensors,
                shifts=[Shift(**shift) for shift in data.get("shifts", [])],
                architecture=data.get("architecture"),
                options=data.get("options"),
            )
        except (TypeError, AttributeError) as error:
            raise SpaceError(f"a weight space in JSON is malformed: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightSpace) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __str__(self) -> str:
        """Tensors, axes and invariant products as aligned text."""
        lines = [self._title()]
        for head, rows in self._tables():
            lines += ["", *_columns(head, rows)]
        if self.products:
            rows = [(p.name, p.over, " ".join(p.axes)) for p in self.products]
            lines += ["", *_columns(("invariant product", "over", "axes"), rows)]
        for shift in self.shifts:
            path = f" (taken up by {shift.into} through {shift.through})"
            lines += ["", f"{shift.tensor} may be shifted{path if shift.into else ' freely'}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"WeightSpace('{self.name}', {self.num_weights} weights)"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        titles = (self._title(), "")
        return "".join(
            to_html(title, {name: tuple(cells) for name, *cells in rows}, head)
            for title, (head, rows) in zip(titles, self._tables(), strict=True)
        )

    def _title(self) -> str:
        return f"{self.name}: {len(self.tensors)} tensors, {self.num_weights:,} weights"

    def _tables(self) -> Iterator[tuple[Sequence[str], Sequence[tuple[str, ...]]]]:
        """Tensors, then axes: the head and the rows of a table."""
        tensors = [
            (name, " × ".join(str(n) for n in self.shape(name)) or "1", " ".join(spec.words()))
            for name, spec in self.tensors.items()
        ]
        yield ("tensor", "shape", "axes (* = dual)"), tensors
        axes = []
        for axis in self.axes.values():
            acts = axis.action.describe(axis.size)
            if axis.of is not None:
                acts += f", one for each {axis.of}"
            axes.append((axis.name, str(axis.size), axis.kind, acts))
        yield ("axis", "size", "kind", "what acts on it"), axes


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    table = [head, ["─" * w for w in widths], *rows]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]
