"""Map of the stream where tables leave directions open: neurons of the blocks determine the rest.

Neurons are matched by what they read along the directions that the tables do determine, which
tells those of a disguise apart; what matched neurons read along all directions then is one more
table, with a row for each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_nfn.checkpoints.reduced import Reduced, ReducedBlock
from transformer_nfn.checkpoints.stream import StreamMap, solve_stream
from transformer_nfn.spaces.actions.permutation import match_rows

ENOUGH = 8
"""Neurons for each direction of the stream, after which no further block is read."""
ALIKE = 0.1
"""Relative distance along the known directions up to which a match counts."""


def refine_stream(a: Reduced, b: Reduced, stream: StreamMap) -> StreamMap:
    """The map fitted on tables, completed by what neurons read.

    Args:
        a: one model.
        b: the other, of the same description.
        stream: determined on some directions only; it is returned as it is if on all.
    """
    if stream.span is None or stream.matrix is None:
        return stream
    basis = stream.span.double()
    image = stream.matrix.double().mT @ basis
    known = basis @ image.mT
    cross, count = torch.zeros_like(known), 0
    for name in a.blocks:
        x, y = (_readings(m.block(name)) for m in (a, b))
        p, q = x[:, :-1] @ basis, y[:, :-1] @ image
        first, second = (
            torch.cat([part, z[:, -1:]], 1) for part, z in ((p, x), (q, y))
        )  # a bias does not depend on the basis
        order = match_rows(second, first).index
        away = (first[order] - second).norm(dim=1)
        good = away <= ALIKE * second.norm(dim=1)
        cross += x[order][good, :-1].mT @ y[good, :-1]
        count += int(good.sum())
        if count >= ENOUGH * len(known):
            break
    weight = cross.norm() / known.norm()
    return solve_stream(cross + weight * known, stream.kind, torch.float64, centred=a.centred)


def _readings(block: ReducedBlock) -> Tensor:
    """What each neuron reads of the stream, and its bias, as unit vectors ``[f, D + 1]``.

    Of gated neurons the gate, on which no scale acts.
    """
    weight, bias = block.reader("W_G" if block.about.mlp.gated else "W_A")
    column = torch.zeros(weight.value.shape[1]) if bias is None else bias.value
    rows = torch.cat([weight.value.mT, column.to(weight.value).unsqueeze(1)], 1)
    length: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / length.clamp_min(1e-300)
