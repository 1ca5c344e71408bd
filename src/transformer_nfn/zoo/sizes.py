"""Sizes of the zoo's network and the layout of its weights in one flat row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.functional import Architecture, sinusoids, small_transformer
from transformer_nfn.io.json_fields import Fields
from transformer_nfn.known_tasks import BLOCKS, HEADS, HIDDEN, WIDTH, KnownTask
from transformer_nfn.models.batch import RowLayout
from transformer_nfn.spaces import WeightSpace, attention_block
from transformer_nfn.zoo.errors import ZooError

MOST_WIDTH, MOST_DEPTH = 512, 32
_NAME = re.compile(r"w(\d{1,9})-h(\d{1,9})-d(\d{1,9})")


@dataclass(frozen=True, order=True)
class SizeGroup:
    """Width, heads and depth of networks; the authors' by default. MLPs have ``2·width`` neurons.

    Attributes:
        width: D, even because sinusoidal positions come in pairs.
        heads: of width ``width // heads`` each.
        depth: number of blocks.

    >>> SizeGroup(width=16, depth=1).name
    'w16-h2-d1'
    >>> print(SizeGroup.from_name("w16-h2-d1"))
    width 16, 2 heads, 1 block
    """

    width: int = WIDTH
    heads: int = HEADS
    depth: int = BLOCKS

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MOST_WIDTH or self.width % 2:
            raise ZooError(
                f"width must be an even number from 2 to {MOST_WIDTH}, found {self.width}"
            )
        if not 1 <= self.depth <= MOST_DEPTH:
            raise ZooError(f"depth must lie between 1 and {MOST_DEPTH}, found {self.depth}")
        if self.heads < 1:
            raise ZooError(f"heads must be at least 1, found {self.heads}")
        if self.width % self.heads:
            raise ZooError(
                f"{self.heads} heads do not divide width {self.width}: every head has an equal "
                "share of it"
            )

    @property
    def name(self) -> str:
        """Name of its subfolder in a mixed zoo, such as ``w16-h2-d1``."""
        return f"w{self.width}-h{self.heads}-d{self.depth}"

    @property
    def neurons(self) -> int:
        """Neurons of each MLP: twice the width, as in the authors' code."""
        return 2 * self.width

    def __str__(self) -> str:
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        blocks = "1 block" if self.depth == 1 else f"{self.depth} blocks"
        return f"width {self.width}, {heads}, {blocks}"

    @staticmethod
    def from_name(name: str) -> SizeGroup:
        """The inverse of `name`."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ZooError(f"'{name}' is not a kind of network: expected a name like w16-h2-d1")
        return SizeGroup(*map(int, match.groups()))


PAPER = SizeGroup()
"""Sizes of all networks of the paper's authors, who state the width in their code alone."""


def size_groups(
    widths: Sequence[int], heads: Sequence[int], depths: Sequence[int]
) -> tuple[SizeGroup, ...]:
    """Every combination of widths, heads and depths, in order.

    >>> [group.name for group in size_groups([16, 32], [2], [1])]
    ['w16-h2-d1', 'w32-h2-d1']
    """
    groups = tuple(SizeGroup(*sizes) for sizes in product(widths, heads, depths))
    for name, sizes in (("width", widths), ("heads", heads), ("depth", depths)):
        twice = sorted({size for size in sizes if list(sizes).count(size) > 1})
        if twice:
            raise ZooError(f"{name} {twice[0]} is given twice")
    return groups


LARGEST = 1 << 16
"""Of a width; the zoo's networks are small ones."""
DEEPEST = 1000


def check_sizes(fields: Fields) -> None:
    """Refuse sizes that are missing, no whole numbers, or that no network here can have."""
    for name in ("tokens", "classes", "d_model", "heads", "d_ff"):
        fields.whole(name, 1, LARGEST)
    fields.whole("patch", 0, LARGEST)
    fields.whole("blocks", 1, DEEPEST)
    if fields.data["d_model"] % fields.data["heads"]:
        fields.refuse("heads", f"a divisor of the width {fields.data['d_model']}")


@dataclass(frozen=True)
class NetworkSizes:
    """The paper's small transformer: patches or word vectors, blocks, mean, two linear maps.

    Attributes:
        tokens: positions there are at most (images always fill them).
        classes: logits.
        patch: pixels a patch, or 0 where the input is frozen word vectors of width ``d_model``.
    """

    tokens: int
    classes: int
    patch: int
    d_model: int = WIDTH
    heads: int = HEADS
    d_ff: int = HIDDEN
    blocks: int = BLOCKS

    @property
    def d_head(self) -> int:
        """The width of one head."""
        return self.d_model // self.heads

    @property
    def dropout_sites(self) -> int:
        """Places where dropout acts: after the embedding, each attention and each MLP."""
        return 1 + 2 * self.blocks

    @cached_property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """Tensors of the flat row in order; Q, K and V of all heads lie side by side."""
        D, F = self.d_model, self.d_ff
        out: dict[str, tuple[int, ...]] = {}
        if self.patch:
            out |= {"embedding.W": (self.patch, D), "embedding.b": (D,)}
        for i in range(self.blocks):
            out |= {
                f"blocks.{i}.W_QKV": (D, 3 * D),
                f"blocks.{i}.W_O": (D, D),
                f"blocks.{i}.W_A": (D, F),
                f"blocks.{i}.b_A": (F,),
                f"blocks.{i}.W_B": (F, D),
                f"blocks.{i}.b_B": (D,),
            }
        out |= {"classifier.W_1": (D, D), "classifier.b_1": (D,)}
        return out | {"classifier.W_2": (D, self.classes), "classifier.b_2": (self.classes,)}

    @property
    def num_weights(self) -> int:
        """How many numbers one network has: 18,506 for MNIST, 17,764 for AG News."""
        return sum(math.prod(shape) for shape in self.layout.values())

    @cached_property
    def block_space(self) -> WeightSpace:
        """The paper's block U, of which the network has ``blocks``."""
        return attention_block(self.d_model, self.heads, self.d_head, self.d_head, self.d_ff)

    @cached_property
    def architecture(self) -> Architecture:
        """The whole network as one space, with its forward and the key names of its files."""
        return small_transformer(**asdict(self))

    @property
    def space(self) -> WeightSpace:
        """The whole network: tensors ``embedding.W``, ``blocks.0.W_Q``, …, ``classifier.b_2``."""
        return self.architecture.space

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors of `layout` as views of flat rows ``[networks, num_weights]``."""
        if flat.shape[-1] != self.num_weights:
            raise ZooError(
                f"networks of {self.num_weights} weights expected, found rows of {flat.shape[-1]}"
            )
        sizes = [math.prod(shape) for shape in self.layout.values()]
        parts = flat.split(sizes, dim=-1)
        return {
            name: part.unflatten(-1, shape)
            for (name, shape), part in zip(self.layout.items(), parts, strict=True)
        }

    def to_named(self, flat: Tensor) -> dict[str, Tensor]:
        """Flat rows as the tensors of `space`, each ``[networks, *axes]``, contiguous."""
        out: dict[str, Tensor] = {}
        for name, w in self.views(flat).items():
            stem, _, last = name.rpartition(".")
            if last == "W_QKV":
                split = w.unflatten(-1, (3, self.heads, self.d_head)).permute(2, 0, 3, 1, 4)
                for letter, part in zip("QKV", split, strict=True):
                    out[f"{stem}.W_{letter}"] = part.contiguous()
            elif last == "W_O":
                out[name] = w.unflatten(-2, (self.heads, self.d_head)).contiguous()
            else:
                out[name] = w.contiguous()
        return {name: out[name] for name in self.space.tensors}

    @cached_property
    def row_layout(self) -> RowLayout:
        """Names and shapes of the tensors in a stored row."""
        return RowLayout(self.space.shapes)

    def to_rows(self, flat: Tensor) -> Tensor:
        """Flat rows as they are stored, tensors in the order of `space`."""
        return self.row_layout.pack(self.to_named(flat))

    def from_named(self, named: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `to_named`, bit for bit."""
        self.space.check(named, finite=False, lead=1)
        parts: list[Tensor] = []
        for name in self.layout:
            stem, _, last = name.rpartition(".")
            if last == "W_QKV":
                qkv = torch.stack([named[f"{stem}.W_{letter}"] for letter in "QKV"], dim=1)
                parts.append(qkv.permute(0, 3, 1, 2, 4).flatten(1))
            else:
                parts.append(named[name].flatten(1))
        return torch.cat(parts, dim=1)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """The fixed sinusoidal positions ``[tokens, d_model]``."""
        return sinusoids(self.tokens, self.d_model).to(device)

    def __getstate__(self) -> dict[str, Any]:
        """The sizes alone; what was derived from them is derived again where it is needed."""
        return asdict(self)

    @staticmethod
    def of(task: KnownTask, group: SizeGroup = PAPER) -> NetworkSizes:
        """Sizes of the networks of a task; the paper's by default."""
        return NetworkSizes(task.tokens, task.classes, task.patch).resized(group)

    @property
    def group(self) -> SizeGroup:
        """Width, heads and depth."""
        return SizeGroup(self.d_model, self.heads, self.blocks)

    def resized(self, group: SizeGroup) -> NetworkSizes:
        """Networks of other width, heads and depth for the same task."""
        return replace(
            self,
            d_model=group.width,
            heads=group.heads,
            d_ff=group.neurons,
            blocks=group.depth,
        )

    def to_json(self) -> dict[str, Any]:
        """The architecture as plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> NetworkSizes:
        """Reads what `to_json` wrote."""
        return read_sizes(Fields(data, "an architecture in JSON", ZooError))


def read_sizes(fields: Fields) -> NetworkSizes:
    """The sizes in a record, checked by `check_sizes`."""
    check_sizes(fields)
    return NetworkSizes(**{name: fields.data[name] for name in NetworkSizes.__dataclass_fields__})
