"""Rounding errors of stored weights, and differences counted in them."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
"""Dtypes in which storing a weight is the only error that counts."""
ROUNDING_RMS = 0.2
"""Root mean square of a rounding error relative to the weight, in units of a dtype's epsilon: it
is uniform within half a spacing, 1/√12 = 0.29 of one, and a weight is 1 to 2 times what its
spacing belongs to."""
EVERY_ENTRY = 1 / 8
"""Share of the entries that rounding changes, at least, where it goes another way."""
STEPS = 1024.0
"""Weights stored in float64 were computed in float64, with an error at each step."""


def rounding_unit(dtype: torch.dtype) -> float:
    """The largest expected relative error of one weight.

    Weights stored in float64 are usually the result of a few steps of float64 arithmetic, each
    with an error; narrower ones were rounded once, at the end.
    """
    return torch.finfo(dtype).eps / 2 * (16 if dtype == torch.float64 else 1)


def rounding_rms(dtype: torch.dtype) -> float:
    """Expected relative rounding error, in the mean square, of a weight stored in a dtype.

    >>> rounding_rms(torch.bfloat16) / torch.finfo(torch.bfloat16).eps
    0.2
    """
    error = ROUNDING_RMS * torch.finfo(dtype).eps
    return error * STEPS if dtype == torch.float64 else error


def allowed_error(dtype: torch.dtype) -> float:
    """The tolerated relative error of one weight.

    In half precision the only error is that of storing a weight, and many errors add up in the mean
    square: a larger tolerance would hide a change of 1 %. In single and double precision the
    tolerance covers arithmetic as well.
    """
    return (1.25 if dtype in HALF else 16.0) * rounding_unit(dtype)


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Mask of the entries that are not one number, each rounded to the dtype of its tensor.

    >>> a = torch.tensor([1.0, 1.001, 1.01])
    >>> differing(a, a.bfloat16()).tolist(), differing(a, torch.ones(3)).tolist()
    ([False, False, False], [False, True, True])
    """
    if a.dtype.itemsize == b.dtype.itemsize and a.dtype != b.dtype:  # neither holds the other
        return (a.double() - b.double()).abs() > _half_step(a) + _half_step(b)
    return a.to(b.dtype) != b if b.dtype.itemsize < a.dtype.itemsize else b.to(a.dtype) != a


def is_rounding(mask: Tensor) -> bool:
    """Whether so many entries differ that numbers may have been rounded another way: by a change of
    basis and back, or a cast that truncates. An edit of every entry may look like that, too."""
    return int(mask.sum()) >= EVERY_ENTRY * mask.numel()


def _half_step(w: Tensor) -> Tensor:
    """Half the distance to the next larger number of the dtype, in float64."""
    info, exponent = torch.finfo(w.dtype), torch.frexp(w.double()).exponent
    return (info.eps / 4 * torch.exp2(exponent.double())).clamp_min(info.tiny * info.eps / 2)


def tensor_excess(residual: Tensor, error: Tensor) -> float:
    """Difference of two tensors, in expected rounding errors.

    Args:
        residual: squares of the difference. error: their expected values.

    >>> tensor_excess(torch.tensor([4.0, 0.0]), torch.tensor([0.5, 0.5]))
    2.0
    """
    total = float(residual.sum())
    return (total / max(float(error.sum()), 1e-300)) ** 0.5 if total else 0.0


def scatter(numbers: Tensor) -> Tensor:
    """How far the root mean square of so many errors may lie above the expected one.

    >>> scatter(torch.tensor([16.0, 1600.0]))
    tensor([2.0000, 1.1000])
    """
    return 1 + 4 / numbers.sqrt()


def site_excess(residual: Tensor, error: Tensor, entries: int, floor: float = 1e-4) -> float:
    """The largest difference at one site (head, neuron, row, entry), in expected rounding errors.

    It is divided by the scatter that sums of few numbers have.

    Args:
        residual: squares of the difference, ``[sites]``. error: their expected values.
        entries: numbers that one site sums over.
        floor: least error of a site, in units of the mean: exact zeros on both sides have no
            rounding error.

    >>> site_excess(torch.tensor([4.0, 0.0]), torch.tensor([1.0, 1.0]), 16, floor=0.0)
    1.0
    """
    if not bool(residual.any()):
        return 0.0
    allowed = (error + floor * error.mean()).clamp_min(1e-300)
    worst: float = (residual / allowed).max().sqrt().item()
    return worst / scatter(torch.tensor(entries)).item()
