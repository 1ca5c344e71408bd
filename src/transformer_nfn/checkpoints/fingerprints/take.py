"""Taking the fingerprint of a checkpoint, block by block, one in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.checkpoints.fingerprints.blocks import (
    CONSTANTS,
    FEW,
    NUMBERS,
    PARTS,
    SIZES,
    block_rows,
    block_sizes,
)
from transformer_nfn.checkpoints.fingerprints.ends import end_rows
from transformer_nfn.checkpoints.fingerprints.frame import draw_frame
from transformer_nfn.checkpoints.fingerprints.rows import Row, added
from transformer_nfn.checkpoints.fingerprints.stored import STEPS, Print, stored_rows
from transformer_nfn.checkpoints.reduced import Reduced
from transformer_nfn.errors import SpaceError

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model


def take_print(model: Model, progress: Callable[[str], None] | None = None) -> Print:
    """The fingerprint of an open checkpoint.

    No symmetry of its family changes it (beyond rounding), and a small change of the weights is a
    small change of it.

    Args:
        model: from `transformer_nfn.checkpoints.families.open_model`.
        progress: called with the name of each block that is done.
    """
    # In a precision beyond that of the file, so that rounding is what storing it did.
    half = model.dtype in (torch.float16, torch.bfloat16)
    reduced = Reduced(model, torch.float32 if half else torch.float64)
    if not reduced.blocks:
        raise SpaceError(f"'{model.where}' has no blocks to take a fingerprint of")
    frame = draw_frame(reduced)
    depth = len(reduced.blocks)
    parts: list[list[list[Row]]] = [[[] for _ in PARTS] for _ in range(STEPS)]
    scales = torch.zeros(STEPS, len(PARTS), dtype=torch.float64)
    constants: list[list[list[Row]]] = [[[] for _ in CONSTANTS] for _ in range(STEPS)]
    sizes = torch.zeros(STEPS, len(PARTS), SIZES, dtype=torch.float64)
    for i, name in enumerate(reduced.blocks):
        block = reduced.block(name)
        rows = block_rows(block, frame)
        shares = _shares(i, depth)
        for step, share in enumerate(shares.tolist()):
            if share == 0:
                continue
            for j, row in enumerate(rows.parts):  # each block counts alike, however loud
                parts[step][j].append(row.times(share / max(row.length, 1e-100)))
                scales[step, j] += share * row.length
            for j, row in enumerate(rows.constants):
                constants[step][j].append(row.times(share))
        sizes += shares.reshape(-1, 1, 1) * block_sizes(block)
        if progress is not None:
            progress(name)
    sketch = [
        [added(rows, NUMBERS).times(float(scales[step, j])) for j, rows in enumerate(by_part)]
        for step, by_part in enumerate(parts)
    ]
    few = [[added(rows, FEW) for rows in by_name] for by_name in constants]
    ends = [end_rows(reduced, frame)]
    arrays = [_arrays(rows) for rows in (sketch, few, ends)]
    if not all(bool(torch.isfinite(x).all()) for pair in arrays for x in pair):
        raise SpaceError(f"'{model.where}' has weights so large that their products overflow")
    values = [stored_rows(pair[0].numpy()) for pair in arrays]
    noise = [pair[1].float().numpy() for pair in arrays]
    return Print(
        model.about.family,
        model.about.width,
        depth,
        sum(math.prod(shape) for shape in model.names.values()),
        frame.made_of,
        frame.rows,
        values[0],
        values[1],
        values[2][0],
        noise[0],
        noise[1],
        noise[2][0],
        sizes.to(torch.float16).numpy(),
    )


def _arrays(rows: Sequence[Sequence[Row]]) -> tuple[Tensor, Tensor]:
    """Numbers ``[a, b, n]`` of rows, and the expected lengths of their errors ``[a, b]``."""
    values = torch.stack([torch.stack([row.values for row in line]) for line in rows])
    return values, torch.tensor([[row.error for row in line] for line in rows]).double().sqrt()


def _shares(block: int, depth: int) -> Tensor:
    """How much of each step of depth is this block, ``[STEPS]``; over all blocks, one."""
    edges = torch.arange(STEPS + 1, dtype=torch.float64) * depth / STEPS
    return (edges[1:].clamp(block, block + 1) - edges[:-1].clamp(block, block + 1)) * STEPS / depth
