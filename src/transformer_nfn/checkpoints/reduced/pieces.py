"""Tensors of the reduced form, each with the rounding error to expect in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
