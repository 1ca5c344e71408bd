"""One network in one safetensors file, with the space it lies in written beside the tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer_nfn.errors import SpaceError, TransformerNFNError
from transformer_nfn.files.whole import whole_file
from transformer_nfn.spaces import Weights, WeightSpace

SPACE_KEY = "transformer_nfn.space"


def save_network(
    path: str | os.PathLike[str], space: WeightSpace, weights: Mapping[str, Tensor]
) -> None:
    """Writes one network; the file appears whole or not at all.

    Args:
        path: where to.
        space: the space of the weights.
        weights: ``[1, 1, *axes]`` or ``[*axes]``.
    """
    space.check(weights, lead=None)
    target = Path(path)
    tensors = {}
    for name, shape in space.shapes.items():
        if weights[name].numel() != weights[name].new_empty(shape).numel():
            raise SpaceError(
                f"a file holds one network; '{name}' has shape {list(weights[name].shape)}"
            )
        tensors[name] = weights[name].detach().reshape(shape).cpu().contiguous()
    with whole_file(target) as beside:
        save_file(tensors, beside, metadata={SPACE_KEY: space.to_json()})


def load_network(
    path: str | os.PathLike[str], space: WeightSpace | None = None
) -> tuple[WeightSpace, Weights]:
    """Reads one network and checks it.

    Args:
        path: a safetensors file.
        space: the space it must lie in; read from the file if not given.

    Returns:
        The space, and the weights as ``[1, 1, *axes]``.
    """
    source = Path(path)
    if not source.is_file():
        raise TransformerNFNError(f"there is no file '{source}'")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name)[None, None] for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise TransformerNFNError(
            f"'{source}' is not a readable safetensors file: {error}"
        ) from error
    if space is None:
        if SPACE_KEY not in metadata:
            raise TransformerNFNError(
                f"'{source}' does not say which weight space it lies in; name one with --space"
            )
        space = WeightSpace.from_json(metadata[SPACE_KEY])
    try:
        space.check(weights)
    except SpaceError as error:
        raise SpaceError(f"'{source}': {error}") from error
    return space, weights
