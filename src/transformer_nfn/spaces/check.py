"""Why some weights do not lie in a space: one sentence naming tensor, axis, expected, found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


def check_weights(
    space: WeightSpace, weights: Mapping[str, Tensor], *, finite: bool, lead: int | None
) -> None:
    """Raises `SpaceError` at the first misfit; see `WeightSpace.check`."""
    _check_names(space, weights)
    first = next(iter(space.tensors))
    if lead is None:
        lead = weights[first].ndim - len(space.tensors[first].axes)
    for name in space.tensors:
        _check_shape(space, name, weights[name], lead)
    reference = weights[first]
    for name in space.tensors:
        _check_kinship(name, weights[name], first, reference, lead)
    if finite:
        for name in space.tensors:
            _check_finite(space, name, weights[name], lead)


def _check_names(space: WeightSpace, weights: Mapping[str, Tensor]) -> None:
    if not isinstance(weights, Mapping):
        raise SpaceError(
            f"weights must be a dict of tensors by name, found {type(weights).__name__}"
        )
    missing = [name for name in space.tensors if name not in weights]
    if missing:
        raise SpaceError(
            f"weights lack {_names(missing)} of space '{space.name}' (found {_names(weights)})"
        )
    extra = [name for name in weights if name not in space.tensors]
    if extra:
        raise SpaceError(f"weights hold {_names(extra)}, unknown to space '{space.name}'")
    for name in space.tensors:
        if not isinstance(weights[name], Tensor):
            raise SpaceError(
                f"'{name}' must be a torch.Tensor, found {type(weights[name]).__name__}"
            )


def _names(names: object) -> str:
    words = [f"'{n}'" for n in names]  # type: ignore[attr-defined]
    return ", ".join(words) if words else "nothing"


def _check_shape(space: WeightSpace, name: str, tensor: Tensor, lead: int) -> None:
    expected = space.shape(name)
    if tensor.shape[lead:] == expected and tensor.is_floating_point():
        return
    spec = space.tensors[name]
    if tensor.ndim != lead + len(expected):
        front = {0: "", 1: "batch, ", 2: "batch, channels, "}.get(lead, f"{lead} leading, ")
        wanted = ", ".join(f"{a}={n}" for a, n in zip(spec.axes, expected, strict=True))
        raise SpaceError(f"'{name}' must have shape [{front}{wanted}], found {list(tensor.shape)}")
    for axis, want, found in zip(spec.axes, expected, tensor.shape[lead:], strict=True):
        if want != found:
            raise SpaceError(
                f"'{name}' axis '{axis}': expected {want}, found {found} "
                f"(shape {list(tensor.shape)}, space '{space.name}')"
            )
    if not tensor.dtype.is_floating_point:
        raise SpaceError(f"'{name}' must hold floating point numbers, found {tensor.dtype}")


def _check_kinship(name: str, tensor: Tensor, first: str, reference: Tensor, lead: int) -> None:
    if (
        tensor.dtype == reference.dtype
        and tensor.device == reference.device
        and tensor.shape[:lead] == reference.shape[:lead]
    ):
        return
    for what, mine, theirs in (
        ("dtype", tensor.dtype, reference.dtype),
        ("device", tensor.device, reference.device),
    ):
        if mine != theirs:
            raise SpaceError(f"mixed {what}s: '{name}' is {mine}, '{first}' is {theirs}")
    for axis, mine_n, theirs_n in zip(
        ("batch", "channels"), tensor.shape[:lead], reference.shape[:lead], strict=False
    ):
        if mine_n != theirs_n:
            raise SpaceError(
                f"'{name}' axis '{axis}': expected {theirs_n} as in '{first}', found {mine_n}"
            )


def _check_finite(space: WeightSpace, name: str, tensor: Tensor, lead: int) -> None:
    bad = ~torch.isfinite(tensor.detach())
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        value = tensor.detach()[tuple(where)].item()
        axes = ["batch", "channel"][:lead] if lead <= 2 else [f"lead {i}" for i in range(lead)]
        at = ", ".join(
            f"{axis} {i}" for axis, i in zip([*axes, *space.tensors[name].axes], where, strict=True)
        )
        raise SpaceError(
            f"'{name}' holds {int(bad.sum())} values that are not finite, the first {value} at {at}"
        )
