"""Relation of two checkpoints: one model in disguise, relatives, or strangers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transformer_nfn.checkpoints.proof import Proof, prove_pair
from transformer_nfn.checkpoints.proof.checks import HALF
from transformer_nfn.checkpoints.reduced import Reduced, reduce_pair
from transformer_nfn.checkpoints.relations.words import describe
from transformer_nfn.checkpoints.scores.probes import (
    BlockSketch,
    Probes,
    draw_probes,
    sketch_block,
)
from transformer_nfn.checkpoints.scores.scores import (
    Part,
    block_score,
    compare_blocks,
    unit_directions,
)
from transformer_nfn.checkpoints.scores.stream import (
    EMBEDDINGS,
    StreamFit,
    StreamMap,
    fit_stream,
    stream_kind,
    without_outputs,
)
from transformer_nfn.checkpoints.scores.thumbnails import Thumbnail, block_matrix, thumbnail
from transformer_nfn.checkpoints.scores.verdict import (
    CONSISTENT,
    EXPLAINED,
    EXPLAINED_HALF,
    FEWEST,
    FLOAT32,
    RELATED,
    STRANGE,
    Judgement,
    Verdict,
    judge,
    judge_matrix,
)

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.families import Model


@dataclass(frozen=True)
class Relation:
    """What `relate` found.

    Attributes:
        verdict: ``same`` (proved), ``same backbone`` (blocks and embeddings proved, heads
            differ), ``consistent with a disguise, not proved``, ``derived``, ``partly``,
            ``embeddings only``, ``unrelated``, ``unclear``.
        same_function: True only by equal bytes or by proof; False where it is known that they
            are not (by shapes, by proof, or with a verdict that implies it); None otherwise.
        score: mean over the blocks, 0 for strangers, 1 for a disguise; None without blocks to
            compare.
        blocks: parts of each block by its name; empty where the depths differ.
        tables: how embeddings, positions and output matrix agree.
        fitted: tables that the map of the stream was fitted on.
        matrix: blocks of A (rows) against blocks of B.
        rows: names of the blocks of A. columns: of B.
        related: blocks of A that the verdict rests on.
        not_compared: what was left out, a sentence each.
        reason: one sentence.
        proof: what a proof added, where one was tried.
    """

    verdict: Verdict
    same_function: bool | None
    score: float | None
    blocks: Mapping[str, Mapping[str, Part]]
    tables: Mapping[str, float]
    fitted: tuple[str, ...]
    matrix: Tensor | None
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    related: tuple[str, ...]
    not_compared: tuple[str, ...]
    reason: str
    proof: Proof | None = None

    def __str__(self) -> str:
        return describe(self)


def relate(A: Model, B: Model, *, prove: bool | None = None) -> Relation:
    """Relates two checkpoints, whatever disguise either of them wears.

    Scores say how alike the blocks are in a basis that embeddings fix; see
    `scores.verdict` for what follows from them, with the numbers behind
    every threshold. No direction is named: a score is the same both ways. Where scores are those
    of a disguise, a proof decides: an element of the symmetry group verified on every tensor,
    scale included.

    Args:
        A: one model, from `open_model`.
        B: the other.
        prove: True proves, or looks for token ids on which the two differ, whatever the scores
            are; False leaves it at scores. By default only a disguise is proved.
    """
    if (equal := equal_weights(A, B)) is not None:
        return _identical(A, equal)
    away = incomparable(A, B)
    found = _apart_by_shape(A, B, away) if away else _relate(A, B)
    if prove is False or (prove is None and found.verdict != CONSISTENT):
        return found
    return _concluded(found, prove_pair(A, B, found))


def _concluded(found: Relation, proof: Proof) -> Relation:
    """The relation after a proof was tried."""
    verdict, reason = found.verdict, found.reason
    if proof.same is True:
        verdict, reason = "same", proof.reason
    elif proof.backbone:
        verdict, reason = "same backbone", proof.reason
    elif verdict == CONSISTENT:
        verdict, reason = ("derived" if proof.same is False else "unclear"), proof.reason
    return replace(
        found,
        verdict=verdict,
        reason=reason,
        same_function=proof.same,
        proof=proof,
        not_compared=found.not_compared if proof.element is None else proof.not_compared,
    )


def equal_weights(A: Model, B: Model) -> str | None:
    """How the tensors of two models of one architecture agree without any disguise.

    Returns:
        One sentence if every tensor is equal bit by bit, or all of one model are those of the other
        rounded to their dtypes; else None.
    """
    if A.about != B.about or dict(A.names) != dict(B.names):
        return None
    copy = original = True
    rounded: set[torch.dtype] = set()
    for name in A.names:
        a, b = A[name], B[name]
        if a.dtype == b.dtype and torch.equal(a, b):
            continue
        if a.dtype == b.dtype:
            return None
        rounded |= {min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)}
        copy, original = copy and _is_rounded(a, b), original and _is_rounded(b, a)
        if not copy and not original:
            return None
    if not rounded:
        return "both hold the same bytes"
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in rounded))
    return f"{'B' if copy else 'A'} holds the numbers of the other rounded to {dtypes}"


def _is_rounded(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` is ``a`` in another dtype, in which nothing of size was lost to underflow."""
    if not torch.equal(a.to(b.dtype), b):
        return False
    away = (a.double() - b.double()).norm()
    return bool(away <= torch.finfo(b.dtype).eps * a.double().norm())


def incomparable(A: Model, B: Model) -> str | None:
    """Why no basis of one stream can stand for one of the other; None where one can."""
    a, b = A.about, B.about
    if a.width != b.width:
        return f"the streams have different widths, {a.width} and {b.width}"
    if a.norm != b.norm:
        return "one has LayerNorm, the other RMS norm"
    kinds = [stream_kind(Reduced(m)) for m in (A, B)]
    if kinds[0] != kinds[1]:
        return f"their norms stand in different places ({a.family} and {b.family})"
    tables = set(Reduced(A).table_names()) & set(Reduced(B).table_names())
    if kinds[0] != "identity" and not tables & {"token", "position", "patch", "head"}:
        return f"they share no embeddings or outputs ({a.family} and {b.family})"
    return None


def _identical(A: Model, reason: str) -> Relation:
    names = Reduced(A).blocks
    return Relation("same", True, 1.0, {}, {}, (), None, names, names, names, (), reason)


def _apart_by_shape(A: Model, B: Model, away: str) -> Relation:
    """Models no symmetry joins; ancestry (by cutting or widening) is not claimed or denied."""
    return Relation(
        "unclear",
        False,
        None,
        {},
        {},
        (),
        None,
        Reduced(A).blocks,
        Reduced(B).blocks,
        (),
        ("all blocks",),
        f"{away}: no disguise changes that, so they are not one model in disguise; whether one "
        "was made from the other by changing its shape is not looked at",
    )


def _relate(first: Model, second: Model) -> Relation:
    A, B = reduce_pair(first, second, torch.float32)
    fit = fit_stream(A, B)
    found = _scored(A, B, fit)
    if found.verdict == CONSISTENT:
        return found
    # Outputs that were replaced bend the map; without them the rest may agree exactly.
    outputs = [n for n in fit.tables if n not in EMBEDDINGS]
    if found.verdict != "unrelated" and any(not _fits(A, B, fit, n) for n in outputs):
        kept = without_outputs(A, B, fit)
        if kept.tables and all(_fits(A, B, kept, n) for n in kept.distances):
            again = _scored(A, B, kept)
            if again.verdict == CONSISTENT:
                return again
    # So do embeddings that were replaced; the basis may be the same nevertheless.
    if found.verdict != "derived" and _undisguised(A, B):
        again = _scored(A, B, replace(fit, map=StreamMap("identity")))
        if (again.score or 0.0) > (found.score or 0.0):
            return again
    return found


def _undisguised(A: Reduced, B: Reduced) -> bool:
    """Whether the first blocks are relatives in the bases that the files have."""
    probes = draw_probes(A.about.width, centred=A.centred, dtype=A.dtype)
    name = A.blocks[0]
    if name != B.blocks[0]:
        return False
    a, b = (unit_directions(sketch_block(m.block(name), probes)) for m in (A, B))
    return block_score(compare_blocks(a, b)) >= RELATED


def _fits(A: Reduced, B: Reduced, fit: StreamFit, name: str) -> bool:
    """Whether rounding explains how far a table is away under the fitted map."""
    if name not in fit.distances:
        return False
    return _is_rounding(A, B, fit.distances[name], fit.noise[name])


def _is_rounding(A: Reduced, B: Reduced, distance: float, noise: float) -> bool:
    half = any(m.model.dtype in HALF for m in (A, B))
    return distance <= max(FLOAT32, (EXPLAINED_HALF if half else EXPLAINED) * noise)


def _scored(A: Reduced, B: Reduced, fit: StreamFit) -> Relation:
    """The relation by scores alone, under one map of the stream."""
    drawn = draw_probes(A.about.width, centred=A.centred, dtype=A.dtype)
    into = Probes(fit.map.determined(drawn.into), fit.map.determined(drawn.out))
    probes = (into, Probes(fit.map(into.into), fit.map(into.out)))
    in_line = A.blocks == B.blocks
    blocks: dict[str, dict[str, Part]] = {}
    constants: list[tuple[float, float]] = []
    small: tuple[list[Thumbnail], list[Thumbnail]] = ([], [])
    for a, b in _sketches(A, B, probes, in_line):
        for kept, sketch in zip(small, (a, b), strict=True):
            if sketch is not None:
                kept.append(thumbnail(sketch[1]))
        if in_line and a is not None and b is not None:
            blocks[a[0]] = compare_blocks(unit_directions(a[1]), unit_directions(b[1]))
            constants.append(_constants_apart(a[1], b[1]))
    matrix = block_matrix(*small)
    judgement = _judge(A, B, fit, blocks, constants, matrix)
    scores = [block_score(parts) for parts in blocks.values()]
    undecided = judgement.verdict in ("unclear", CONSISTENT)
    return Relation(
        judgement.verdict,
        None if undecided else False,
        sum(scores) / len(scores) if scores else None,
        blocks,
        fit.scores,
        fit.tables,
        matrix,
        A.blocks,
        B.blocks,
        judgement.blocks,
        tuple(_left_out(A, B, fit, in_line)),
        judgement.reason,
    )


def _sketches(
    A: Reduced, B: Reduced, probes: tuple[Probes, Probes], in_line: bool
) -> Iterator[tuple[tuple[str, BlockSketch] | None, tuple[str, BlockSketch] | None]]:
    """Blocks of both side by side, or one after the other where the depths differ."""
    if in_line:
        for name in A.blocks:
            a = name, sketch_block(A.block(name), probes[0])
            yield a, (name, sketch_block(B.block(name), probes[1]))
        return
    for name in A.blocks:
        yield (name, sketch_block(A.block(name), probes[0])), None
    for name in B.blocks:
        yield None, (name, sketch_block(B.block(name), probes[1]))


def _constants_apart(a: BlockSketch, b: BlockSketch) -> tuple[float, float]:
    """Distance of the constants that two blocks add to the stream, against all that they write,
    and that distance as rounding alone is expected to cause it."""
    x, y = a.constants, b.constants
    if x.shape != y.shape:
        return float("inf"), 0.0
    size = max(float(z.norm()) for z in (x, y, a.neurons.write, b.neurons.write))
    if size == 0:
        return 0.0, 0.0
    error = (a.constants_error + b.constants_error) ** 0.5
    return float((x - y).norm()) / size, error / size


def _judge(
    A: Reduced,
    B: Reduced,
    fit: StreamFit,
    blocks: Mapping[str, Mapping[str, Part]],
    constants: list[tuple[float, float]],
    matrix: Tensor,
) -> Judgement:
    span = fit.map.span
    if span is not None and span.shape[1] < FEWEST:
        return Judgement(
            "unclear",
            f"embeddings and outputs determine {span.shape[1]} of {len(span)} directions of the "
            "stream, too few to compare blocks by",
        )
    if A.blocks != B.blocks:
        best = {
            name: (B.blocks[int(row.argmax())], float(row.max()))
            for name, row in zip(A.blocks, matrix, strict=True)
        }
        strange = all(score <= STRANGE for _, score in best.values())
        return judge_matrix(best, _embeddings(A, B) if strange else None)
    scores = {name: block_score(parts) for name, parts in blocks.items()}
    ceilings = {
        name: min((p.ceiling for p in parts.values()), default=1.0)
        for name, parts in blocks.items()
    }
    strange = all(score <= STRANGE for score in scores.values())
    parts = [(p.distance, p.noise) for found in blocks.values() for p in found.values()]
    explained = _explained(A, B, fit, [*parts, *constants])
    return judge(scores, ceilings, explained, _embeddings(A, B) if strange else None)


def _explained(
    A: Reduced, B: Reduced, fit: StreamFit, measured: Sequence[tuple[float, float]]
) -> bool:
    """Whether rounding explains every distance of blocks (measured, with its noise) and embeddings.

    Outputs do not count: models that differ there may share all the rest.
    """
    embeddings = [n for n in EMBEDDINGS if n in A.names or n in B.names]
    if any((n in A.names) != (n in B.names) for n in embeddings):
        return False
    if any(A.table_rows(n) != B.table_rows(n) for n in embeddings):
        return False
    tables = [(fit.distances[n], fit.noise[n]) for n in embeddings if n in fit.distances]
    return all(_is_rounding(A, B, distance, noise) for distance, noise in (*measured, *tables))


def _embeddings(A: Reduced, B: Reduced) -> float | None:
    """How the embeddings agree in the basis that is best for them, whatever the outputs are."""
    names = [n for n in ("token", "patch") if n in A.names and n in B.names]
    found = [fit_stream(A, B, only=(name,)).scores.values() for name in names]
    return max((score for scores in found for score in scores), default=None)


def _left_out(A: Reduced, B: Reduced, fit: StreamFit, in_line: bool) -> Iterator[str]:
    for name, count in fit.rows.items():
        sizes = [len(t) for m in (A, B) for t in m.tables((name,))]
        if sizes[0] != sizes[1]:
            yield f"{name}: only the first {count} rows, one has {sizes[0]}, the other {sizes[1]}"
    missing = set(A.table_names()) ^ set(B.table_names())
    if missing:
        yield f"only one of the two has {', '.join(sorted(missing))}"
    if not in_line:
        yield f"blocks one by one: A has {len(A.blocks)}, B {len(B.blocks)}; the matrix only"
    if fit.map.span is not None:
        yield (
            f"directions of the stream that embeddings and outputs leave open: they determine "
            f"{fit.map.span.shape[1]} of {len(fit.map.span)}"
        )
    gated = {b.mlp.gated for m in (A, B) for s in m.about.stacks for b in s.blocks}
    if len(gated) > 1:
        yield "MLPs: those of one model are gated, those of the other are not"
