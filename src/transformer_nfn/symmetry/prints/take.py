"""How is the fingerprint of a checkpoint taken? Block by block, one in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.symmetry.prints.blocks import (
    NUMBERS,
    PARTS,
    SIZES,
    block_numbers,
    block_sizes,
)
from transformer_nfn.symmetry.prints.frame import draw_frame
from transformer_nfn.symmetry.prints.stored import EMBEDDING, STEPS, Print
from transformer_nfn.symmetry.reduced import Reduced

if TYPE_CHECKING:
    from transformer_nfn.architectures.families import Model


def take_print(model: Model, progress: Callable[[str], None] | None = None) -> Print:
    """The fingerprint of an open checkpoint.

    No symmetry of its family changes it (beyond rounding), and a small change of the weights is a
    small change of it.

    Args:
        model: from `transformer_nfn.architectures.families.open_model`.
        progress: called with the name of each block that is done.
    """
    reduced = Reduced(model, torch.float32)
    if not reduced.blocks:
        raise SpaceError(f"'{model.where}' has no blocks to take a fingerprint of")
    frame = draw_frame(reduced)
    sketch = torch.zeros(STEPS, len(PARTS), NUMBERS, dtype=torch.float64)
    sizes = torch.zeros(STEPS, len(PARTS), SIZES, dtype=torch.float64)
    for i, name in enumerate(reduced.blocks):
        block = reduced.block(name)
        shares = _shares(i, len(reduced.blocks)).reshape(-1, 1, 1)
        sketch += shares * _unit(block_numbers(block, frame.vectors))
        sizes += shares * block_sizes(block)
        if progress is not None:
            progress(name)
    return Print(
        model.about.family,
        model.about.width,
        len(reduced.blocks),
        sum(math.prod(shape) for shape in model.names.values()),
        frame.made_of,
        frame.rows,
        (_unit(sketch) * NUMBERS**0.5).to(torch.float16).numpy(),
        (_unit(frame.embedding.reshape(-1, EMBEDDING).sum(0)) * EMBEDDING**0.5)
        .to(torch.float16)
        .numpy(),
        sizes.float().numpy(),
    )


def _shares(block: int, depth: int) -> Tensor:
    """How much of each step of depth is this block, ``[STEPS]``; over all blocks, one."""
    edges = torch.arange(STEPS + 1, dtype=torch.float64) * depth / STEPS
    return (edges[1:].clamp(block, block + 1) - edges[:-1].clamp(block, block + 1)) * STEPS / depth


def _unit(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min(1e-300)
