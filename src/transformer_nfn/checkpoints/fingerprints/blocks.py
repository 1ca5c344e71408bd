"""Invariant numbers of one block, scale included: its products, constants, and part sizes.

With z and y two vectors of the frame, the numbers are sums over all heads and neurons (their order
does not matter) of what no change of basis inside a head can change:

- QK: `q(z)·k(y)` without biases, under rotary positions at several distances;
- VO: `z V O y`;
- MLP: `MLP(z)·y`, activation included.

Biases, the gains that stay in a residual, and T5's table of position biases have rows of their own
(`CONSTANTS`): they are small beside the matrices, and a change of one must not drown in them.

Sizes are norms of the products `W_Q W_Kᵀ` and `W_V W_O`, from the Gram matrices of their factors,
and of neurons: what one reads with times what it writes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.checkpoints.fingerprints.frame import Frame, signs
from transformer_nfn.checkpoints.fingerprints.rows import Row, added, products
from transformer_nfn.checkpoints.reduced import Piece, ReducedBlock
from transformer_nfn.checkpoints.sketches import OFFSETS, turned
from transformer_nfn.functional.description import Attention
from transformer_nfn.functional.transformer import activation

PARTS = ("QK", "VO", "MLP")
NUMBERS = 64
"""Numbers of each part."""
CONSTANTS = ("QK biases", "attention bias", "MLP input bias", "MLP bias", "norm gains")
FEW = 8
"""Numbers of each constant."""
SIZES = 4
"""Numbers about the sizes of each part."""
QUANTILES = (0.05, 0.35, 0.65, 0.95)
QUIET = 0.1
"""Heads quieter than this share of the loudest are not brought up to the others."""
DEAD = 1e-6
"""Sizes below this share of the largest count as this."""


@dataclass(frozen=True)
class BlockRows:
    """Rows of one block: ``parts`` as in `PARTS`, ``constants`` as in `CONSTANTS`."""

    parts: tuple[Row, ...]
    constants: tuple[Row, ...]


@dataclass(frozen=True)
class _Heads:
    """What the heads of one attention make of the frame.

    Attributes:
        values: ``[h, n]`` one number for each head and vector.
        errors: expected squares of their errors.
    """

    values: Tensor
    errors: Tensor

    def evened(self) -> Row:
        """Sum over heads, none of them much louder than the others; the scale stays."""
        size: Tensor = torch.linalg.vector_norm(self.values.double(), dim=1, keepdim=True)
        weight = size.square().mean().sqrt() / (size + QUIET * size.max()).clamp_min(1e-300)
        error = (weight.square() * self.errors).sum()
        return Row((weight * self.values).sum(0), float(error))


def block_rows(block: ReducedBlock, frame: Frame) -> BlockRows:
    """The numbers of one block."""
    z = frame.vectors
    y = z.roll(len(z) // 2, 0)
    QK, VO, biases, written = [], [], [], []
    for prefix, about in block.attentions():
        scores, constant = _query_key(block, prefix, about, z, y)
        QK.append(scores.evened())
        biases.append(constant)
        table = None if prefix else block.bias_table()
        if table is not None:
            biases.append(_position_bias(scores, table))
        VO.append(_value_output(block, prefix, about, z, y).evened())
        bias = block.output_bias(prefix)
        if bias is not None:
            written.append(_vector(bias, z if not prefix else y))
    MLP, read = _mlp(block, z, y)
    bias = block.mlp_bias()
    constants = (
        added(biases, len(z)),
        added(written, len(z)),
        read,
        Row.zeros(len(z)) if bias is None else _vector(bias, z),
        added(_gains(block.norms(), z), len(z)),
    )
    parts = (added(QK, len(z)), added(VO, len(z)), MLP)
    return BlockRows(
        tuple(row.moved(2 * frame.error).folded(NUMBERS) for row in parts),
        tuple(row.moved(2 * frame.error).folded(FEW) for row in constants),
    )


def _query_key(
    block: ReducedBlock, prefix: str, about: Attention, z: Tensor, y: Tensor
) -> tuple[_Heads, Row]:
    """``q(z)·k(y)`` of every head without biases, and what biases add, summed over heads."""
    pieces = block.query_key(prefix, about)
    share = about.heads // about.groups
    q, k = _read(z, pieces["W_Q"].value), _read(y, pieces["W_K"].value)
    q_error, k_error = (pieces[f"W_{p}"].error.unsqueeze(-2) for p in "QK")  # [h, 1, d]
    zero = torch.zeros_like(q_error), torch.zeros_like(k_error)
    (b_Q, b_Q_error), (b_K, b_K_error) = (
        (pieces[name].value.unsqueeze(-2), pieces[name].error.unsqueeze(-2))
        if (name := f"b_{p}") in pieces
        else (none, none)
        for p, none in zip("QK", zero, strict=True)
    )
    if about.qk_norm:  # which biases pass through as well
        q, q_error = _normed(q + b_Q, q_error + b_Q_error, pieces["q_norm.g"])
        k, k_error = _normed(k + b_K, k_error + b_K_error, pieces["k_norm.g"])
        b_Q, b_Q_error, b_K, b_K_error = (torch.zeros_like(x[:, :1]) for x in (q, q, k, k))
    k, k_error, b_K, b_K_error = (
        x.repeat_interleave(share, dim=0) for x in (k, k_error, b_K, b_K_error)
    )
    offsets = OFFSETS if about.rotary else OFFSETS[:1]
    values = torch.empty(q.shape[:2], dtype=torch.float64)
    constants, error = torch.empty(len(z), dtype=torch.float64), 0.0
    for i, offset in enumerate(offsets):
        at = slice(i, None, len(offsets))
        q_at, k_at, b_at = turned(q[:, at], about, offset), k[:, at], turned(b_Q, about, offset)
        values[:, at] = (q_at * k_at).sum(-1).double()
        constants[at] = (b_at * (k_at + b_K) + q_at * b_K).sum((0, -1)).double()
        error += float(
            ((k_at + b_K).square() * b_Q_error).sum()
            + (q_at.square() * b_K_error).sum()
            + (b_at.square() * k_error + b_K.square() * q_error).sum() * k_at.shape[1]
        )
    errors = (k.square() * q_error).sum(-1) + (q.square() * k_error).sum(-1)
    return _Heads(values, errors.double()), Row(constants, error)


def _normed(x: Tensor, error: Tensor, gain: Piece) -> tuple[Tensor, Tensor]:
    """Queries or keys under their norm, and the expected squares of their errors."""
    size = (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return x / size * gain.value, error / size.square() * gain.value.square() + gain.error


def _position_bias(scores: _Heads, table: Piece) -> Row:
    """T5's table ``[buckets, h]``, each column with the scores of its head."""
    n = scores.values.shape[1]
    rows = signs("bias_table", 0, len(table.value), n).to(table.value)
    columns = (rows @ table.value).mT.double()  # [h, n]
    size = scores.values.square().mean().sqrt().clamp_min(1e-300)
    values = scores.values / size
    error = values.square() * table.error.sum(0).unsqueeze(-1)
    error = error + columns.square() * scores.errors / size.square()
    return Row((columns * values).sum(0), float(error.sum()))


def _value_output(
    block: ReducedBlock, prefix: str, about: Attention, z: Tensor, y: Tensor
) -> _Heads:
    V, O = block.reader(f"{prefix}W_V")[0], block.writer(f"{prefix}W_O")  # noqa: E741
    share = about.heads // about.groups
    v = _read(z, V.value).repeat_interleave(share, dim=0)
    v_error = V.error.unsqueeze(-2).repeat_interleave(share, dim=0)
    o = _read(y, O.value.mT)
    errors = (o.square() * v_error).sum(-1) + (v.square() * O.error.unsqueeze(-2)).sum(-1)
    return _Heads((v * o).sum(-1).double(), errors.double())


def _read(vectors: Tensor, W: Tensor) -> Tensor:
    """``[n, D]`` read by every head, ``[h, D, d] → [h, n, d]``, in one product."""
    flat = vectors @ W.movedim(0, 1).flatten(1)
    return flat.reshape(len(vectors), len(W), -1).movedim(1, 0)


def _mlp(block: ReducedBlock, z: Tensor, y: Tensor) -> tuple[Row, Row]:
    """``MLP(z)·y`` without the constant it writes, and the bias of what neurons read."""
    about = block.about.mlp
    W, b = block.reader("W_A")
    hidden = z @ W.value
    error = W.error
    if b is not None:
        hidden, error = hidden + b.value, error + b.error
    if about.gated:
        gate, c = block.reader("W_G")
        before = z @ gate.value if c is None else z @ gate.value + c.value
        gate_error = gate.error if c is None else gate.error + c.error
        opened = activation(about.activation)(before)
        error = opened.square() * error + hidden.square() * gate_error
        hidden = hidden * opened
    else:
        hidden = activation(about.activation)(hidden)
    writer = block.writer("W_B")
    write = y @ writer.value.mT  # [n, f]
    read = Row.zeros(len(z))
    if b is not None:
        read = products(b.value.expand_as(write), write, b.error, writer.error)
    return products(hidden, write, error, writer.error), read


def _vector(piece: Piece, vectors: Tensor) -> Row:
    """A vector of the stream, read by the frame."""
    return Row((vectors @ piece.value).double(), float(piece.error) * len(vectors))


def _gains(gains: Mapping[str, Piece], z: Tensor) -> Iterator[Row]:
    """Gains of the stream, ``Σ_d z_d g_d y_d``: a sign of the stream changes z and y alike."""
    for i, gain in enumerate(gains.values(), start=1):
        values = ((z * z.roll(len(z) // 2 + i, 0)) @ gain.value).double()
        yield Row(values, float(gain.error) * len(z))


def block_sizes(block: ReducedBlock) -> Tensor:
    """``[PARTS, SIZES]`` of one block: quantiles over its heads and neurons, as logarithms."""
    QK, VO = [], []
    for prefix, about in block.attentions():
        share = about.heads // about.groups
        pieces = block.query_key(prefix, about)
        W_Q, W_K = (
            _gained(pieces[f"W_{p}"].value, pieces.get(f"{p.lower()}_norm.g")) for p in "QK"
        )
        W_V = block.reader(f"{prefix}W_V")[0].value
        W_O = block.writer(f"{prefix}W_O").value
        QK.append(_product_sizes(W_Q.mT, W_K.mT, share))
        VO.append(_product_sizes(W_O, W_V.mT, share))
    reads = block.reader("W_A")[0].value.norm(dim=0)
    if block.about.mlp.gated:
        reads = reads * block.reader("W_G")[0].value.norm(dim=0)
    neurons = reads * block.writer("W_B").value.norm(dim=1)
    return torch.stack([_quantiles(x.double()) for x in (torch.cat(QK), torch.cat(VO), neurons)])


def _gained(W: Tensor, gain: Piece | None) -> Tensor:
    return W if gain is None else W * gain.value


def _product_sizes(left: Tensor, right: Tensor, share: int) -> Tensor:
    """Norms of ``leftᵀ right`` by head, from ``[h, d, D]`` and ``[g, d, D]``: √tr(LLᵀ RRᵀ)."""
    grams = [(x @ x.mT).double() for x in (left, right)]
    return (grams[0] * grams[1].repeat_interleave(share, 0)).sum((-1, -2)).clamp_min(0).sqrt()


def _quantiles(sizes: Tensor) -> Tensor:
    top = sizes.max().clamp_min(1e-300)
    at = torch.tensor(QUANTILES, dtype=torch.float64)
    return torch.quantile(sizes.clamp_min(DEAD * top).log(), at)
