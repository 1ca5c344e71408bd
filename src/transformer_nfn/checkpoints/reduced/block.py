"""What is left of one block once its norms are folded into what reads and writes?"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.checkpoints.reduced.pieces import Piece, folded, summed_squares
from transformer_nfn.errors import SpaceError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.reduced.whole import Reduced
    from transformer_nfn.functional.description import Attention, Block


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
        """The block as the file has it: tensors that share one of the file are read once."""
        prefix = f"{self.name}."
        return self.whole.model.read([n for n in self.whole.names if n.startswith(prefix)])

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
