"""Reduced form of a transformer: everything that its norms allow is folded away.

The reduced form has as few symmetries as can be had without choosing a basis:

- gains and biases of a norm go into what reads through it, `W ← diag(γ) W`, `b ← b + β W`;
- LayerNorm removes a vector's mean before anything reads it, so the all-ones direction is
  projected out of readers and writers: a pre-norm LayerNorm network is an RMS-norm network on
  D − 1 dimensions;
- a value bias goes through `W_O` into the output bias, a key bias that softmax cannot see is
  dropped, the scale of the scores goes into the queries;
- [CLS], patch bias and the mean of token types go into the positions or tokens they are added to;
- a tied output matrix is read as an untied one, the tie stays a fact of the description;
- post-norm networks keep their gains, since the residual carries them; readers still have them
  folded in, and a norm's bias goes into the next constant that is added to the stream;
- where the final stream is the output, an output matrix of ones says that nothing may move it.

Everything is read tensor by tensor and never multiplied out: the largest thing in memory is one
matrix of one block. Each piece knows how much the rounding of the file is expected to have moved
it. Proofs are computed in float64, scores in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.symmetries.registry import added_sites
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import Attention, Block

ROUNDING_RMS = 0.2
"""Root mean square of a rounding error relative to the weight, in units of a dtype's epsilon: it
is uniform within half a spacing, 1/√12 = 0.29 of one, and a weight is 1 to 2 times what its
spacing belongs to."""
STEPS = 1024.0
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
        error = summed_squares(value, -1, unit)
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


def summed_squares(x: Tensor, dim: int, unit: float) -> Tensor:
    """``unit · Σ x²`` over an axis."""
    return x.square().sum(dim) * unit


def folded(
    W: Tensor,
    b: Tensor | None,
    gain: Tensor | None,
    beta: Tensor | None,
    *,
    unit: float,
    centred: bool,
) -> tuple[Piece, Piece | None]:
    """A reader and its bias with the norm before it folded in.

    Args:
        W: ``[..., D, n]``, changed in place.
        b: ``[..., n]``.
        gain: of the norm, None where there is none.
        beta: its bias.
        unit: expected square of the relative rounding error of a weight.
        centred: the norm takes the mean away (LayerNorm).
    """
    bias, bias_error = b, None
    if b is not None:
        bias_error = unit * b.square()
    squares = W.square()
    if beta is not None:
        through = torch.einsum("d,...dk->...k", beta, W)
        moved = 2 * unit * torch.einsum("d,...dk->...k", beta.square(), squares)
        bias = through if bias is None else bias + through
        bias_error = moved if bias_error is None else bias_error + moved
    if gain is None:
        error = unit * squares.sum(-2)
    else:
        W *= gain.unsqueeze(-1)
        error = 2 * unit * torch.einsum("d,...dk->...k", gain.square(), squares)
    if centred and gain is not None:
        W -= W.mean(-2, keepdim=True)
    weight = Piece(W, error)
    if bias is None or bias_error is None:
        return weight, None
    return weight, Piece(bias, bias_error)


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
        own = self._maybe(tensor.replace("W_", "b_"))
        gain, beta = self._norm_before(tensor)
        centred = self.whole.about.norm == "layer"
        return folded(self._read(tensor), own, gain, beta, unit=self._unit, centred=centred)

    def writer(self, tensor: str) -> Piece:
        """A matrix that writes to the stream: ``W_O [h, d, D]``, ``W_B [f, D]``."""
        raw = self._read(tensor)
        error = summed_squares(raw, -1, self._unit)
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

    def _normed(self, prefix: str, about: Attention, pieces: dict[str, Piece]) -> dict[str, Piece]:
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
        carried = None if prefix else self._carried("W_Q")
        total, size = _added(self._maybe(f"{prefix}b_O"), carried)
        b_V = self._value_bias(prefix)
        if b_V is not None:
            W_O = self._read(f"{prefix}W_O")
            share = len(W_O) // len(b_V.value)
            spread = b_V.value.repeat_interleave(share, dim=0)
            through = torch.einsum("hk,hkd->d", spread, W_O)
            # Error of the value bias (itself a sum that may cancel), and of what it goes through.
            rows = W_O.unflatten(0, (-1, share)).sum(1).square().sum(-1)
            own = (spread.square() * W_O.square().sum(-1)).sum()
            moved = (b_V.error * rows).sum() / self._unit + own
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
        if self.about.order == "parallel":
            return None
        total, size = _added(self._maybe("b_B"), self._carried("W_A"))
        if total is None or size is None:
            return None
        return self._stream_vector(total, self._unit * size, "W_B")

    def norms(self) -> dict[str, Piece]:
        """Gains that stay: all that a residual carries, and those after sublayers of a sandwich."""
        kept: tuple[str, ...] = ()
        if self.about.order == "post":
            last = self.name == self.whole.blocks[-1]  # its readers have that one folded in
            kept = ("norm_1.g",) if last else ("norm_1.g", "norm_2.g")
        elif self.about.order == "sandwich":
            kept = ("after_1.g", "after_2.g")
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
        """Gain and bias of the norm that a reader reads through."""
        if self.about.order == "post":
            name = f"{self.name}.norm_1" if tensor in ("W_A", "W_G") else self._previous_norm()
            return self.whole.read(f"{name}.g"), self.whole.read(f"{name}.b")
        if tensor in ("cross.W_K", "cross.W_V"):
            return self.whole.final_norm(self.whole.about.stacks[0].prefix)
        if tensor == "cross.W_Q":
            norm = "norm_x"
        elif tensor in ("W_A", "W_G") and self.has("norm_2.g"):
            norm = "norm_2"
        else:
            norm = "norm_1"
        return self._maybe(f"{norm}.g"), self._maybe(f"{norm}.b")

    def _previous_norm(self) -> str:
        """The norm that ends what stands before a post-norm block."""
        at = self.whole.blocks.index(self.name)
        return "embed_norm" if at == 0 else f"{self.whole.blocks[at - 1]}.norm_2"

    def _carried(self, reader: str) -> Tensor | None:
        """In a post-norm block, the bias of a norm that the residual carries to the next one."""
        return self._norm_before(reader)[1] if self.about.order == "post" else None

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
        """The block as the file has it, with symmetries that a user added reduced."""
        prefix = f"{self.name}."
        raw = self.whole.model.read([n for n in self.whole.names if n.startswith(prefix)])
        for symmetry, site in added_sites(self.whole.about):
            if all(name in raw for name in site.names.values()):
                wide = {k: w.to(self.whole.dtype) for k, w in site.pick(raw).items()}
                raw |= site.put(symmetry.reduce(site, wide))
        for name in (f"{prefix}W_A.A", f"{prefix}W_A.B"):
            if name in raw and bool(raw[name].any()):
                raise SpaceError(
                    f"'{self.whole.model.where}': '{name}' belongs to a low-rank term, expected a "
                    "symmetry in SYMMETRIES that merges it into 'W_A'"
                )
        return raw

    def _maybe(self, tensor: str) -> Tensor | None:
        return self._read(tensor) if self.has(tensor) else None


def _added(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The sum of what is there, and of its squares."""
    present = [x for x in (a, b) if x is not None]
    if not present:
        return None, None
    return torch.stack(present).sum(0), torch.stack(present).square().sum()


def _scaled(piece: Piece, scale: float) -> Piece:
    return Piece(piece.value.mul_(scale), piece.error * scale**2)
