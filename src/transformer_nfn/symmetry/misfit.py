"""How far each tensor is from where a group element takes it, against what rounding explains."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.spaces import Element, Weights
from transformer_nfn.symmetry.enlarged import EnlargedElement
from transformer_nfn.symmetry.sources import HALF, rounding_unit

ROOT_MEAN_SQUARE = 0.4
"""Of a rounding error, in units of the largest one."""
WHOLE, ENTRY = 2.0, 10.0
"""Expected errors that a tensor may be away in the mean square, and one entry of it."""
ARITHMETIC = 1024.0
"""Largest errors that a tensor may be away in single and double precision."""


def misfits(
    element: Element | EnlargedElement,
    moved: Weights,
    u: Weights,
    v: Weights,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> dict[str, float]:
    """How far each tensor of ``moved`` is from ``v``, in allowed errors; up to 1 is no difference.

    In half precision every weight was rounded once, and how far it may be away is known entry by
    entry: its own rounding error, and that of the first network as the element moves it. In single
    and double precision arithmetic adds to that, so the condition of the element is allowed for.

    Args:
        element: that should take ``u`` to ``v``.
        moved: ``element.act(u)``.
        u: one network, ``[*axes]`` in float64.
        v: the other.
        dtypes: in which each of them was stored.
    """
    unit, half = max(map(rounding_unit, dtypes)), any(dtype in HALF for dtype in dtypes)
    if half and isinstance(element, Element) and not element.space.shifts:
        variances = _moved_variances(element, u, dtypes[0])
        return {
            name: _excess(moved[name] - w, variances[name] + _variance(w, dtypes[1]))
            for name, w in v.items()
        }
    if half:
        allowed = 5 * ROOT_MEAN_SQUARE * unit
    else:
        paper = element.paper if isinstance(element, EnlargedElement) else element
        allowed = min(ARITHMETIC * unit * paper.inflation(), 0.5)
    return {name: relative_error(moved[name], w) / allowed for name, w in v.items()}


def relative_error(x: Tensor, y: Tensor) -> float:
    """``‖x − y‖`` over the larger norm; 0 where both are zero."""
    size = max(float(x.norm()), float(y.norm()))
    return float((x - y).norm()) / size if size > 0 else 0.0


def _variance(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Expected squares of the rounding errors, entry by entry."""
    smallest = torch.finfo(dtype).smallest_normal
    return (ROOT_MEAN_SQUARE * rounding_unit(dtype) * w.abs().clamp_min(smallest)).square()


def _moved_variances(element: Element, u: Weights, dtype: torch.dtype) -> Weights:
    """Expected squares of the errors that the rounding of ``u`` makes after the element."""
    squares = Element(
        element.space,
        element.perms,
        {axis: G.square() for axis, G in element.linears.items()},
        {axis: G.square() for axis, G in element.inverses.items()},
    )
    return squares.act({name: _variance(w, dtype) for name, w in u.items()})


def _excess(away: Tensor, variance: Tensor) -> float:
    """Of the tensor as a whole, of each of its slices, and of each entry: the worst."""
    squares = away.square()
    if not float(squares.sum()) > 0:
        return 0.0
    mean = variance.mean()
    worst = [float(squares.mean() / mean) / WHOLE**2]
    worst.append(float((squares / (variance + 0.1 * mean)).max()) / ENTRY**2)
    for dim in range(away.ndim):
        others = [d for d in range(away.ndim) if d != dim]
        if others:
            entries = away.numel() // away.shape[dim]
            ratio = squares.mean(others) / (variance.mean(others) + 0.01 * mean)
            # Few numbers scatter more around their mean.
            worst.append(float(ratio.max()) / (WHOLE * (1 + 4 / entries**0.5)) ** 2)
    return float(max(worst) ** 0.5)
