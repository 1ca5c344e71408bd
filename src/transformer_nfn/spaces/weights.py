"""Weights of a space: validation, folded biases, and invariant products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.axis import Shift, Weights
from transformer_nfn.spaces.layout import Joined, Layout, Product


def fold(space: Layout, weights: Mapping[str, Tensor]) -> Weights:
    """Weights of the same function with every shifted bias folded away and set to zero.

    ``b_K → 0`` and ``b_V → 0`` with ``b_O → b_O + Σ b_V W_O``: afterwards no shift is left, so
    ``fold(gU) == g.linear_part() fold(U)``. Weights of a space without shifts are returned
    unchanged.

    >>> from transformer_nfn import spaces
    >>> space = spaces.biased_block(4, 2, 2, 2, 3)
    >>> folded = fold(space, space.randn(batch=1))
    >>> float(folded["b_K"].norm()), float(folded["b_V"].norm())
    (0.0, 0.0)
    """
    out = dict(weights)
    for shift in space.shifts:
        if shift.into is not None and shift.through is not None:
            moved = contract(space, shift, weights[shift.tensor], weights[shift.through])
            out[shift.into] = out[shift.into] + moved
        out[shift.tensor] = torch.zeros_like(out[shift.tensor])
    return out


def contract(space: Layout, shift: Shift, constant: Tensor, through: Tensor) -> Tensor:
    """``Σ c W`` over every axis that the compensating bias lacks: what that bias must lose."""
    if shift.through is None or shift.into is None:
        raise ValueError(f"nothing takes up the shift of '{shift.tensor}'")
    bias, via, into = (space.tensors[t].axes for t in (shift.tensor, shift.through, shift.into))
    letters = {a: chr(ord("a") + i) for i, a in enumerate(dict.fromkeys((*bias, *via)))}
    left, right, rest = ("".join(letters[a] for a in axes) for axes in (bias, via, into))
    wide = torch.promote_types(constant.dtype, through.dtype)
    return torch.einsum(f"...{left},...{right}->...{rest}", constant.to(wide), through.to(wide))


def products(space: Layout, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every invariant product of the (folded) weights, by name.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(8, 2, 3, 4)
    >>> {name: list(x.shape) for name, x in products(space, space.randn(batch=1)).items()}
    {'W_Q·W_K': [1, 1, 2, 8, 8], 'W_V·W_O': [1, 1, 2, 8, 8]}
    """
    folded = fold(space, weights)
    return {p.name: product(space, folded, p) for p in space.products}


def product(space: Layout, weights: Mapping[str, Tensor], which: Product) -> Tensor:
    """One invariant product (eq. 17), e.g. ``[WW]^(QK,s) = W_Q,s W_K,sᵀ``.

    Returns:
        ``[*lead, *which.axes]``; where the contracted axis splits into pieces (frequencies,
        scales) each stays separate, ``[*lead, *which.axes, pieces]``, and complex products have
        real and imaginary part last, ``[*lead, *which.axes, n/2, 2]``.

    >>> from transformer_nfn import spaces
    >>> space = spaces.multi_head(8, 2, 3, 4)
    >>> weights = space.randn(batch=1)
    >>> QK = product(space, weights, space.products[0])
    >>> torch.allclose(QK, weights["W_Q"] @ weights["W_K"].mT, atol=1e-5)
    True
    """
    left, right = factors(space, weights, which)
    value = _multiply(left, right, leading_axes(space, weights) + len(space.ancestors(which.over)))
    if value.is_complex():
        return torch.view_as_real(value)
    return value.squeeze(-1) if space.axes[which.over].pieces.single else value


def factors(
    space: Layout, weights: Mapping[str, Tensor], which: Product | Joined
) -> tuple[Tensor, Tensor]:
    """The two factors of a product, each ``[*lead, *ancestors, *rest, pieces, k]``.

    Contracted along ``k`` they give the product; complex for complex scales.
    """
    lead, owners = leading_axes(space, weights), space.ancestors(which.over)
    out = []
    for name, dual in ((which.plain, False), (which.dual, True)):
        axes = space.spec(name).axes
        rest = [d for d, a in enumerate(axes) if a not in (*owners, which.over)]
        order = [*(axes.index(a) for a in owners), *rest, axes.index(which.over)]
        value = tensor_value(space, weights, name)
        x = value.permute(*range(lead), *(lead + d for d in order))
        out.append(space.axes[which.over].action.vectors(x, dual=dual))
    return out[0], out[1]


def tensor_value(space: Layout, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of the space, or an intermediate one of the derivation of its products."""
    if name in space.tensors:
        return weights[name]
    join = space.derivation.joined[name]
    sites = leading_axes(space, weights) + len(space.ancestors(join.over))
    return _multiply(*factors(space, weights, join), sites).squeeze(-1)


def _multiply(left: Tensor, right: Tensor, sites: int) -> Tensor:
    """``[*sites, *x, pieces, k], [*sites, *y, pieces, k] → [*sites, *x, *y, pieces]``."""
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW")
    first = "".join(next(letters) for _ in range(sites))
    x, y = ("".join(next(letters) for _ in range(f.ndim - sites - 2)) for f in (left, right))
    return torch.einsum(f"{first}{x}YZ,{first}{y}YZ->{first}{x}{y}Y", left, right)


def leading_axes(space: Layout, weights: Mapping[str, Tensor]) -> int:
    """Number of axes before those of the space: 2 for batch and channels, or 0."""
    name, spec = next(iter(space.tensors.items()))
    return weights[name].ndim - len(spec.axes)


def check_weights(
    space: Layout, weights: Mapping[str, Tensor], *, finite: bool, lead: int | None
) -> None:
    """Raise `SpaceError` at the first mismatch; see `WeightSpace.check`."""
    _check_names(space, weights)
    first = next(iter(space.tensors))
    lead = leading_axes(space, weights) if lead is None else lead
    for name in space.tensors:
        _check_shape(space, name, weights[name], lead)
    for name in space.tensors:
        _check_consistent(name, weights[name], first, weights[first], lead)
    if finite:
        for name in space.tensors:
            _check_finite(space, name, weights[name], lead)


def _check_names(space: Layout, weights: Mapping[str, Tensor]) -> None:
    if not isinstance(weights, Mapping):
        raise SpaceError(
            f"weights must be a dict of tensors by name, found {type(weights).__name__}"
        )
    missing = [name for name in space.tensors if name not in weights]
    if missing:
        raise SpaceError(
            f"weights lack {_quoted(missing)} of space '{space.name}' (found {_quoted(weights)})"
        )
    extra = [name for name in weights if name not in space.tensors]
    if extra:
        raise SpaceError(f"weights hold {_quoted(extra)}, unknown to space '{space.name}'")
    for name in space.tensors:
        if not isinstance(weights[name], Tensor):
            raise SpaceError(
                f"'{name}' must be a torch.Tensor, found {type(weights[name]).__name__}"
            )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{n}'" for n in names) or "nothing"


def _check_shape(space: Layout, name: str, tensor: Tensor, lead: int) -> None:
    expected = space.shape(name)
    if tensor.shape[lead:] == expected and tensor.is_floating_point():
        return
    spec = space.tensors[name]
    if tensor.ndim != lead + len(expected):
        front = {0: "", 1: "batch, ", 2: "batch, channels, "}.get(lead, f"{lead} leading, ")
        wanted = ", ".join(f"{a}={n}" for a, n in zip(spec.axes, expected, strict=True))
        raise SpaceError(f"'{name}' must have shape [{front}{wanted}], found {list(tensor.shape)}")
    for axis, want, size in zip(spec.axes, expected, tensor.shape[lead:], strict=True):
        if want != size:
            raise SpaceError(
                f"'{name}' axis '{axis}': expected {want}, found {size} "
                f"(shape {list(tensor.shape)}, space '{space.name}')"
            )
    raise SpaceError(f"'{name}' must hold floating point numbers, found {tensor.dtype}")


def _check_consistent(name: str, tensor: Tensor, first: str, reference: Tensor, lead: int) -> None:
    """One dtype, one device, one batch and number of channels for all tensors."""
    for what in ("dtype", "device"):
        here, there = getattr(tensor, what), getattr(reference, what)
        if here != there:
            raise SpaceError(f"mixed {what}s: '{name}' is {here}, '{first}' is {there}")
    if tensor.shape[:lead] == reference.shape[:lead]:
        return
    for axis, size, expected in zip(
        ("batch", "channels"), tensor.shape[:lead], reference.shape[:lead], strict=False
    ):
        if size != expected:
            raise SpaceError(
                f"'{name}' axis '{axis}': expected {expected} as in '{first}', found {size}"
            )


def _check_finite(space: Layout, name: str, tensor: Tensor, lead: int) -> None:
    bad = ~torch.isfinite(tensor.detach())
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        value = tensor.detach()[tuple(index)].item()
        axes = ["batch", "channel"][:lead] if lead <= 2 else [f"lead {i}" for i in range(lead)]
        at = ", ".join(
            f"{axis} {i}" for axis, i in zip([*axes, *space.tensors[name].axes], index, strict=True)
        )
        raise SpaceError(
            f"'{name}' holds {int(bad.sum())} values that are not finite, the first {value} at {at}"
        )
