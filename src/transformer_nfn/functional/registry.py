"""Registry of architectures by the name that a weight space carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import blocks, zoo_network
from transformer_nfn.functional.architecture import (
    Architecture,
    Forward,
    Inputs,
    Rescaling,
    Stage,
    Vectors,
)
from transformer_nfn.spaces import Shift, WeightSpace
from transformer_nfn.spaces.axis import under_prefix

Build = Callable[[WeightSpace], Architecture]

BLOCKS: Mapping[str, Callable[..., Tensor]] = {
    "multi_head": blocks.multi_head,
    "attention_block": blocks.block,
    "biased_block": blocks.block,
    "grouped_query_block": blocks.block,
    "rope_block": blocks.block,
    "swiglu_block": blocks.block,
}
"""Forwards of input and weights that read the axis ``input``."""


def _block(space: WeightSpace) -> Architecture:
    assert space.architecture is not None
    forward = _bound(BLOCKS[space.architecture], space.options)
    inputs = Vectors(width=space.axes["input"].size)
    return Architecture(space, forward, inputs, stages=(Stage(space.architecture),))


def _stack(space: WeightSpace) -> Architecture:
    block, depth = space.options["block"], space.options["depth"]
    if block not in BLOCKS:
        raise SpaceError(f"space '{space.name}' is a stack of {block!r}, which has no forward")
    forward = _bound(BLOCKS[block], space.options["block_options"])
    stages = tuple(Stage(block, f"{i}.") for i in range(depth))

    whole = partial(_chain, forward=forward, stages=stages)
    return Architecture(space, whole, Vectors(width=space.axes["stream0"].size), stages=stages)


def _chain(
    weights: Mapping[str, Tensor], X: Tensor, *, forward: Forward, stages: tuple[Stage, ...]
) -> Tensor:
    for stage in stages:
        X = forward(under_prefix(weights, stage.prefix), X)
    return X


def _residual_stack(space: WeightSpace) -> Architecture:
    freedoms: list[Rescaling | Shift] = [
        Rescaling("gain", "stream", ("g", "b"), ("W_C",)),
        Shift("b", "W_C", "b_C"),
    ]
    for i in range(space.options["blocks"]):
        freedoms += _gains(i, ("g_1", "b_1"), ("g_2", "b_2"), ("W_A",))
        freedoms.append(Shift(f"{i}.b_2", f"{i}.W_A", f"{i}.b_A"))
    return _with_stream(space, freedoms)


def _decoder_stack(space: WeightSpace) -> Architecture:
    freedoms = [Rescaling("gain", "stream", ("g",), ("W_C",))]
    for i in range(space.options["blocks"]):
        freedoms += _gains(i, ("g_1",), ("g_2",), ("W_G", "W_U"))
    return _with_stream(space, freedoms)


def _with_stream(space: WeightSpace, freedoms: Sequence[Rescaling | Shift]) -> Architecture:
    forward = _bound(blocks.residual_stack, space.options)
    inputs = Vectors(width=space.axes["token"].size)
    return Architecture(space, forward, inputs, freedoms=tuple(freedoms))


def _gains(
    i: int, first: tuple[str, ...], second: tuple[str, ...], readers: tuple[str, ...]
) -> list[Rescaling]:
    """The gains of a block's two norms, against attention and against the MLP."""
    attention = ("W_Q", "W_K", "W_V")
    return [
        Rescaling(
            f"{i}.gain_{k}",
            "stream",
            tuple(f"{i}.{name}" for name in plain),
            tuple(f"{i}.{name}" for name in dual),
        )
        for k, plain, dual in ((1, first, attention), (2, second, readers))
    ]


ARCHITECTURES: dict[str, Build] = {
    **{name: _block for name in BLOCKS},
    "stack": _stack,
    "residual_stack": _residual_stack,
    "decoder_stack": _decoder_stack,
    zoo_network.NAME: zoo_network.network_architecture,
}
"""Builders by the name in `WeightSpace.architecture` and in its JSON. Add your own, so that
networks read from files find their forward."""


def find_architecture(space: WeightSpace) -> Architecture | None:
    """The architecture that a space names; None if it is not registered.

    >>> from transformer_nfn.spaces import attention_block
    >>> find_architecture(attention_block(6, 2, 3, 3, 8))
    Architecture('attention_block', 254 weights)
    """
    if space.architecture is None or space.architecture not in ARCHITECTURES:
        return None
    return _built(space, ARCHITECTURES[space.architecture])


def architecture_of(space: WeightSpace) -> Architecture:
    """The architecture that a space names; raises `SpaceError` if it is not registered.

    >>> from transformer_nfn.spaces import multi_head
    >>> architecture_of(multi_head(6, 2, 3, 3)).inputs.width
    6
    """
    architecture = find_architecture(space)
    if architecture is None:
        raise SpaceError(
            f"space '{space.name}' has no reference forward "
            f"(architecture {space.architecture!r}; known: {', '.join(ARCHITECTURES)})"
        )
    return architecture


def runnable(
    target: Architecture | WeightSpace,
    forward: Forward | None = None,
    inputs: Inputs | None = None,
) -> Architecture | None:
    """An architecture with a forward: the target, the one its space names, or a given forward.

    Args:
        forward: replaces the reference and its freedoms.
        inputs: replace those of the architecture.

    Returns:
        None without a forward.

    >>> from transformer_nfn.spaces import multi_head
    >>> runnable(multi_head(6, 2, 3, 3), inputs=Vectors(width=6, lengths=(4,))).inputs.lengths
    (4,)
    """
    if forward is not None and inputs is not None:
        return Architecture(_space(target), forward, inputs)
    architecture = target if isinstance(target, Architecture) else find_architecture(target)
    if forward is None and inputs is None:
        return architecture
    if architecture is None:
        raise SpaceError(
            f"space '{_space(target).name}' names no architecture, so a forward and its inputs "
            "must be given together: forward=…, inputs=Vectors(width=…) or Ids(vocabulary=…)"
        )
    if forward is not None:
        return Architecture(architecture.space, forward, architecture.inputs)
    return replace(architecture, inputs=inputs or architecture.inputs)


def _space(target: Architecture | WeightSpace) -> WeightSpace:
    return target.space if isinstance(target, Architecture) else target


@lru_cache(maxsize=64)
def _built(space: WeightSpace, build: Build) -> Architecture:
    try:
        return build(space)
    except KeyError as error:
        raise SpaceError(
            f"space '{space.name}' names the architecture '{space.architecture}', which needs an "
            f"axis or option {error} that it does not have"
        ) from error


def _bound(function: Callable[..., Tensor], options: Mapping[str, object]) -> Forward:
    # No closure, so that architectures can be pickled.
    return partial(_call, function=function, options=dict(options))


def _call(
    weights: Mapping[str, Tensor],
    X: Tensor,
    *,
    function: Callable[..., Tensor],
    options: Mapping[str, object],
) -> Tensor:
    return function(X, weights, **options)
