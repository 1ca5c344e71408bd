"""Tensors with their expected rounding errors, and norms folded into what reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A tensor of the reduced form with its expected rounding error.

    Attributes:
        value: the tensor.
        error: expected squared rounding error, summed over the stream's axis where the tensor has
            one (``W_Q [h, D, d]`` has errors ``[h, d]``), else entry by entry.
    """

    value: Tensor
    error: Tensor

    def __getitem__(self, order: Tensor) -> Piece:
        """Some heads, neurons or rows, in an order."""
        return Piece(self.value[order], self.error[order])


def filled(a: Piece | None, b: Piece | None) -> tuple[Piece, Piece] | None:
    """Two pieces of one shape, with zeros for one that is missing; None where both are."""
    present = a or b
    if present is None:
        return None
    zero = Piece(torch.zeros_like(present.value), torch.zeros_like(present.error))
    return a or zero, b or zero


@dataclass(frozen=True)
class Table:
    """A matrix ``[rows, D]`` between a free axis and the stream, read some rows at a time.

    Attributes:
        name: canonical name.
        raw: the matrix as the file has it.
        dtype: to compute in.
        unit: expected square of the relative rounding error of a weight.
        least: smaller weights have the rounding error of one of this size.
        scale: factor on the matrix.
        gain: of the norm before it. beta: its bias.
        bias: of the output matrix, ``[rows]`` in the file's dtype.
        centred: the mean over the stream is taken away.

    Example:
        >>> table = Table("token", torch.eye(3), torch.float64, unit=0.01, scale=2.0)
        >>> table.rows(0, 1).value.tolist(), table.rows(0, 1).error.tolist()
        ([[2.0, 0.0, 0.0]], [0.04])
    """

    name: str
    raw: Tensor
    dtype: torch.dtype
    unit: float
    least: float = 0.0
    scale: float = 1.0
    gain: Tensor | None = None
    beta: Tensor | None = None
    bias: Tensor | None = None
    centred: bool = False

    def __len__(self) -> int:
        return len(self.raw)

    def rows(self, start: int, stop: int) -> Piece:
        """Rows ``start`` to ``stop``."""
        raw = self.raw[start:stop]
        value = raw.to(self.dtype)
        if value is raw:
            value = value.clone()
        unit, least = self.unit, torch.tensor(self.least * self.scale, dtype=self.dtype)
        if self.scale != 1.0:
            value *= self.scale
        if self.gain is not None:
            value *= self.gain
            unit, least = 2 * unit, least * self.gain.abs()
        error = unit * torch.maximum(value.abs(), least).square().sum(-1)
        if self.centred:
            value -= value.mean(-1, keepdim=True)
        return Piece(value, error)

    def biases(self, start: int, stop: int) -> Piece | None:
        """Biases of rows, with the bias of the norm folded in."""
        if self.bias is None and self.beta is None:
            return None
        raw = self.raw[start:stop]
        value = torch.zeros(len(raw), dtype=self.dtype)
        error = torch.zeros_like(value)
        if self.beta is not None:
            read = raw.to(self.dtype) * self.scale
            value, error = read @ self.beta, 2 * self.unit * (read.square() @ self.beta.square())
        if self.bias is not None:
            bias = self.bias[start:stop].to(self.dtype)
            value, error = value + bias, error + self.unit * bias.square()
        return Piece(value, error)


def folded(
    W: Tensor,
    b: Tensor | None,
    gain: Tensor | None,
    beta: Tensor | None,
    *,
    unit: float,
    least: float,
    centred: bool,
) -> tuple[Piece, Piece | None]:
    """Fold a norm into a matrix that reads it, and into the bias of that matrix.

    Args:
        W: ``[..., D, n]``, changed in place.
        b: ``[..., n]``.
        gain: of the norm, None where there is none.
        beta: its bias.
        unit: expected square of the relative rounding error of a weight.
        least: smaller weights have the rounding error of one of this size.
        centred: the norm takes the mean away (LayerNorm).
    """
    bias, bias_error = b, None
    if b is not None:
        bias_error = unit * b.square().clamp_min(least**2)
    squares = W.square().clamp_min(least**2)
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
    if centred:
        W -= W.mean(-2, keepdim=True)
    weight = Piece(W, error)
    if bias is None or bias_error is None:
        return weight, None
    return weight, Piece(bias, bias_error)
