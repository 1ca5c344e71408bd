"""Batches of networks as models read them: rows of weights, and views of them by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import small_transformer
from transformer_nfn.functional.description import Transformer
from transformer_nfn.known_tasks import HEADS, HIDDEN, KNOWN_TASKS, PAPER_TASKS, WIDTH
from transformer_nfn.spaces import Weights, WeightSpace, attention_block
from transformer_nfn.spaces.axis import under_prefix

BATCH = 256
"""Networks that are evaluated at a time."""
Rows = Tensor | slice


@dataclass(frozen=True)
class RowLayout:
    """Names and shapes of the tensors in a row of weights.

    Attributes:
        shapes: of the tensors of one network, in the order of the row.
        description: of the network, where it is a checkpoint of a family.
        places: where the numbers of each tensor stand in a row.
        depth: number of blocks of a network of the zoo, whose names begin with ``blocks.``.

    >>> RowLayout({"W": (2, 3), "b": (3,)}).width
    9
    """

    shapes: Mapping[str, tuple[int, ...]]
    description: Transformer | None = None
    places: Mapping[str, slice] = field(init=False, repr=False, compare=False)
    depth: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ends = [0, *accumulate(math.prod(shape) for shape in self.shapes.values())]
        places = {name: slice(*ends[i : i + 2]) for i, name in enumerate(self.shapes)}
        blocks = {name.split(".")[1] for name in self.shapes if name.startswith("blocks.")}
        # At once: a property that is computed later cannot be compiled.
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "depth", len(blocks))

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return max((place.stop for place in self.places.values()), default=0)

    def part(self, name: str) -> int | None:
        """Numbers in the tensors below a prefix, such as ``classifier``; None without any."""
        shapes = under_prefix(self.shapes, f"{name}.").values()
        return sum(math.prod(shape) for shape in shapes) or None

    def views(self, weights: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Tensors ``[…, *shape]`` by name, of rows ``[…, at least width]``.

        Args:
            weights: the rows.
            prefix: only tensors whose names begin so, under the rest of their names.
        """
        tensors = {}
        for name, place in self.places.items():
            if name.startswith(prefix):
                view, shape = weights[..., place], self.shapes[name]
                shaped = view.unflatten(-1, shape) if shape else view.squeeze(-1)
                tensors[name[len(prefix) :]] = shaped
        return tensors

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors ``[n, *shape]`` as rows ``[n, width]``."""
        return torch.cat([rows_of(tensors[name]) for name in self.shapes], 1)

    @property
    def key(self) -> tuple[Any, ...]:
        """What networks of one size have in common, with the order of their tensors."""
        return repr(self.description), tuple(self.shapes.items())


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of networks, of one size or several.

    >>> batch = Batch.of({"blocks.0.b_A": torch.zeros(2, 5), "classifier.b_1": torch.ones(2, 3)})
    >>> len(batch), batch.weights.shape, batch.views["classifier.b_1"].shape
    (2, torch.Size([2, 8]), torch.Size([2, 3]))

    Attributes:
        weights: a row for each network, ``[n, most weights]``, zeros behind the last one.
        layouts: of all sizes.
        size: number of each network's layout, ``[n]``.
        computed: what was computed from the weights, by key; ``[n, …]``.
    """

    weights: Tensor
    layouts: tuple[RowLayout, ...]
    size: Tensor
    computed: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(tensors: Mapping[str, Tensor], description: Transformer | None = None) -> Batch:
        """Networks of one size, by their tensors ``[n, *shape]``."""
        if not tensors or any(w.ndim < 1 for w in tensors.values()):
            raise SpaceError("a batch expected tensors with a batch axis in front")
        if len(sizes := {len(w) for w in tensors.values()}) != 1:
            found = ", ".join(map(str, sorted(sizes)))
            raise SpaceError(f"the tensors of a batch must have one batch size, found {found}")
        layout = RowLayout({name: tuple(w.shape[1:]) for name, w in tensors.items()}, description)
        return Batch.of_rows(layout.pack(tensors), layout)

    @staticmethod
    def of_rows(weights: Tensor, layout: RowLayout) -> Batch:
        """Networks of one size, by their rows ``[n, width]``."""
        if weights.ndim != 2 or weights.shape[1] != layout.width:
            raise SpaceError(
                f"rows of {layout.width} numbers expected, found {list(weights.shape)}"
            )
        size = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
        return Batch(weights, (layout,), size)

    @staticmethod
    def join(batches: Sequence[Batch]) -> Batch:
        """Networks of several batches, which may have other sizes.

        >>> first, second = (Batch.of({"W": torch.ones(1, n)}) for n in (2, 3))
        >>> Batch.join([first, second]).weights.tolist()
        [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
        """
        layouts = {layout.key: layout for batch in batches for layout in batch.layouts}
        numbers = {key: number for number, key in enumerate(layouts)}
        width = max(batch.weights.shape[1] for batch in batches)
        sizes = [
            torch.tensor(
                [numbers[layout.key] for layout in batch.layouts], device=batch.size.device
            )
            for batch in batches
        ]
        kept = [key for key in batches[0].computed if all(key in b.computed for b in batches)]
        return Batch(
            torch.cat([pad(b.weights, (0, width - b.weights.shape[1])) for b in batches]),
            tuple(layouts.values()),
            torch.cat([number[b.size] for number, b in zip(sizes, batches, strict=True)]),
            {key: torch.cat([b.computed[key] for b in batches]) for key in kept},
        )

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, rows: Rows) -> Self:
        """Networks of the batch; an index of several axes gives batches side by side."""
        return self.map(lambda w: w[rows])

    @property
    def layout(self) -> RowLayout:
        """The layout of networks of one size; several sizes are refused."""
        if len(self.layouts) != 1:
            raise SpaceError(
                f"a predictor on tensors reads networks of one size, found {len(self.layouts)} "
                "sizes"
            )
        return self.layouts[0]

    @property
    def views(self) -> dict[str, Tensor]:
        """Tensors ``[n, *shape]`` of networks of one size by name."""
        return self.layout.views(self.weights)

    def part(self, name: str) -> dict[str, Tensor]:
        """Tensors below a prefix, such as ``classifier``; none if there are none."""
        return self.layout.views(self.weights, f"{name}.")

    def blocks(self, number: int | None = None) -> list[Weights]:
        """Weights of each block, ``[n, 1, *axes]``; of another number of blocks are refused."""
        depth = self.layout.depth
        if number not in (None, depth):
            raise SpaceError(f"the model reads {number} blocks, found {depth}")
        return [
            {name: w.unsqueeze(1) for name, w in self.part(f"blocks.{i}").items()}
            for i in range(depth)
        ]

    def by_size(self) -> Iterator[tuple[Rows, Self]]:
        """Networks of each size that is there: their rows, and the batch of these alone."""
        if len(self.layouts) == 1:  # not searched: a GPU need not be waited for
            yield slice(None), self
            return
        for number, layout in enumerate(self.layouts):
            rows = (self.size == number).nonzero().squeeze(-1)
            if len(rows):
                part = self[rows]
                width, size = part.weights[:, : layout.width], torch.zeros_like(part.size)
                yield rows, replace(part, weights=width, layouts=(layout,), size=size)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor of the batch, its sizes too."""
        computed = {
            key: {name: change(w) for name, w in value.items()}
            if isinstance(value, Mapping) else change(value)
            for key, value in self.computed.items()
        }  # fmt: skip
        return replace(
            self, weights=change(self.weights), size=change(self.size), computed=computed
        )

    @property
    def tensors(self) -> dict[str, Any]:
        """The fields that hold tensors, for `dataclasses.replace`."""
        return {"weights": self.weights, "size": self.size, "computed": dict(self.computed)}

    def to(self, where: torch.device | str | torch.dtype) -> Self:
        """Move to a device, or give all numbers another dtype."""
        if isinstance(where, torch.dtype):
            return self.map(lambda w: w.to(where) if w.is_floating_point() else w)
        return self.map(lambda w: w.to(where))

    def with_weights(self, tensors: Mapping[str, Tensor]) -> Batch:
        """The networks with some of their tensors replaced, and nothing computed of them."""
        for name, w in tensors.items():
            shape = self.layout.shapes.get(name)
            if shape is None or w.shape != (len(self), *shape):
                expected = "no such tensor" if shape is None else f"{[len(self), *shape]}"
                raise SpaceError(f"tensor '{name}': expected {expected}, found {list(w.shape)}")
        return Batch.of_rows(self.layout.pack({**self.views, **tensors}), self.layout)

    def plus(self, key: str, value: Any) -> Self:
        """The batch with something computed."""
        return replace(self, computed={**self.computed, key: value})

    def only(self, *keys: str) -> Self:
        """What was computed without the weights, for models that read nothing else."""
        kept = {key: self.computed[key] for key in keys}
        return replace(self, weights=self.weights[..., :0], computed=kept)

    @property
    def named(self) -> dict[str, Tensor]:
        """All tensors, and what was computed of them, by name; of several sizes the rows."""
        one = len(self.layouts) == 1 and self.weights.shape[-1] == self.layout.width
        named = self.views if one else {"weights": self.weights, "size": self.size}
        for key, value in self.computed.items():
            if isinstance(value, Mapping):
                named |= {f"{key}.{name}": w for name, w in value.items()}
            else:
                named[key] = value
        return named

    def changed(self, before: Batch) -> str | None:
        """Name of a tensor, or of something computed, that differs from an earlier copy."""
        expected = before.named
        different = (name for name, w in self.named.items() if not torch.equal(w, expected[name]))
        return next(different, None)

    def chunks(self, size: int) -> Iterator[Self]:
        """Batches of at most ``size`` networks; one of none if there is none."""
        for at in range(0, max(len(self), 1), size):
            yield self[at : at + size]

    def in_chunks(self, function: Callable[[Self], Tensor]) -> Tensor:
        """Evaluate a function on all networks, some at a time; they are its last axis."""
        return torch.cat([function(part) for part in self.chunks(BATCH)], -1)

    def flat(self, part: str, width: int) -> Tensor:
        """The tensors below a prefix as ``[n, width]``, names in alphabetical order."""
        tensors = self.part(part)
        if not tensors:
            raise SpaceError(f"the model reads tensors named '{part}.…', found none")
        out = torch.cat([rows_of(tensors[name]) for name in sorted(tensors)], -1)
        if out.shape[1] != width:
            raise SpaceError(
                f"'{part}' must have {width} numbers for each network, found {out.shape[1]}"
            )
        return out


def rows_of(tensor: Tensor) -> Tensor:
    """A tensor ``[n, *shape]`` as ``[n, numbers]``."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)


def paper_layout(task: str) -> RowLayout:
    """RowLayout of the networks of one of the paper's zoos."""
    if task not in PAPER_TASKS:
        raise SpaceError(f"task must be one of {', '.join(PAPER_TASKS)}, found {task!r}")
    known = KNOWN_TASKS[task]
    return RowLayout(small_transformer(known.tokens, known.classes, known.patch).space.shapes)


def paper_block() -> WeightSpace:
    """The block of the paper's zoos: D = 32, two heads of 16, 64 neurons."""
    return attention_block(WIDTH, HEADS, WIDTH // HEADS, WIDTH // HEADS, HIDDEN)
