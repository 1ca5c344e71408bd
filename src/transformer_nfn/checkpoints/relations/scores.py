"""Scores of two checkpoints, block by block, in a basis that their embeddings fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from transformer_nfn.checkpoints.calibration import calibrated_test
from transformer_nfn.checkpoints.evidence import exact_test
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.reduced import INPUTS, Reduced, reduce_pair
from transformer_nfn.checkpoints.relations.result import Relation
from transformer_nfn.checkpoints.relations.verdicts import (
    CONSISTENT,
    RELATED,
    is_rounding,
    judge,
    shapes,
)
from transformer_nfn.checkpoints.sketches import (
    BlockSketch,
    Directions,
    Part,
    Probes,
    block_matrix,
    block_score,
    compare_blocks,
    draw_probes,
    sketch_block,
    thumbnail,
    unit_directions,
)
from transformer_nfn.checkpoints.stream import (
    BlockStreams,
    StreamFit,
    fit_stream,
    without_outputs,
)
from transformer_nfn.checkpoints.survivors import BlockUnits, surviving_units
from transformer_nfn.checkpoints.symmetries import StreamMap
from transformer_nfn.spaces.actions.permutation import assign_pairs


def relate_by_scores(
    first: Model, second: Model, quantised: tuple[float, float] = (0.0, 0.0)
) -> Relation:
    """The relation by scores alone, under the map of the stream that serves best.

    Args:
        first: one model. second: the other.
        quantised: expected squares of the relative errors of their weights that count as rounding
            too, see `quantisation_error`.
    """
    A, B = reduce_pair(first, second, torch.float32)
    for model, error in zip((A, B), quantised, strict=True):
        model.unit += error
    fit = fit_stream(A, B)
    relation = _scored(A, B, fit)
    if relation.verdict == CONSISTENT:
        return relation
    # Outputs that were replaced bend the map; without them the rest may agree exactly.
    outputs = [n for n in fit.tables if n not in INPUTS]
    if relation.verdict != "unrelated" and not all(_fits(A, B, fit, n) for n in outputs):
        kept = without_outputs(A, B, fit)
        if kept.tables and all(_fits(A, B, kept, n) for n in kept.agreement):
            again = _scored(A, B, kept)
            if again.verdict == CONSISTENT:
                return again
    # So do embeddings that were replaced; the basis may be the same nevertheless.
    one_width = A.description.width == B.description.width
    if relation.verdict != "derived" and one_width and _same_basis(A, B):
        again = _scored(A, B, replace(fit, map=StreamMap()))
        if (again.score or 0.0) > (relation.score or 0.0):
            return again
    return relation


def _same_basis(A: Reduced, B: Reduced) -> bool:
    """Whether the first blocks are related in the bases that the files have."""
    probes = draw_probes(A.description.width, centred=A.centred, dtype=A.dtype)
    name = A.blocks[0]
    if name != B.blocks[0]:
        return False
    a, b = (unit_directions(sketch_block(m.block(name), probes)) for m in (A, B))
    return block_score(compare_blocks(a, b)) >= RELATED


def _fits(A: Reduced, B: Reduced, fit: StreamFit, name: str) -> bool:
    """Whether rounding explains the distance of a table under the fitted map."""
    found = fit.agreement.get(name)
    return found is not None and is_rounding(A, B, found.distance, found.noise)


def _scored(A: Reduced, B: Reduced, fit: StreamFit) -> Relation:
    """The relation by scores alone, under one map of the stream."""
    drawn = draw_probes(A.description.width, centred=A.centred, dtype=A.dtype)
    into = Probes(fit.map.determined(drawn.into), fit.map.determined(drawn.out))
    in_line = A.blocks == B.blocks
    blocks: dict[str, dict[str, Part]] = {}
    distances: list[tuple[float, float]] = []
    thumbnails: tuple[list[Directions], list[Directions]] = ([], [])
    # One block of each model in memory at a time.
    for name, a, b in zip_longest(A.blocks, _sketches(A, into), _sketches(B, into, fit.map)):
        for kept, sketch in zip(thumbnails, (a, b), strict=True):
            if sketch is not None:
                kept.append(thumbnail(sketch))
        if in_line:
            blocks[name] = compare_blocks(unit_directions(a), unit_directions(b))
            distances.append(_constant_distance(a, b))
    matrix = block_matrix(*thumbnails)
    judgement = judge(A, B, fit, blocks, distances, matrix)
    scores = [block_score(parts) for parts in blocks.values()]
    score = sum(scores) / len(scores) if scores else None
    undecided = judgement.verdict in ("unclear", CONSISTENT)
    relation = Relation(
        judgement.verdict,
        None if undecided else False,
        score,
        judgement.reason,
        A.blocks,
        B.blocks,
        blocks,
        {name: found.score for name, found in fit.agreement.items()},
        fit.tables,
        matrix,
        judgement.blocks,
        tuple(_left_out(A, B, fit, in_line)),
        exact=exact_test(
            (
                (A.blocks[i], B.blocks[j], thumbnails[0][i], thumbnails[1][j])
                for i, j in _partners(matrix)
            ),
            B.description,
        ),
        calibrated=None if score is None else calibrated_test(A.description, score),
    )
    if shapes(A) == shapes(B):
        return relation
    # Strangers of different shapes were not calibrated on.
    return replace(relation, calibrated=None, units=tuple(_units(relation, thumbnails)))


def _units(
    relation: Relation, thumbnails: tuple[list[Directions], list[Directions]]
) -> Iterator[BlockUnits]:
    """What each block of B that comes from one of A has of it."""
    for j, (block, source) in enumerate(relation.sources.items()):
        if source is not None:
            a, b = thumbnails[0][relation.rows.index(source)], thumbnails[1][j]
            if len(a.written) == len(b.written):
                yield surviving_units(block, source, a, b)


def _partners(matrix: Tensor) -> list[tuple[int, int]]:
    """Blocks of A and B one to one: related ones, and otherwise those in the same place."""
    likeness = matrix.where(matrix >= RELATED, 0.0) + 1e-3 * torch.eye(*matrix.shape)
    return list(zip(*(x.tolist() for x in assign_pairs(likeness)), strict=True))


def _sketches(
    model: Reduced, probes: Probes, stream: StreamMap | None = None
) -> Iterator[BlockSketch]:
    for block in map(model.block, model.blocks):
        moved = probes if stream is None else BlockStreams.of(block, stream).moved(probes)
        yield sketch_block(block, moved)


def _constant_distance(a: BlockSketch, b: BlockSketch) -> tuple[float, float]:
    """Distance of the constants that two blocks add to the stream, relative to all that they write,
    and the distance that rounding alone is expected to cause."""
    x, y = a.constants, b.constants
    if x.shape != y.shape:
        return float("inf"), 0.0
    size = max(float(z.norm()) for z in (x, y, a.neurons.write, b.neurons.write))
    if size == 0:
        return 0.0, 0.0
    error = (a.constants_error + b.constants_error) ** 0.5
    return float((x - y).norm()) / size, error / size


def _left_out(A: Reduced, B: Reduced, fit: StreamFit, in_line: bool) -> Iterator[str]:
    for name, count in fit.rows.items():
        sizes = [m.table_rows(name) for m in (A, B)]
        if sizes[0] != sizes[1]:
            yield f"{name}: only the first {count} rows, one has {sizes[0]}, the other {sizes[1]}"
    missing = set(A.table_names()) ^ set(B.table_names())
    if missing:
        yield f"only one of the two has {', '.join(sorted(missing))}"
    if not in_line:
        yield f"blocks one by one: A has {len(A.blocks)}, B {len(B.blocks)}; the matrix only"
    widths = [m.description.width for m in (A, B)]
    if widths[0] != widths[1]:
        yield (
            f"{abs(widths[0] - widths[1])} directions of the wider stream: the widths are "
            f"{widths[0]} and {widths[1]}"
        )
    elif fit.map.span is not None:
        yield (
            f"directions of the stream that embeddings and outputs leave open: they determine "
            f"{fit.map.span.shape[1]} of {len(fit.map.span)}"
        )
    gated = {b.mlp.gated for m in (A, B) for b in m.description.blocks.values()}
    if len(gated) > 1:
        yield "MLPs: those of one model are gated, those of the other are not"
