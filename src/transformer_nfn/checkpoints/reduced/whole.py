"""How is a whole transformer brought to its reduced form? Its ends here, its blocks one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.checkpoints.reduced.block import ReducedBlock
from transformer_nfn.checkpoints.reduced.pieces import Piece, Table, folded, rounding_rms
from transformer_nfn.errors import SpaceError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model


def reduce_pair(
    A: Model, B: Model, dtype: torch.dtype = torch.float64
) -> tuple[Reduced, Reduced]:
    """The reduced forms of two models to compare; see `Reduced`."""
    coarse = max((A.dtype, B.dtype), key=rounding_rms)
    return Reduced(A, dtype, coarse), Reduced(B, dtype, coarse)


class Reduced:
    """The reduced form of an open model, block by block.

    Attributes:
        model: what it is read from.
        about: its description.
        dtype: of everything it gives.
        centred: the all-ones direction of what blocks write is seen by nobody.
        unit: expected square of the relative rounding error of a weight.
        blocks: names of the blocks, ``encoder.0`` for a model with two stacks, in order.
    """

    def __init__(
        self, model: Model, dtype: torch.dtype = torch.float64, stored: torch.dtype | None = None
    ) -> None:
        """Nothing is read yet.

        Args:
            model: to reduce.
            dtype: to work in.
            stored: the dtype that weights were once rounded to, if not the file's. Of two models
                that are compared the coarser one: a cast may have come before a disguise.
        """
        self.model, self.about, self.dtype = model, model.about, dtype
        self.names: Mapping[str, tuple[int, ...]] = model.names
        self.unit = max(rounding_rms(d) for d in (stored or model.dtype, dtype)) ** 2
        self.post = "post" in self.about.orders
        self.centred = self.about.hides_mean
        self._at = {
            f"{stack.prefix}{i}": block
            for stack in self.about.stacks
            for i, block in enumerate(stack.blocks)
        }
        self.blocks = tuple(self._at)

    def block(self, name: str) -> ReducedBlock:
        """One block by its name."""
        return ReducedBlock(self, name, self._at[name])

    def read(self, name: str) -> Tensor | None:
        """A canonical tensor of the file in the working dtype; None where there is none."""
        return self.model[name].to(self.dtype) if name in self.names else None

    def final_norm(self, stack: str | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of the norm after a stack (the last one if not named), or of its last
        block where that ends in a norm."""
        prefix = self.about.stacks[-1].prefix if stack is None else stack
        found = self.read(f"{prefix}norm.g"), self.read(f"{prefix}norm.b")
        if found[0] is None and self.post:
            last = f"{self.blocks[-1]}.norm_2"
            return self.read(f"{last}.g"), self.read(f"{last}.b")
        return found

    @cached_property
    def _token(self) -> Tensor:
        return self.model["token"]

    def tables(self, names: tuple[str, ...] | None = None) -> Iterator[Table]:
        """Every matrix between a free axis and the stream: embeddings, positions, outputs.

        Args:
            names: which of ``token``, ``position``, ``type``, ``patch``, ``head``, ``extra.…``;
                all of them if not given.
        """
        for name in self.table_names():
            if names is None or name in names:
                yield self._table(name)

    def table_names(self) -> tuple[str, ...]:
        """The tables this model has."""
        inputs = [n for n in ("token", "position", "type", "patch") if n in self.names]
        outputs = ["head"] if self.has_head and self.about.mlm is None else []
        extras = [n for n in self.names if n.startswith("extra.") and n.endswith(".W")]
        return (*inputs, *outputs, *(n.removesuffix(".W") for n in extras if n != "extra.mlm.W"))

    def table_rows(self, name: str) -> int:
        """The number of rows of a table, without reading it."""
        if name == "head" and "head" not in self.names:
            name = "token"
        rows, columns = self.names[f"{name}.W" if name.startswith("extra.") else name]
        return columns if name == "head" or name.startswith("extra.") else rows

    def output(self) -> Table | None:
        """The final stream as an output of its own, where there is no output matrix."""
        if not self.about.headless:
            return None
        gain, beta = self.final_norm()
        ones = torch.eye(self.about.width, dtype=self.dtype)
        centred = self.centred and gain is not None
        return Table(
            "output", ones, dtype=self.dtype, unit=self.unit, gain=gain, beta=beta, centred=centred
        )

    @property
    def has_head(self) -> bool:
        """Whether there is an output matrix, tied or not."""
        return self.about.tied or "head" in self.names

    def _table(self, name: str) -> Table:
        embedded = name in ("token", "position", "type", "patch")
        centred = self.about.hides_mean_of_embeddings if embedded else self.centred
        make = partial(Table, name, dtype=self.dtype, unit=self.unit, centred=centred)
        if name == "token":
            return make(self._token, scale=self.about.embedding_scale)
        if name == "position":
            return make(self._positions())
        if name in ("type", "patch"):
            return make(self.model[name])
        gain, beta = self.final_norm()
        if name == "head":
            raw = self._token if "head" not in self.names else self.model["head"].mT
            bias = self.model["head_bias"] if "head_bias" in self.names else None
            return make(raw, scale=self.about.head_scale, bias=bias, gain=gain, beta=beta)
        own = f"{name}.b"
        bias = self.model[own] if own in self.names else None
        return make(self.model[f"{name}.W"].mT, bias=bias, gain=gain, beta=beta)

    def _positions(self) -> Tensor:
        """Position embeddings, with what is always added to the same positions folded in."""
        table = self.model["position"]
        if self.about.inputs != "patches":
            return table
        table = table.to(self.dtype).clone()
        first = [n for n in ("cls", "dist") if n in self.names]
        for row, name in enumerate(first):
            table[row] += self.model[name].to(self.dtype)
        if "patch_bias" in self.names:
            table[len(first) :] += self.model["patch_bias"].to(self.dtype)
        return table

    def vectors(self) -> dict[str, Piece]:
        """Vectors of the stream that stay: the gain of a norm on the embeddings."""
        value = self.read("embed_norm.g")
        if value is None:
            return {}
        return {"embed_norm.g": Piece(value, self.unit * value.square().sum())}

    def masked_head(self) -> tuple[Piece, Piece, Table] | None:
        """BERT's head: `norm(φ(x W + b))` read by the output matrix, an MLP with a norm inside.

        Returns:
            W ``[D, m]``, b ``[m]``, and the output matrix as a table over the m hidden units.
        """
        if self.about.mlm is None or "extra.mlm.W" not in self.names:
            return None
        W, b = (self.read(f"extra.mlm.{part}") for part in "Wb")
        if W is None or b is None:
            raise SpaceError(f"'{self.model.where}': the masked-language head lacks W or b")
        gain, beta = self.final_norm()
        centring = self.about.norm == "layer"
        weight, bias = folded(W, b, gain, beta, unit=self.unit, centred=centring)
        assert bias is not None
        raw = self._token if "head" not in self.names else self.model["head"].mT
        table = Table(
            "head",
            raw,
            dtype=self.dtype,
            unit=self.unit,
            scale=self.about.head_scale,
            gain=self.read("extra.mlm_norm.g"),
            beta=self.read("extra.mlm_norm.b"),
            bias=self.model["head_bias"] if "head_bias" in self.names else None,
            centred=centring,
        )
        return weight, bias, table
