"""What is left of a transformer once everything its norms allow is folded away?

The reduced form has as few symmetries as can be had without choosing a basis:

- gains and biases of a norm go into what reads through it, `W ← diag(γ) W`, `b ← b + β W`;
- LayerNorm removes a vector's mean before anything reads it, so the all-ones direction is
  projected out of readers and writers: a pre-norm LayerNorm network is an RMS-norm network on
  D − 1 dimensions;
- a value bias goes through `W_O` into the output bias, a key bias that softmax cannot see is
  dropped, the scale of the scores goes into the queries;
- [CLS], patch bias and the mean of token types go into the positions or tokens they are added to;
- a tied output matrix is read as an untied one, the tie stays a fact of the description;
- post-norm networks keep their norms, since the residual stream itself carries the gains.

Everything is read tensor by tensor and never multiplied out: the largest thing in memory is one
matrix of one block. Each piece knows how much the rounding of the file is expected to have moved
it, which is worth computing in float64 alone; scores need only cosines, for which float32 is
plenty and half the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError

if TYPE_CHECKING:
    from transformer_nfn.architectures.families import Model
    from transformer_nfn.architectures.families.description import Attention, Block

ROUNDING_RMS = 0.2
"""Root mean square of a rounding error over the spacing of numbers at 1, times the number: errors
are uniform within half a spacing (1/√12 = 0.29), and numbers lie between 1 and 2 spacings' powers."""
STEPS = 64.0
"""Weights kept in float64 have been computed in float64, with an error at each step."""


def rounding_rms(dtype: torch.dtype) -> float:
    """The relative error to expect, in the mean square, of a weight that was stored in a dtype."""
    error = ROUNDING_RMS * torch.finfo(dtype).eps
    return error * STEPS if dtype == torch.float64 else error


@dataclass(frozen=True)
class Piece:
    """A tensor of the reduced form, and how far rounding is expected to have moved it.

    Attributes:
        value: the tensor.
        error: expected square of the rounding error, summed over the stream's axis where the
            tensor has one (``W_Q [h, D, d]`` has errors ``[h, d]``); all else entry by entry.
    """

    value: Tensor
    error: Tensor


class Table:
    """A matrix with a free axis and the stream's, ``[rows, D]``, read some rows at a time.

    Attributes:
        name: canonical name.
        bias: added to what a row gives (the output matrix's bias), ``[rows]`` in the file's
            dtype, or None.
    """

    def __init__(
        self,
        name: str,
        raw: Tensor,
        *,
        dtype: torch.dtype,
        unit: float,
        scale: float = 1.0,
        gain: Tensor | None = None,
        beta: Tensor | None = None,
        bias: Tensor | None = None,
        centred: bool = False,
    ) -> None:
        self.name, self.bias = name, bias
        self._raw, self._dtype, self._unit, self._scale = raw, dtype, unit, scale
        self._gain, self._beta, self._centred = gain, beta, centred

    def __len__(self) -> int:
        return len(self._raw)

    def rows(self, start: int, stop: int) -> Piece:
        """Rows ``start`` to ``stop``."""
        raw = self._raw[start:stop]
        value = raw.to(self._dtype)
        if value is raw:
            value = value.clone()
        unit = self._unit
        if self._scale != 1.0:
            value *= self._scale
        if self._gain is not None:
            value *= self._gain
            unit = 2 * unit
        error = value.square().sum(-1) * unit
        if self._centred:
            value -= value.mean(-1, keepdim=True)
        return Piece(value, error)

    def biases(self, start: int, stop: int) -> Piece | None:
        """What is added to each row's product with the stream, the norm's bias folded in."""
        if self.bias is None and self._beta is None:
            return None
        raw = self._raw[start:stop]
        unit = self._unit
        value = torch.zeros(len(raw), dtype=self._dtype)
        error = torch.zeros_like(value)
        if self._beta is not None:
            read = raw.to(self._dtype) * self._scale
            value, error = read @ self._beta, 2 * unit * (read.square() @ self._beta.square())
        if self.bias is not None:
            own = self.bias[start:stop].to(self._dtype)
            value, error = value + own, error + unit * own.square()
        return Piece(value, error)


class Reduced:
    """The reduced form of an open model, block by block.

    Attributes:
        model: what it is read from.
        about: its description.
        dtype: of everything it gives.
        centred: the all-ones direction of the stream is seen by nobody.
        unit: expected square of the relative rounding error of a weight of the file.
        blocks: names of the blocks, ``encoder.0`` for a model with two stacks, in order.
    """

    def __init__(self, model: Model, dtype: torch.dtype = torch.float64) -> None:
        self.model, self.about, self.dtype = model, model.about, dtype
        self.names: Mapping[str, tuple[int, ...]] = model.names
        self.unit = rounding_rms(model.dtype) ** 2
        stacks = self.about.stacks
        self.post = any(b.order == "post" for s in stacks for b in s.blocks)
        # Where the stream leaves the network without a norm, its mean is part of the answer.
        normed = self.post or all(s.final_norm for s in stacks)
        self.centred = self.about.norm == "layer" and normed
        self._at = {
            f"{stack.prefix}{i}": block
            for stack in stacks
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
        """Gain and bias of the norm after a stack; of the last one if not named."""
        prefix = self.about.stacks[-1].prefix if stack is None else stack
        return self.read(f"{prefix}norm.g"), self.read(f"{prefix}norm.b")

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

    @property
    def has_head(self) -> bool:
        """Whether there is an output matrix, tied or not."""
        return self.about.tied or "head" in self.names

    def _table(self, name: str) -> Table:
        common = {"dtype": self.dtype, "unit": self.unit, "centred": self.centred}
        if name == "token":
            scale = self.about.embedding_scale
            return Table(name, self._token, scale=scale, **common)
        if name == "position":
            return Table(name, self._positions(), **common)
        if name in ("type", "patch"):
            return Table(name, self.model[name], **common)
        gain, beta = self.final_norm()
        centred = self.centred and not self.post
        out = {**common, "centred": centred, "gain": gain, "beta": beta}
        if name == "head":
            raw = self._token if "head" not in self.names else self.model["head"].mT
            bias = self.model["head_bias"] if "head_bias" in self.names else None
            return Table(name, raw, scale=self.about.head_scale, bias=bias, **out)
        own = f"{name}.b"
        bias = self.model[own] if own in self.names else None
        return Table(name, self.model[f"{name}.W"].mT, bias=bias, **out)

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
        """Vectors of the stream that stay: embedding norms, and a headless model's last norm."""
        kept = [n for n in ("embed_norm.g", "embed_norm.b") if n in self.names]
        if not self.has_head:
            prefix = self.about.stacks[-1].prefix
            kept += [n for n in (f"{prefix}norm.g", f"{prefix}norm.b") if n in self.names]
        out = {}
        for name in kept:
            value = self.model[name].to(self.dtype)
            out[name] = Piece(value, self.unit * value.square().sum())
        return out

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
        unit = self.unit
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
            centred=self.about.norm == "layer",
        )
        return Piece(W, unit * W.square().sum(0)), Piece(b, unit * b.square()), table


class ReducedBlock:
    """One block of the reduced form, its weights in memory in the file's own dtype.

    Attributes:
        name: of the block.
        about: its description.
    """

    def __init__(self, whole: Reduced, name: str, about: Block) -> None:
        self.whole, self.name, self.about = whole, name, about
        self._unit = whole.unit

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of the block."""
        return f"{self.name}.{tensor}" in self.whole.names

    def attentions(self) -> tuple[tuple[str, Attention], ...]:
        """The attentions by what stands before their tensors: own, and to the encoder."""
        cross = self.about.cross
        own = ("", self.about.attention)
        return (own,) if cross is None else (own, ("cross.", cross))

    def reader(self, tensor: str) -> tuple[Piece, Piece | None]:
        """A matrix that reads the stream, and the bias of what it reads.

        Args:
            tensor: ``W_Q``, ``W_K``, ``W_V``, ``W_A``, ``W_G``, or with ``cross.`` before it.
        """
        raw = self._read(tensor)
        gain, beta = self._norm_before(tensor)
        own = self._maybe(tensor.replace("W_", "b_"))
        unit, bias, bias_error = self._unit, own, None
        if own is not None:
            bias_error = unit * own.square()
        if beta is not None:
            folded = torch.einsum("d,...dk->...k", beta, raw)
            moved = 2 * unit * torch.einsum("d,...dk->...k", beta.square(), raw.square())
            bias = folded if bias is None else bias + folded
            bias_error = moved if bias_error is None else bias_error + moved
        if gain is not None:
            raw *= gain.unsqueeze(-1)
            unit = 2 * unit
        error = unit * raw.square().sum(-2)
        if self.whole.centred and self.about.order != "post":
            raw -= raw.mean(-2, keepdim=True)
        weight = Piece(raw, error)
        if bias is None or bias_error is None:
            return weight, None
        return weight, Piece(bias, bias_error)

    def writer(self, tensor: str) -> Piece:
        """A matrix that writes to the stream: ``W_O [h, d, D]``, ``W_B [f, D]``."""
        raw = self._read(tensor)
        error = self._unit * raw.square().sum(-1)
        if self.whole.centred:
            raw -= raw.mean(-1, keepdim=True)
        signs = self._after_signs(tensor)
        return Piece(raw if signs is None else raw * signs, error)

    def query_key(self, prefix: str, about: Attention) -> dict[str, Piece]:
        """``W_Q, b_Q, W_K, b_K`` of an attention, and the gains of its norms where it has them.

        The scale of the scores is in the queries. Without rotary positions a key bias adds the
        same to every score of a query, which softmax does not see; it is left out.
        """
        (W_Q, b_Q), (W_K, b_K) = (self.reader(f"{prefix}W_{part}") for part in "QK")
        out = {"W_Q": W_Q, "W_K": W_K}
        if b_Q is not None:
            out["b_Q"] = b_Q
        if b_K is not None and (about.rotary or about.softcap or about.qk_norm):
            if about.softcap is None and not about.qk_norm:
                b_K.value[..., about.rotary :] = 0
                b_K.error[..., about.rotary :] = 0
            out["b_K"] = b_K
        if about.qk_norm:
            return self._normed(prefix, about, out)
        for name in ("W_Q", "b_Q"):
            if name in out:
                out[name] = _scaled(out[name], about.scale)
        return out

    def _normed(
        self, prefix: str, about: Attention, pieces: dict[str, Piece]
    ) -> dict[str, Piece]:
        """Queries and keys under a norm of their own: gains positive, and even between the two."""
        gains = [self._read(f"{prefix}{part}_norm.g") for part in "qk"]
        for part, gain in zip("QK", gains, strict=True):
            signs = torch.where(gain < 0, -1.0, 1.0).to(gain)
            for name in (f"W_{part}", f"b_{part}"):
                if name in pieces:
                    pieces[name] = Piece(pieces[name].value * signs, pieces[name].error)
        q, k = (g.abs() for g in gains)
        q = q * about.scale
        half = about.rotary // 2
        # Only a pair as a whole can be scaled in q against k, or it would not turn as one.
        pair = torch.arange(len(q))
        pair[half : 2 * half] = pair[:half]
        sizes = [torch.zeros_like(g).index_add_(0, pair, g.square()).sqrt()[pair] for g in (q, k)]
        even = (sizes[1] / sizes[0].clamp_min(1e-300)).sqrt()
        for name, gain in (("q_norm.g", q * even), ("k_norm.g", k / even.clamp_min(1e-300))):
            pieces[name] = Piece(gain, 2 * self._unit * gain.square())
        return pieces

    def output_bias(self, prefix: str = "") -> Piece | None:
        """The constant an attention adds to the stream, value biases included.

        In a parallel block the MLP's constant too: only their sum is ever read.
        """
        total: Tensor | None = self._maybe(f"{prefix}b_O")
        size = None if total is None else total.square().sum()
        b_V = self._value_bias(prefix)
        if b_V is not None:
            W_O = self._read(f"{prefix}W_O")
            spread = b_V.value.repeat_interleave(len(W_O) // len(b_V.value), dim=0)
            through = torch.einsum("hk,hkd->d", spread, W_O)
            moved = torch.einsum("hk,hkd->", spread.square(), W_O.square()) * 3
            total = through if total is None else total + through
            size = moved if size is None else size + moved
        if self.about.order == "parallel" and (b_B := self._maybe("b_B")) is not None:
            total = b_B if total is None else total + b_B
            size = b_B.square().sum() if size is None else size + b_B.square().sum()
        if total is None or size is None:
            return None
        return self._stream_vector(total, self._unit * size, f"{prefix}W_O")

    def mlp_bias(self) -> Piece | None:
        """The constant the MLP adds to the stream; in a parallel block the attention's has it."""
        b_B = None if self.about.order == "parallel" else self._maybe("b_B")
        if b_B is None:
            return None
        return self._stream_vector(b_B, self._unit * b_B.square().sum(), "W_B")

    def norms(self) -> dict[str, Piece]:
        """Norms that stay: all of a post-norm block, those after the sublayers of a sandwich."""
        kept = {
            "post": ("norm_1.g", "norm_1.b", "norm_2.g", "norm_2.b"),
            "sandwich": ("after_1.g", "after_2.g"),
        }.get(self.about.order, ())
        out = {}
        for name in kept:
            if (value := self._maybe(name)) is not None:
                value = value.abs() if name.startswith("after") else value
                out[name] = Piece(value, self._unit * value.square().sum())
        return out

    def bias_table(self) -> Piece | None:
        """T5's position bias ``[buckets, h]``; a constant per head is free and left out."""
        table = self._maybe("bias_table")
        if table is None:
            return None
        return Piece(table - table.mean(0), self._unit * table.square())

    def _value_bias(self, prefix: str) -> Piece | None:
        if not self.has(f"{prefix}b_V") and self._norm_before(f"{prefix}W_V")[1] is None:
            return None
        return self.reader(f"{prefix}W_V")[1]

    def _stream_vector(self, value: Tensor, error: Tensor, writer: str) -> Piece:
        if self.whole.centred:
            value = value - value.mean()
        signs = self._after_signs(writer)
        return Piece(value if signs is None else value * signs, error)

    def _after_signs(self, writer: str) -> Tensor | None:
        """The signs of the norm after a sublayer, which its writer takes over."""
        if self.about.order != "sandwich":
            return None
        gain = self._maybe("after_1.g" if writer.endswith("W_O") else "after_2.g")
        return None if gain is None else torch.where(gain < 0, -1.0, 1.0).to(gain)

    def _norm_before(self, tensor: str) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of the norm that a reader reads through; none in post-norm blocks."""
        if self.about.order == "post":
            return None, None
        if tensor in ("cross.W_K", "cross.W_V"):
            return self.whole.final_norm(self.whole.about.stacks[0].prefix)
        if tensor == "cross.W_Q":
            norm = "norm_x"
        elif tensor in ("W_A", "W_G") and self.has("norm_2.g"):
            norm = "norm_2"
        else:
            norm = "norm_1"
        return self._maybe(f"{norm}.g"), self._maybe(f"{norm}.b")

    def _read(self, tensor: str) -> Tensor:
        """A tensor of the block, the caller's own to change."""
        name = f"{self.name}.{tensor}"
        if name not in self.whole.names:
            raise SpaceError(f"'{self.whole.model.where}' holds no tensor '{name}'")
        raw = self._raw[name]
        value = raw.to(self.whole.dtype)
        return value.clone() if value is raw else value

    @cached_property
    def _raw(self) -> dict[str, Tensor]:
        """The block as the file has it: tensors that share one of the file are read once."""
        prefix = f"{self.name}."
        return self.whole.model.read([n for n in self.whole.names if n.startswith(prefix)])

    def _maybe(self, tensor: str) -> Tensor | None:
        return self._read(tensor) if self.has(tensor) else None


def _scaled(piece: Piece, scale: float) -> Piece:
    return Piece(piece.value.mul_(scale), piece.error * scale**2)
