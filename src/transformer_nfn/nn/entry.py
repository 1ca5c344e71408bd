"""What does a layer check and do before it reads weights?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

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
    space: WeightSpace, weights: Mapping[str, Tensor], in_channels: int
) -> Mapping[str, Tensor]:
    """The weights, once it is clear that they lie in the space; shifts folded away."""
    space.check(weights, finite=False)
    found = next(iter(weights.values())).shape[1]
    if found != in_channels:
        raise SpaceError(f"the layer reads {in_channels} channels, the weights have {found}")
    return fold(space, weights) if space.shifts else weights
