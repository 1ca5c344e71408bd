"""One network in a file: its tensors, and its weight space as metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError, TransformerNFNError
from transformer_nfn.io.checkpoint import STATE_DICTS, Checkpoint
from transformer_nfn.io.files import atomic_file
from transformer_nfn.io.tensor_files import write_state_dict, write_tensors
from transformer_nfn.spaces import Weights, WeightSpace

SPACE_KEY = "transformer_nfn.space"


def save_network(
    path: str | os.PathLike[str], space: WeightSpace, weights: Mapping[str, Tensor]
) -> None:
    """Writes one network to a file that appears whole or not at all.

    Args:
        path: where to; ``.pt``, ``.pth`` and ``.bin`` become a state dict of ``torch.save``, which
            does not say its space, anything else safetensors, which does.
        space: the space of the weights.
        weights: ``[1, 1, *axes]`` or ``[*axes]``.
    """
    space.check(weights, lead=None)
    tensors = {}
    for name, shape in space.shapes.items():
        if weights[name].numel() != torch.Size(shape).numel():
            raise SpaceError(
                f"a file holds one network; '{name}' has shape {list(weights[name].shape)}"
            )
        tensors[name] = weights[name].reshape(shape)
    path = Path(path)
    if path.suffix in STATE_DICTS:
        with atomic_file(path) as beside:
            write_state_dict(beside, {name: w.detach().clone() for name, w in tensors.items()})
        return
    write_tensors(path, tensors, {SPACE_KEY: space.to_json()})


def read_network(
    source: str | os.PathLike[str] | Checkpoint, space: WeightSpace | None = None
) -> tuple[WeightSpace, Weights]:
    """Reads one network and checks it; what does not fit is told before any weight is read.

    Args:
        source: an open checkpoint, or what `Checkpoint.open` takes.
        space: the space it must lie in; read from the file if not given.

    Returns:
        The space, and the weights as ``[1, 1, *axes]``.
    """
    if not isinstance(source, Checkpoint):
        with Checkpoint.open(Path(source)) as opened:
            return read_network(opened, space)
    if space is None:
        if SPACE_KEY not in source.metadata:
            raise TransformerNFNError(
                f"'{source.where}' does not say which weight space it lies in; name one with "
                "--space"
            )
        space = WeightSpace.from_json(source.metadata[SPACE_KEY])
    try:
        space.check(_outlines(source), finite=False)
        weights = {name: source[name][None, None] for name in space.tensors}
        space.check(weights)
    except SpaceError as error:
        raise SpaceError(f"'{source.where}': {error}") from error
    return space, weights


def _outlines(source: Checkpoint) -> Weights:
    """Tensors of the right shape and dtype without numbers; bytes for what torch has not."""
    outlines = {}
    for name in source:
        info = source.info(name)
        dtype = getattr(torch, info.dtype, None)
        kind = dtype if isinstance(dtype, torch.dtype) else torch.uint8
        outlines[name] = torch.empty((1, 1, *info.shape), dtype=kind, device="meta")
    return outlines
