"""Which numbers of a block can no symmetry change? Answers to the frame, and sizes of its parts.

With z and y two vectors of the frame, the numbers are sums over all heads and neurons, so that
their order is no matter, of what no change of basis inside a head touches:

- QK: `q(z)·k(y)` without biases, under rotary positions at several distances;
- VO: `z V O y`;
- MLP: `MLP(z)·y`, activation included.

Sizes are those of the products `W_Q W_Kᵀ` and `W_V W_O`, from the Gram matrices of their factors,
and of neurons: what one reads with times what it writes with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.architectures.families.description import Attention
from transformer_nfn.functional.sublayers import activation
from transformer_nfn.symmetry.likeness.probes import OFFSETS, turned
from transformer_nfn.symmetry.reduced import Piece, ReducedBlock

PARTS = ("QK", "VO", "MLP")
NUMBERS = 64
"""Numbers of each part."""
SIZES = 4
"""Numbers about the sizes of each part."""
QUANTILES = (0.05, 0.35, 0.65, 0.95)
QUIET = 0.1
"""Heads quieter than this share of the loudest are not brought up to the others."""
DEAD = 1e-6
"""Sizes below this share of the largest count as this."""


def block_numbers(block: ReducedBlock, frame: Tensor) -> Tensor:
    """``[PARTS, NUMBERS]`` of one block."""
    partner = frame.roll(len(frame) // 2, 0)
    QK, VO = frame.new_zeros(len(frame)), frame.new_zeros(len(frame))
    for prefix, about in block.attentions():
        QK += _query_key(block, prefix, about, frame, partner)
        VO += _value_output(block, prefix, about, frame, partner)
    MLP = (_mlp(block, frame) * partner).sum(-1)
    both = torch.stack([QK, VO, MLP]).double()
    return both.reshape(len(PARTS), -1, NUMBERS).sum(1)


def _query_key(
    block: ReducedBlock, prefix: str, about: Attention, frame: Tensor, partner: Tensor
) -> Tensor:
    """``Σ_h q(z)·k(y)`` for each z and its partner y."""
    pieces = block.query_key(prefix, about)
    q, k = (
        _read(vectors, pieces[f"W_{part}"].value)
        for part, vectors in (("Q", frame), ("K", partner))
    )
    if about.qk_norm:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt() * pieces[f"{p}_norm.g"].value
            for p, x in (("q", q), ("k", k))
        )
    k = k.repeat_interleave(about.heads // about.groups, dim=0)
    offsets = OFFSETS if about.rotary else OFFSETS[:1]
    out = torch.zeros(len(frame), dtype=torch.float64)
    for i, offset in enumerate(offsets):
        at = slice(i, None, len(offsets))
        values = (turned(q[:, at], about, offset) * k[:, at]).sum(-1)
        out[at] = _evenly(values)
    return out.to(frame)


def _value_output(
    block: ReducedBlock, prefix: str, about: Attention, frame: Tensor, partner: Tensor
) -> Tensor:
    v = _read(frame, block.reader(f"{prefix}W_V")[0].value)
    v = v.repeat_interleave(about.heads // about.groups, dim=0)
    o = _read(partner, block.writer(f"{prefix}W_O").value.mT)
    return _evenly((v * o).sum(-1)).to(frame)


def _read(vectors: Tensor, W: Tensor) -> Tensor:
    """``[n, D]`` read by every head, ``[h, D, d] → [h, n, d]``, in one product."""
    flat = vectors @ W.movedim(0, 1).flatten(1)
    return flat.reshape(len(vectors), len(W), -1).movedim(1, 0)


def _evenly(values: Tensor) -> Tensor:
    """Sum over heads, ``[h, n] → [n]``, none of them much louder than the others."""
    size: Tensor = torch.linalg.vector_norm(values.double(), dim=1, keepdim=True)
    return (values / (size + QUIET * size.max()).clamp_min(1e-300)).sum(0)


def _mlp(block: ReducedBlock, frame: Tensor) -> Tensor:
    """What the MLP writes when it reads the frame, ``[n, D]``, without its constant."""
    about = block.about.mlp
    W, b = block.reader("W_G" if about.gated else "W_A")
    hidden = frame @ W.value
    hidden = activation(about.activation)(hidden if b is None else hidden + b.value)
    if about.gated:
        W, b = block.reader("W_A")
        hidden *= frame @ W.value if b is None else frame @ W.value + b.value
    return hidden @ block.writer("W_B").value


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
