"""Scores of all pairs of blocks of two models, from small sketches.

All blocks of both models are in memory at once here, so they are kept small: 64 of the probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.scores.probes import (
    PROBES,
    BlockSketch,
    HeadSketch,
    NeuronSketch,
)
from transformer_nfn.checkpoints.scores.scores import (
    Directions,
    block_score,
    compare_blocks,
    unit_directions,
)

KEPT = 64
"""Probes of each side that a thumbnail keeps."""
NEURONS = 128
"""Neurons of a block that are looked for in each block of the other model."""

Thumbnail = Directions


def thumbnail(sketch: BlockSketch) -> Thumbnail:
    """A block's sketch on fewer probes."""
    heads = {
        prefix: HeadSketch(_square(head.QK), _square(head.VO), head.noise)
        for prefix, head in sketch.heads.items()
    }
    n = sketch.neurons
    up = None if n.up is None else n.up[:, :KEPT]
    neurons = NeuronSketch(n.read[:, :KEPT], up, n.write[:, :KEPT], n.noise)
    return unit_directions(replace(sketch, heads=heads, neurons=neurons))


def _square(x: Tensor) -> Tensor:
    """Every fourth probe of both sides, so that each distance of rotary positions is there."""
    step = PROBES // KEPT
    return x.reshape(len(x), PROBES, PROBES)[:, ::step, ::step].flatten(1)


def block_matrix(A: Sequence[Thumbnail], B: Sequence[Thumbnail]) -> Tensor:
    """Scores of all blocks of A against all of B, ``[a, b]``."""
    rows = [[block_score(compare_blocks(a, b, NEURONS)) for b in B] for a in A]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(A), len(B))
