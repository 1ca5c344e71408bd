"""What may be moved across a norm? Gains and biases into its readers, and what centring discards.

A *reading* is a norm with the matrices that read it. Before a sublayer (pre-norm) nothing else
reads it; after one (post-norm) the residual does too, and the next bias takes that part back.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_nfn.functional.description import Block

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Reading:
    """A norm and what reads it.

    Attributes:
        norm: its name, ``norm_1``.
        readers: matrices that read it, ``W_Q``.
        residual: the bias that is added to the norm's own output where a residual carries that
            on (post-norm); None where nothing but the readers sees it.
    """

    norm: str
    readers: tuple[str, ...]
    residual: str | None = None

    def present(self, weights: Container[str]) -> Iterator[str]:
        """The readers that there are."""
        return (name for name in self.readers if name in weights)

    def biased(self, weights: Container[str]) -> bool:
        """Whether every reader (and the residual) has a bias."""
        others = () if self.residual is None else (self.residual,)
        biases = (*(bias_of(name) for name in self.present(weights)), *others)
        return f"{self.norm}.b" in weights and all(name in weights for name in biases)


def readings(block: Block, weights: Container[str]) -> tuple[Reading, ...]:
    """The norms of a block that something in it reads.

    In a post-norm block ``norm_0`` is the norm before it: the embedding's, or the previous
    block's second one.
    """
    first, second = ("W_Q", "W_K", "W_V"), ("W_A", "W_G")
    if block.order == "post":
        return (Reading("norm_0", first, "b_O"), Reading("norm_1", second, "b_B"))
    if block.order == "parallel" and "norm_2.g" not in weights:
        return (Reading("norm_1", first + second),)
    both = (Reading("norm_1", first), Reading("norm_2", second))
    return both if block.cross is None else (*both, Reading("norm_x", ("cross.W_Q",)))


def bias_of(reader: str) -> str:
    """The bias that belongs to a matrix: ``b_Q`` of ``W_Q``, ``head_bias`` of ``head``."""
    if reader == "head":
        return "head_bias"
    start, _, last = reader.rpartition("W")
    return f"{start}b{last}"


def _column(x: Tensor, matrix: Tensor) -> Tensor:
    """A vector along the stream, lined up with a reader ``[…, D, n]``."""
    return x.to(matrix).unsqueeze(-1)


def replace_gain(weights: Mapping[str, Tensor], reading: Reading, gain: Tensor) -> Weights:
    """The norm gets another gain ``[D]``, without zeros; its readers make up for it.

    A bias of the norm is scaled along, which a gain that was zero does not allow; then it has to
    be moved first (`absorb_bias`).
    """
    old = weights[f"{reading.norm}.g"]
    gain = gain.to(old)
    ratio = torch.where(old == gain, 1.0, old / gain)  # a zero that stays is left alone
    out = {name: weights[name] * _column(ratio, weights[name]) for name in reading.present(weights)}
    out[f"{reading.norm}.g"] = gain.clone()
    bias = weights.get(f"{reading.norm}.b")
    if bias is not None:
        out[f"{reading.norm}.b"] = torch.where(bias == 0, bias, bias / ratio)
    return out


def shift_bias(weights: Mapping[str, Tensor], reading: Reading, shift: Tensor) -> Weights:
    """``β + shift``, taken back in the biases of the readers and of the residual."""
    name = f"{reading.norm}.b"
    shift = shift.to(weights[name])
    out = {name: weights[name] + shift}
    for reader in reading.present(weights):
        out[bias_of(reader)] = weights[bias_of(reader)] - shift @ weights[reader]
    if reading.residual is not None:
        out[reading.residual] = weights[reading.residual] - shift
    return out


def absorb_bias(weights: Mapping[str, Tensor], reading: Reading) -> Weights:
    """β moved into the biases of the readers altogether."""
    return shift_bias(weights, reading, -weights[f"{reading.norm}.b"])


def shift_readers(
    weights: Mapping[str, Tensor], reading: Reading, shifts: Mapping[str, Tensor]
) -> Weights:
    """``W + γ⁻¹ vᵀ``: LayerNorm's output over γ sums to Σ β/γ, which the bias takes back.

    Args:
        weights: of the block.
        reading: of a LayerNorm with nonzero gains.
        shifts: ``v`` by reader, shaped as its bias; readers without one stay.
    """
    gain, bias = weights[f"{reading.norm}.g"], weights.get(f"{reading.norm}.b")
    out = {}
    for reader, shift in shifts.items():
        W = weights[reader]
        shift = shift.to(W)
        out[reader] = W + _column(1 / gain, W) * shift.unsqueeze(-2)
        if bias is not None:
            name = bias_of(reader)
            out[name] = weights[name] - (bias / gain).sum() * shift
    return out


def shift_writers(weights: Mapping[str, Tensor], shifts: Mapping[str, Tensor]) -> Weights:
    """``W + u 1ᵀ``: every LayerNorm takes the mean of what was written away again.

    Args:
        weights: of the block, or embeddings.
        shifts: ``u`` by writer, shaped as the writer without its last axis.
    """
    return {name: weights[name] + u.to(weights[name]).unsqueeze(-1) for name, u in shifts.items()}


def sign_against_gain(weights: Mapping[str, Tensor], norm: str, signs: Tensor) -> Weights:
    """The gain of a norm after a sublayer times ``signs [D]``, and what writes into it too."""
    writers = ("W_O", "b_O") if norm == "after_1" else ("W_B", "b_B")
    return {
        name: weights[name] * signs.to(weights[name])
        for name in (*writers, f"{norm}.g")
        if name in weights
    }


def move_between_branches(weights: Mapping[str, Tensor], constant: Tensor) -> Weights:
    """Parallel residual: a constant ``[D]`` from the MLP's output bias to attention's."""
    constant = constant.to(weights["b_O"])
    return {"b_O": weights["b_O"] + constant, "b_B": weights["b_B"] - constant}
