"""Reduced form of a transformer, with the expected rounding error of each of its tensors.

It has as few symmetries as possible without choosing a basis. It is what `reduce` of the classes in
`symmetries` gives, written out a second time because errors are propagated along with the values
and because large models are read tensor by tensor:

- gains and biases of a norm go into what reads through it, `W ← diag(γ) W`, `b ← b + β W`;
- LayerNorm removes a vector's mean before anything reads it, so the all-ones direction is
  projected out of readers and writers: a pre-norm LayerNorm network is an RMS-norm network on
  D − 1 dimensions;
- a value bias goes through `W_O` into the output bias, a key bias that softmax cannot see is
  dropped, the scale of the scores goes into the queries;
- [CLS], patch bias and the mean of token types go into the positions or tokens they are added to;
- a tied output matrix is read as an untied one;
- post-norm networks keep their gains, since the residual carries them; readers still have them
  folded in, and a norm's bias goes into the next constant that is added to the stream;
- where the final stream is the output, an identity as output matrix fixes it.

The largest thing in memory is one matrix of one block. Proofs are computed in float64, scores in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.pieces import Piece, Table, folded
from transformer_nfn.checkpoints.symmetries import (
    QueryKeyGains,
    QueryKeyNormSigns,
    Site,
    added_sites,
)
from transformer_nfn.checkpoints.symmetries.query_key_norm import GAINS
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import POSITIONS, Attention, Block
from transformer_nfn.symmetry.rounding import rounding_rms

INPUTS = ("token", *POSITIONS, "type", "patch", "projection")
"""Input tables; all others are outputs."""


def reduce_pair(
    A: Model, B: Model, dtype: torch.dtype = torch.float64
) -> tuple[Reduced, Reduced]:
    """Reduced forms of two models, with the rounding error of the coarser of their dtypes.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> with open_model(write_example_checkpoint("model")) as model:
    ...     a, b = reduce_pair(model, model)
    ...     a.unit == b.unit == rounding_rms(model.dtype) ** 2
    True
    """
    coarse = max((A.dtype, B.dtype), key=rounding_rms)
    return Reduced(A, dtype, coarse), Reduced(B, dtype, coarse)


class Reduced:
    """The reduced form of an open model, block by block.

    Attributes:
        model: the open model.
        description: its description.
        dtype: of all tensors.
        centred: the mean of what blocks write is discarded by every reader.
        unit: expected square of the relative rounding error of a weight.
        least: smaller weights have the rounding error of one of this size.
        blocks: names of the blocks, ``encoder.0`` for a model with two stacks, in order.
        last_norms: name of the norm after each stack.

    Example:
        >>> from transformer_nfn.checkpoints import open_model
        >>> from transformer_nfn.testing import write_example_checkpoint
        >>> with open_model(write_example_checkpoint("model")) as model:
        ...     reduced = Reduced(model)
        ...     W_Q, b_Q = reduced.block("0").reader("W_Q")
        >>> reduced.blocks, reduced.table_names()
        (('0', '1'), ('token', 'head'))
        >>> W_Q.value.shape[:1] == W_Q.error.shape[:1]
        True
    """

    def __init__(
        self, model: Model, dtype: torch.dtype = torch.float64, stored: torch.dtype | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            model: to reduce.
            dtype: to compute in.
            stored: dtype that weights were once rounded to, if not the file's. For two models
                that are compared the coarser one: a cast may have come before a disguise.
        """
        self.model, self.description, self.dtype = model, model.description, dtype
        self.names: Mapping[str, tuple[int, ...]] = model.names
        stored = stored or model.dtype
        self.unit = max(rounding_rms(d) for d in (stored, dtype)) ** 2
        self.least = torch.finfo(stored).smallest_normal
        self.post = "post" in self.description.orders
        self.repeated = any(stack.repeats > 1 for stack in self.description.stacks)
        self.centred = self.description.hides_mean
        self.blocks = tuple(self.description.blocks)
        self.last_norms = [stack.last_norm for stack in self.description.stacks]

    def block(self, name: str) -> ReducedBlock:
        """One block by its name."""
        return ReducedBlock(self, name, self.description.blocks[name])

    @property
    def classifier(self) -> ReducedBlock | None:
        """An MLP that gives the output, as a block without its attention."""
        mlp = self.description.classifier
        if mlp is None:
            return None
        block = replace(self.description.stacks[-1].blocks[-1], mlp=mlp)
        return ReducedBlock(self, "classifier", block, centred=False)

    def read(self, name: str) -> Tensor | None:
        """A canonical tensor of the file in the working dtype; None where there is none."""
        return self.model[name].to(self.dtype) if name in self.names else None

    def final_norm(self, stack: int = -1) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of the norm after a stack (the last one by default)."""
        norm = self.description.stacks[stack].last_norm
        return self.read(f"{norm}.g"), self.read(f"{norm}.b")

    @cached_property
    def _token(self) -> Tensor:
        return self.model["token"]

    def table_names(self) -> tuple[str, ...]:
        """Matrices between a free axis and the stream: embeddings, positions, outputs."""
        inputs = [n for n in INPUTS if n in self.names]
        outputs = ["head"] if self.has_head and self.description.mlm is None else []
        extras = [n for n in self.names if n.startswith("extra.") and n.endswith(".W")]
        return (*inputs, *outputs, *(n.removesuffix(".W") for n in extras if n != "extra.mlm.W"))

    def table_rows(self, name: str) -> int:
        """The number of rows of a table, without reading it."""
        if name == "head" and "head" not in self.names:
            name = "token"
        rows, columns = self.names[f"{name}.W" if name.startswith("extra.") else name]
        return columns if name == "head" or name.startswith("extra.") else rows

    def output(self) -> Table | None:
        """The final stream as an output, where there is no output matrix."""
        if not self.description.headless:
            return None
        gain, beta = self.final_norm()
        ones = torch.eye(self.description.width, dtype=self.dtype)
        centred = self.centred and gain is not None
        return Table(
            "output", ones, dtype=self.dtype, unit=self.unit, gain=gain, beta=beta, centred=centred
        )

    @property
    def has_head(self) -> bool:
        """Whether there is an output matrix, tied or not."""
        return self.description.tied or "head" in self.names

    def table(self, name: str) -> Table:
        """A table by name: ``token``, ``position``, ``type``, ``patch``, ``head``, ``extra.…``."""
        embedded = name in INPUTS
        centred = self.description.hides_mean_of_embeddings if embedded else self.centred
        make = partial(
            Table, name, dtype=self.dtype, unit=self.unit, least=self.least, centred=centred
        )
        if name == "token":
            return make(self._token, scale=self.description.embedding_scale)
        if name in POSITIONS:
            return make(self._positions(name))
        if name in ("type", "patch", "projection"):
            return make(self.model[name])
        gain, beta = self.final_norm()
        if name == "head":
            return self._head(gain, beta, self.centred)
        bias = self.model[f"{name}.b"] if f"{name}.b" in self.names else None
        return make(self.model[f"{name}.W"].mT, bias=bias, gain=gain, beta=beta)

    def _head(self, gain: Tensor | None, beta: Tensor | None, centred: bool) -> Table:
        """The output matrix, tied or not, after a norm."""
        return Table(
            "head",
            self._token if "head" not in self.names else self.model["head"].mT,
            dtype=self.dtype,
            unit=self.unit,
            least=self.least,
            scale=self.description.head_scale,
            gain=gain,
            beta=beta,
            bias=self.model["head_bias"] if "head_bias" in self.names else None,
            centred=centred,
        )

    def _positions(self, name: str) -> Tensor:
        """Position embeddings, with what is always added to the same positions folded in."""
        table = self.model[name]
        if self.description.inputs != "patches":
            return table
        table = table.to(self.dtype).clone()
        first = [n for n in ("cls", "dist") if n in self.names]
        for row, name in enumerate(first):
            table[row] += self.model[name].to(self.dtype)
        if "patch_bias" in self.names:
            table[len(first) :] += self.model["patch_bias"].to(self.dtype)
        return table

    def vectors(self) -> dict[str, Piece]:
        """Vectors of the stream that remain: gain and bias of a norm on the embeddings (unless the
        first block has the bias folded in, post-norm), and what embedding vectors or projecting
        them adds."""
        names = ["projection_bias"]
        parts = "g" if self.post else "gb"
        names += [f"{s.prefix}embed_norm.{p}" for s in self.description.stacks for p in parts]
        names += [] if "position" in self.names else ["patch_bias", "cls"]
        out = {}
        for name in names:
            value = self.read(name)
            if value is not None:
                error = self.unit * value.square().sum()
                embedded = name in ("patch_bias", "cls", "projection_bias")
                hidden = self.description.hides_mean_of_embeddings if embedded else self.centred
                if hidden and not name.endswith(".g"):
                    value = value - value.mean()
                out[name] = Piece(value, error)
        return out

    def masked_head(self) -> tuple[Piece, Piece, Table] | None:
        """BERT's head, `norm(φ(x W + b))` read by the output matrix.

        Returns:
            W ``[D, m]``, b ``[m]``, and the output matrix as a table over the m hidden units.
        """
        if self.description.mlm is None:
            return None
        W, b = (self.read(f"extra.mlm.{part}") for part in "Wb")
        if W is None or b is None:
            raise SpaceError(f"'{self.model.where}': the masked-language head lacks W or b")
        gain, beta = self.final_norm()
        centring = self.description.norm == "layer"
        weight, bias = folded(
            W, b, gain, beta, unit=self.unit, least=self.least, centred=centring
        )
        assert bias is not None
        gain, beta = (self.read(f"extra.mlm_norm.{part}") for part in "gb")
        return weight, bias, self._head(gain, beta, centring)


class ReducedBlock:
    """One block of the reduced form, its weights in memory in the file's dtype.

    Attributes:
        network: the reduced form that it belongs to.
        name: of the block.
        description: its description.
        centred: the mean of what it writes is discarded.
    """

    def __init__(
        self, network: Reduced, name: str, description: Block, *, centred: bool | None = None
    ) -> None:
        self.network, self.name, self.description = network, name, description
        self.centred = network.centred if centred is None else centred
        self._unit = network.unit

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of the block."""
        return f"{self.name}.{tensor}" in self.network.names

    def attentions(self) -> tuple[tuple[str, Attention], ...]:
        """Attentions by the prefix of their tensors: to the block's input, and to an encoder."""
        attention = ("", self.description.attention)
        cross = self.description.cross
        return (attention,) if cross is None else (attention, ("cross.", cross))

    def reader(self, tensor: str) -> tuple[Piece, Piece | None]:
        """A matrix that reads the stream, and its bias.

        Args:
            tensor: ``W_Q``, ``W_K``, ``W_V``, ``W_A``, ``W_G``, or with ``cross.`` before it.
        """
        return self._folded(tensor, self._maybe(tensor.replace("W_", "b_")))

    def _folded(self, tensor: str, bias: Tensor | None) -> tuple[Piece, Piece | None]:
        gain, beta = self._norm_before(tensor)
        normed = gain is not None or self.description.order == "chain"
        centred = self.network.description.norm == "layer" and normed
        return folded(
            self._read(tensor), bias, gain, beta,
            unit=self._unit, least=self.network.least, centred=centred,
        )  # fmt: skip

    def router(self) -> tuple[Piece, Piece | None]:
        """What scores experts, ``[D, experts]``, and the bias that the norm leaves in it.

        Softmax sees differences of scores only: both have mean zero over the experts.
        """
        weight, bias = self._folded("router", None)

        def relative(piece: Piece) -> Piece:
            n = piece.value.shape[-1]
            value = piece.value - piece.value.mean(-1, keepdim=True)
            return Piece(value, piece.error * (1 - 2 / n) + piece.error.sum() / n**2)

        return relative(weight), None if bias is None else relative(bias)

    def writer(self, tensor: str) -> Piece:
        """A matrix that writes to the stream: ``W_O [h, d, D]``, ``W_B [f, D]``."""
        raw = self._read(tensor)
        error = self._unit * raw.square().clamp_min(self.network.least**2).sum(-1)
        if self.centred:
            raw -= raw.mean(-1, keepdim=True)
        signs = self._after_signs(tensor)
        return Piece(raw if signs is None else raw * signs, error)

    def query_key(self, prefix: str) -> dict[str, Piece]:
        """``W_Q, b_Q, W_K, b_K`` of an attention, and the gains of its norms where it has them.

        The scale of the scores is in the queries. Without rotary positions a key bias adds the
        same number to every score of a query, which softmax discards; it is left out.
        """
        attention = dict(self.attentions())[prefix]
        (W_Q, b_Q), (W_K, b_K) = (self.reader(f"{prefix}W_{part}") for part in "QK")
        out = {"W_Q": W_Q, "W_K": W_K}
        if b_Q is not None:
            out["b_Q"] = b_Q
        if b_K is not None and (attention.rotary or attention.softcap or attention.qk_norm):
            if attention.softcap is None and not attention.qk_norm:
                b_K.value[..., attention.rotary :] = 0
                b_K.error[..., attention.rotary :] = 0
            out["b_K"] = b_K
        if attention.qk_norm:
            return self._normed(prefix, attention, out)
        for name in ("W_Q", "b_Q"):
            if name in out:
                out[name] = _scaled(out[name], attention.scale)
        return out

    def _normed(
        self, prefix: str, attention: Attention, pieces: dict[str, Piece]
    ) -> dict[str, Piece]:
        """Queries and keys under a norm: gains positive, and of equal size in both."""
        weights = {name: piece.value for name, piece in pieces.items()}
        weights |= {name: self._read(f"{prefix}{name}") for name in GAINS}
        weights["q_norm.g"] *= attention.scale
        site = Site(self.network.description, {}, attention)
        weights |= QueryKeyNormSigns().reduce(site, weights)
        weights |= QueryKeyGains().reduce(site, weights)
        out = {name: Piece(weights[name], piece.error) for name, piece in pieces.items()}
        for name in GAINS:
            out[name] = Piece(weights[name], 2 * self._unit * weights[name].square())
        return out

    def output_bias(self, prefix: str) -> Piece | None:
        """Constant that an attention adds to the stream, with value biases.

        In a parallel block with the MLP's constant: only the sum is read.
        """
        carried = self._carried(f"{prefix}W_Q")
        total, size = _added(self._maybe(f"{prefix}b_O"), carried)
        b_V = self._value_bias(prefix)
        if b_V is not None:
            W_O = self._read(f"{prefix}W_O")
            share = len(W_O) // len(b_V.value)
            spread = b_V.value.repeat_interleave(share, dim=0)
            through = torch.einsum("hk,hkd->d", spread, W_O)
            # Errors of the value bias (itself a sum that may cancel), and of the output matrix.
            rows = W_O.unflatten(0, (-1, share)).sum(1).square().sum(-1)
            by_output = (spread.square() * W_O.square().sum(-1)).sum()
            moved = (b_V.error * rows).sum() / self._unit + by_output
            total = through if total is None else total + through
            size = moved if size is None else size + moved
        if self.description.order == "parallel" and (b_B := self._maybe("b_B")) is not None:
            total = b_B if total is None else total + b_B
            size = b_B.square().sum() if size is None else size + b_B.square().sum()
        if total is None or size is None:
            return None
        return self._stream_vector(total, self._unit * size, f"{prefix}W_O")

    def mlp_bias(self) -> Piece | None:
        """Constant that the MLP adds to the stream; None in a parallel block, see `output_bias`."""
        if self.description.order == "parallel":
            return None
        total, size = _added(self._maybe("b_B"), self._carried("W_A"))
        if total is None or size is None:
            return None
        return self._stream_vector(total, self._unit * size, "W_B")

    def norms(self) -> dict[str, Piece]:
        """Gains that remain: those that a residual carries, and those after sublayers.

        With the biases of norms that no later constant takes up: the first of several rounds does
        not read them, and a norm after the last block has none before it.
        """
        kept: tuple[str, ...] = ()
        if self.description.order == "post":
            kept = ("norm_1.g", "norm_x.g")
            if self.network.repeated or self._before_final_norm:
                kept += ("norm_2.g", "norm_2.b")
            elif f"{self.name}.norm_2" not in self.network.last_norms:  # folded into its readers
                kept += ("norm_2.g",)
        elif self.description.order == "sandwich":
            kept = ("after_1.g", "after_2.g")
        out = {}
        for name in kept:
            if (value := self._maybe(name)) is not None:
                value = value.abs() if name.startswith("after") else value
                error = self._unit * value.square().sum()
                if name == "norm_2.b" and self.centred and self._before_final_norm:
                    value = value - value.mean()
                out[name] = Piece(value, error)
        return out

    @property
    def _before_final_norm(self) -> bool:
        """Whether this is the last block of a stack that a norm of its own follows."""
        stack, _, i = self.name.rpartition(".")
        return any(
            s.final_norm and s.prefix.rstrip(".") == stack and int(i) == len(s.blocks) - 1
            for s in self.network.description.stacks
        )

    def bias_table(self) -> Piece | None:
        """T5's position bias ``[buckets, h]``, with zero mean of each head."""
        table = self._maybe("bias_table")
        if table is None:
            return None
        return Piece(table - table.mean(0), self._unit * table.square())

    def contact(self) -> Piece | None:
        """Weights of the attention maps in a head outside the network ``[h]`` (ESM)."""
        weights = self._maybe("contact")
        return None if weights is None else Piece(weights, self._unit * weights.square())

    def _value_bias(self, prefix: str) -> Piece | None:
        if not self.has(f"{prefix}b_V") and self._norm_before(f"{prefix}W_V")[1] is None:
            return None
        return self.reader(f"{prefix}W_V")[1]

    def _stream_vector(self, value: Tensor, error: Tensor, writer: str) -> Piece:
        if self.centred:
            value = value - value.mean()
        signs = self._after_signs(writer)
        return Piece(value if signs is None else value * signs, error)

    def _after_signs(self, writer: str) -> Tensor | None:
        """Signs of the norm after a sublayer, which are moved into its writer."""
        if self.description.order != "sandwich":
            return None
        gain = self._maybe("after_1.g" if writer.endswith("W_O") else "after_2.g")
        return None if gain is None else torch.where(gain < 0, -1.0, 1.0).to(gain)

    def _norm_before(self, tensor: str) -> tuple[Tensor | None, Tensor | None]:
        """Gain and bias of the norm that a matrix reads."""
        in_mlp = tensor.endswith(("W_A", "W_G", "router"))
        if tensor in ("cross.W_K", "cross.W_V"):
            return self.network.final_norm(0)
        if self.description.order == "post":
            if in_mlp:
                name = f"{self.name}.norm_{'x' if self.has('norm_x.g') else 1}"
            else:
                name = f"{self.name}.norm_1" if tensor == "cross.W_Q" else self._previous_norm()
            return self.network.read(f"{name}.g"), self.network.read(f"{name}.b")
        if tensor == "cross.W_Q":
            norm = "norm_x"
        elif in_mlp and self.has("norm_2.g"):
            norm = "norm_2"
        else:
            norm = "norm_1"
        return self._maybe(f"{norm}.g"), self._maybe(f"{norm}.b")

    def _previous_norm(self) -> str:
        """The norm before a post-norm block."""
        if self.network.repeated:
            return "none"
        stack, dot, i = self.name.rpartition(".")
        return f"{stack}{dot}{int(i) - 1}.norm_2" if int(i) else f"{stack}{dot}embed_norm"

    def _carried(self, reader: str) -> Tensor | None:
        """In a post-norm block, the bias of a norm, which the residual carries to the next."""
        return self._norm_before(reader)[1] if self.description.order == "post" else None

    def _read(self, tensor: str) -> Tensor:
        """A copy of a tensor of the block, in the working dtype."""
        name = f"{self.name}.{tensor}"
        if name not in self.network.names:
            raise SpaceError(f"'{self.network.model.where}' holds no tensor '{name}'")
        raw = self._raw[name]
        value = raw.to(self.network.dtype)
        return value.clone() if value is raw else value

    @cached_property
    def _raw(self) -> dict[str, Tensor]:
        """The block as the file has it, with symmetries that a user added reduced."""
        prefix = f"{self.name}."
        raw = self.network.model.read([n for n in self.network.names if n.startswith(prefix)])
        for symmetry, site in added_sites(self.network.description):
            if all(name in raw for name in site.names.values()):
                wide = {k: w.to(self.network.dtype) for k, w in site.pick(raw).items()}
                raw |= site.put(symmetry.reduce(site, wide))
        for name in (f"{prefix}W_A.A", f"{prefix}W_A.B"):
            if name in raw and bool(raw[name].any()):
                raise SpaceError(
                    f"'{self.network.model.where}': '{name}' belongs to a low-rank term, expected "
                    "a symmetry in SYMMETRIES that merges it into 'W_A'"
                )
        return raw

    def _maybe(self, tensor: str) -> Tensor | None:
        return self._read(tensor) if self.has(tensor) else None


def _added(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Sum of the tensors that are there, and of their squares."""
    present = [x for x in (a, b) if x is not None]
    if not present:
        return None, None
    return torch.stack(present).sum(0), torch.stack(present).square().sum()


def _scaled(piece: Piece, scale: float) -> Piece:
    return Piece(piece.value.mul_(scale), piece.error * scale**2)
