"""Which numbers one small transformer has, and how they lie in one flat row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.functional import Architecture, sinusoids, small_transformer
from transformer_nfn.known_tasks import BLOCKS, HEADS, HIDDEN, WIDTH, KnownTask
from transformer_nfn.spaces import WeightSpace, attention_block
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.kind import PAPER, Kind
from transformer_nfn.zoo.size_check import check_sizes


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
    def of(task: KnownTask, kind: Kind = PAPER) -> NetworkSizes:
        """The network of a kind for a task; the paper's by default."""
        return NetworkSizes(task.tokens, task.classes, task.patch).resized(kind)

    @property
    def kind(self) -> Kind:
        """Its width, heads and depth."""
        return Kind(self.d_model, self.heads, self.blocks)

    def resized(self, kind: Kind) -> NetworkSizes:
        """For the same task, another kind of network."""
        return replace(
            self,
            d_model=kind.width,
            heads=kind.heads,
            d_ff=kind.neurons,
            blocks=kind.depth,
        )

    def to_json(self) -> dict[str, Any]:
        """The architecture as plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> NetworkSizes:
        """Reads what `to_json` wrote."""
        try:
            check_sizes(data)
            return NetworkSizes(**data)
        except TypeError as error:
            raise ZooError(f"an architecture in JSON is malformed: {error}") from error
