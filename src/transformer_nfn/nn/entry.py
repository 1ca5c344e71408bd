"""What does a layer check and do before it reads weights?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import WeightSpace, fold


def check_channels(**channels: int) -> None:
    """Raises `SpaceError` unless every number of channels is a positive integer."""
    for name, number in channels.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise SpaceError(f"{name} must be a positive integer, found {number!r}")


def check_groups(groups: int, rank: int | None, **channels: int) -> None:
    """Raises `SpaceError` unless the channels fall into that many groups."""
    check_channels(groups=groups)
    for name, number in channels.items():
        if number % groups:
            raise SpaceError(f"{name} must be a multiple of groups, found {number} and {groups}")
    if groups > 1 and rank is not None:
        raise SpaceError("a layer of low rank has one group; use one layer for each group")


def check_options(**options: tuple[str, Sequence[str]]) -> None:
    """Raises `SpaceError` unless every option is one of its choices."""
    for name, (found, choices) in options.items():
        if found not in choices:
            words = ", ".join(repr(c) for c in choices)
            raise SpaceError(f"{name} must be one of {words}, found {found!r}")


def enter(
    space: WeightSpace, weights: Mapping[str, Tensor], in_channels: int, layer: nn.Module
) -> Mapping[str, Tensor]:
    """The weights, once it is clear that they lie in the space; shifts folded away.

    Weights of fewer digits than the layer's parameters, such as those of a zoo in half precision,
    are cast to them; of more digits than that none are dropped unasked.
    """
    space.check(weights, finite=False)
    first = next(iter(weights.values()))
    if first.shape[1] != in_channels:
        raise SpaceError(
            f"the layer reads {in_channels} channels, the weights have {first.shape[1]}"
        )
    dtype = next(layer.parameters()).dtype
    if first.dtype != dtype:
        if torch.promote_types(first.dtype, dtype) != dtype:
            raise SpaceError(
                f"the layer is in {_word(dtype)} and the weights are in {_word(first.dtype)}: "
                "cast either of them"
            )
        weights = {name: w.to(dtype) for name, w in weights.items()}
    return fold(space, weights) if space.shifts else weights


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
