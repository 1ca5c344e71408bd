"""Relation of two checkpoints: one model in disguise, related, or unrelated.

Thresholds were measured by ``benchmarks/relations.py`` on eight families of small language models
(GPT-2s and Llamas, D = 64, three blocks) that were really trained, the second model of each pair
disguised by every symmetry it has at condition 10:

======================================  =====  ==============  ==============
relation                                pairs  score           each block
======================================  =====  ==============  ==============
fine-tuned, averaged, pruned by half,
int8, int4, two fine-tunes of a third      56  0.943 to 1.000  0.924 to 1.000
retrained as long on other data             8  0.553 to 0.614  0.455 to 0.694
one block replaced: the others            110                  0.918 to 1.000
one block replaced: that block            110                  0.000 to 0.053
started from the other's embeddings         8  0.083 to 0.129  0.044 to 0.229
unrelated, trained on the same data       130  0.041 to 0.127  0.023 to 0.188
======================================  =====  ==============  ==============

Every one of these pairs gets the right verdict. The thresholds were set on the same pairs; no error
among 130 unrelated and 64 related pairs bounds the rates at about 2 % and 5 %. Trained four times
as long (one pair each), unrelated models had a block at 0.22, and a model retrained as long on
other data fell to 0.26 in its last block, *partly*: see ``docs/relations.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from transformer_nfn.checkpoints.calibration import CalibratedTest, calibrated_test
from transformer_nfn.checkpoints.conversion import Conversion, check_conversion
from transformer_nfn.checkpoints.evidence import ExactTest, exact_test
from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.proof import Proof, prove_pair
from transformer_nfn.checkpoints.proof.ends import compare_outputs
from transformer_nfn.checkpoints.reduced import Reduced, reduce_pair
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
    EMBEDDINGS,
    StreamFit,
    fit_stream,
    moved_probes,
    reduced_group,
    without_outputs,
)
from transformer_nfn.checkpoints.survivors import BlockUnits, surviving_units
from transformer_nfn.checkpoints.symmetries import StreamMap
from transformer_nfn.errors import SpaceError
from transformer_nfn.io.files import blank_figure, save_figure
from transformer_nfn.symmetry.rounding import HALF

__all__ = ["Part", "Relation", "Verdict", "block_score", "draw_relation", "relate"]

Verdict = Literal[
    "same",
    "same backbone",
    "consistent with a disguise, not proved",
    "derived",
    "partly",
    "embeddings only",
    "unrelated",
    "different",
    "unclear",
]
CONSISTENT: Verdict = "consistent with a disguise, not proved"
"""Scores differ by no more than rounding explains. They do not see every tensor, nor any scale:
only a proof makes this *same*."""

RELATED = 0.35
"""Least score of a related block: midway between the lowest of a derived model (0.455) and the
highest of one that shared embeddings only (0.229)."""
UNRELATED = 0.28
"""Largest score of an unrelated block: a fifth above the highest one measured (0.229)."""
SHARED_EMBEDDINGS = 0.76
"""Least score of copied embeddings: unrelated models of the same data reach 0.701, embeddings that
a model started from, and trained further, stay above 0.817."""
UNRELATED_PAIRS, HIGHEST_UNRELATED = 130, 0.19
"""Unrelated pairs that were measured, and the highest score of a block among them."""
DERIVED_PAIRS, LOWEST_DERIVED = 64, 0.45
"""Derived pairs that were measured, and the lowest score of a block among them."""
FLOAT32 = 5e-5
"""Largest distance that arithmetic in float32, which scores are computed in, explains."""
EXPLAINED, EXPLAINED_HALF = 64.0, 4.0
"""Times the expected noise up to which rounding explains a distance; the second where a file is in
half precision, where there is less room between rounding and a change."""
SAME_BLOCK = 0.98
"""Share of the best score from which on a block counts as the one in the same place."""
READABLE = 0.8
"""Least score that rounding must leave of every part of an exact disguise for a block to be judged
by its score: below, its matrices have a condition that its dtype does not carry."""
FEWEST = 4
"""Fewest directions of the stream that tables must determine for scores to be meaningful."""
NO_SCORES = (
    "without residuals each sublayer writes in a basis of its own, which no embedding fixes: there "
    "are no scores, only a proof"
)
NO_DIRECTION = (
    "Scores are symmetric: which of the two came first, or whether both came from a third, "
    "is not something they can tell."
)


@dataclass(frozen=True)
class Relation:
    """Relation of two checkpoints, from `relate`.

    Attributes:
        verdict: ``same`` (proved), ``same backbone`` (blocks and embeddings proved, heads
            differ), ``consistent with a disguise, not proved``, ``derived``, ``partly``,
            ``embeddings only``, ``unrelated``, ``different`` (another function, where no scores
            say how similar), ``unclear``.
        same_function: True only by equal bytes, by rounding or by proof; False where they are known
            to differ (by shapes, by proof, or with a verdict that implies it); None otherwise.
        score: mean over the blocks, 0 for unrelated models, 1 for a disguise; None without blocks
            to compare.
        blocks: parts of each block by its name; empty where the depths differ.
        tables: agreement of embeddings, positions and output matrix.
        fitted: tables that the map of the stream was fitted on.
        matrix: blocks of A (rows) against blocks of B.
        rows: names of the blocks of A.
        columns: names of the blocks of B.
        related: blocks of A that the verdict rests on.
        not_compared: what was left out, a sentence each.
        reason: one sentence.
        proof: of the same function or the contrary, where one was tried.
        exact: test of independent training; a disguise that permutes units defeats it. None where
            nothing was compared.
        calibrated: p of the score among trained strangers, whatever the disguise. None where the
            shapes differ.
        conversion: tensor by tensor, where one is quantised and most of them agree.
        units: of models of different shapes, what each block of B has of A.

    >>> print(Relation("same", True, 1.0, "both hold the same bytes", ("0",), ("0",)))
    same (score 1.000): both hold the same bytes
    """

    verdict: Verdict
    same_function: bool | None
    score: float | None
    reason: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    blocks: Mapping[str, Mapping[str, Part]] = field(default_factory=dict)
    tables: Mapping[str, float] = field(default_factory=dict)
    fitted: tuple[str, ...] = ()
    matrix: Tensor | None = None
    related: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    proof: Proof | None = None
    exact: ExactTest | None = None
    calibrated: CalibratedTest | None = None
    conversion: Conversion | None = None
    units: tuple[BlockUnits, ...] = ()

    @property
    def sources(self) -> dict[str, str | None]:
        """Block of A that each block of B comes from; None for a block without a relative in A."""
        out: dict[str, str | None] = {}
        for name, scores in zip(
            self.columns, () if self.matrix is None else self.matrix.mT, strict=False
        ):
            best = int(scores.argmax())
            if name in self.rows:  # equal blocks of A: the one in the same place
                own = self.rows.index(name)
                best = own if scores[own] >= SAME_BLOCK * scores[best] else best
            out[name] = self.rows[best] if scores[best] >= RELATED else None
        return out

    def __str__(self) -> str:
        """A table by block and part, the verdict in a sentence, and what was not compared."""
        lines = []
        parts = list(dict.fromkeys(p for row in self.blocks.values() for p in row))
        if parts:
            width = max(5, *(len(name) for name in self.blocks))
            lines.append("  ".join([f"{'block':{width}}", *(f"{p:>8}" for p in parts), "   score"]))
            for name, row in self.blocks.items():
                cells = [f"{row[p].score:8.3f}" if p in row else " " * 8 for p in parts]
                lines.append("  ".join([f"{name:{width}}", *cells, f"{block_score(row):8.3f}"]))
        if self.tables:
            shown = ", ".join(f"{name} {score:.3f}" for name, score in self.tables.items())
            lines.append(f"tables: {shown}")
        score = "" if self.score is None else f" (score {self.score:.3f})"
        lines.append(f"{self.verdict}{score}: {self.reason}")
        if self.proof is not None:
            first, *more = self.proof.lines()
            lines += more if self.proof.reason == self.reason else [first, *more]
        lines += [str(test) for test in (self.exact, self.calibrated) if test is not None]
        lines += [f"not compared: {text}" for text in self.not_compared]
        lines += [str(unit) for unit in self.units]
        if self.verdict in ("derived", "partly", "embeddings only"):
            lines.append(NO_DIRECTION)
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "verdict": self.verdict,
            "same_function": self.same_function,
            "score": self.score,
            "reason": self.reason,
            "blocks": {
                name: {
                    "score": block_score(parts),
                    "parts": {
                        part: {
                            "score": p.score,
                            "distance": p.distance if math.isfinite(p.distance) else None,
                            "rounding": p.noise,
                        }
                        for part, p in parts.items()
                    },
                }
                for name, parts in self.blocks.items()
            },
            "tables": dict(self.tables),
            "matrix": None if self.matrix is None else self.matrix.tolist(),
            "rows": list(self.rows),
            "columns": list(self.columns),
            "related_blocks": list(self.related),
            "not_compared": list(self.not_compared),
            "direction": "none: scores are symmetric",
            "proof": None if self.proof is None else self.proof.as_json(),
            "exact_test": None if self.exact is None else self.exact.as_json(),
            "calibrated_test": None if self.calibrated is None else self.calibrated.as_json(),
            "conversion": None if self.conversion is None else self.conversion.as_json(),
            "units": {unit.block: unit.as_json() for unit in self.units},
        }


def relate(A: Model, B: Model, *, prove: bool | None = None) -> Relation:
    """Relate two checkpoints, whatever disguise either of them wears.

    Scores say how similar the blocks are in a basis that the embeddings fix; the docstring of this
    module has the numbers behind every threshold. Scores are symmetric: no direction is reported.
    Where they are those of a disguise, a proof decides: an element of the symmetry group, verified
    on every tensor, scale included. Where one is quantised, both are first compared as they lie,
    see `check_conversion`.

    Args:
        A: one model, from `open_model`.
        B: the other.
        prove: True proves, or searches for token ids on which the two differ, whatever the scores
            are; False leaves it at scores. By default only a disguise is proved.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> a, b = (write_example_checkpoint(f"model-{seed}", seed) for seed in (0, 1))
    >>> with open_model(a) as A, open_model(b) as B:
    ...     relate(A, B).verdict, relate(A, A).verdict
    ('unrelated', 'same')
    """
    conversion = check_conversion(A, B)
    if conversion is not None and conversion.same:
        return _converted(A, B, conversion)
    relation = replace(_relate(A, B, prove), conversion=conversion)
    if conversion is None or relation.verdict == "same":
        return relation
    return replace(relation, reason=str(conversion))


def _converted(A: Model, B: Model, conversion: Conversion) -> Relation:
    """The relation of two files that hold the same numbers up to quantisation."""
    rows = Reduced(A).blocks
    mismatch = compare_outputs(A, B).mismatch()
    return Relation(
        "same" if mismatch is None else "same backbone",
        mismatch is None,
        1.0,
        str(conversion) if mismatch is None else f"{conversion}; {mismatch}",
        rows,
        Reduced(B).blocks,
        related=rows,
        not_compared=tuple(f"{name}: only one of the two has it" for name in conversion.single),
        conversion=conversion,
    )


def _relate(A: Model, B: Model, prove: bool | None) -> Relation:
    """The relation up to a disguise."""
    rows, columns = Reduced(A).blocks, Reduced(B).blocks
    if (reason := equal_weights(A, B)) is not None:
        return Relation("same", True, 1.0, reason, rows, columns, related=rows)
    if (reason := incomparable(A, B)) is not None:
        # Ancestry by cutting or widening is neither claimed nor denied.
        reason += (
            ": no disguise changes that, so they are not one model in disguise; whether one was "
            "made from the other by changing its shape is not looked at"
        )
        relation = Relation(
            "unclear", False, None, reason, rows, columns, not_compared=("all blocks",)
        )
    elif "chain" in A.description.orders:
        relation = Relation("unclear", None, None, NO_SCORES, rows, columns)
        prove = prove is not False
    else:
        relation = _relate_by_scores(A, B)
    if prove is False or (prove is None and relation.verdict != CONSISTENT):
        return relation
    scores = [block_score(parts) for parts in relation.blocks.values()]
    related = relation.reason == NO_SCORES or (bool(scores) and min(scores) >= RELATED)
    return _concluded(relation, prove_pair(A, B, relation.fitted if related else None))


def _concluded(relation: Relation, proof: Proof) -> Relation:
    """The relation after a proof was tried."""
    verdict, reason = relation.verdict, relation.reason
    if proof.same is True:
        verdict, reason = "same", proof.reason
    elif proof.backbone:
        verdict, reason = "same backbone", proof.reason
    elif reason == NO_SCORES:
        verdict, reason = ("different" if proof.same is False else "unclear"), proof.reason
    elif verdict == CONSISTENT:
        verdict, reason = ("derived" if proof.same is False else "unclear"), proof.reason
    return replace(
        relation,
        verdict=verdict,
        reason=reason,
        same_function=proof.same,
        proof=proof,
        not_compared=relation.not_compared if proof.element is None else proof.not_compared,
    )


def equal_weights(A: Model, B: Model) -> str | None:
    """How the tensors of two models of one architecture agree without any disguise.

    Returns:
        One sentence if every tensor is equal bit by bit, or all of one model are those of the other
        rounded to their dtypes; else None.
    """
    if A.description != B.description or dict(A.names) != dict(B.names):
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
    """Whether ``b`` is ``a`` in another dtype, with nothing of size lost to underflow."""
    if not torch.equal(a.to(b.dtype), b):
        return False
    distance = (a.double() - b.double()).norm()
    return bool(distance <= torch.finfo(b.dtype).eps * a.double().norm())


def incomparable(A: Model, B: Model) -> str | None:
    """Why no basis of one stream can stand for one of the other; None where one can."""
    a, b = A.description, B.description
    if a.norm != b.norm:
        return "one has LayerNorm, the other RMS norm"
    if ("chain" in a.orders) != ("chain" in b.orders):
        return "one has residuals, the other has not"
    groups = [reduced_group(Reduced(m)) for m in (A, B)]
    if groups[0] != groups[1]:
        return f"their norms stand in different places ({a.family} and {b.family})"
    if (groups[0] == "none" or a.inputs == "audio") and a.width != b.width:
        return f"the streams have different widths, {a.width} and {b.width}, and nothing maps them"
    tables = set(Reduced(A).table_names()) & set(Reduced(B).table_names())
    if groups[0] != "none" and not tables & {"token", "position", "patch", "projection", "head"}:
        return f"they share no embeddings or outputs ({a.family} and {b.family})"
    return None


def _relate_by_scores(first: Model, second: Model) -> Relation:
    A, B = reduce_pair(first, second, torch.float32)
    fit = fit_stream(A, B)
    relation = _scored(A, B, fit)
    if relation.verdict == CONSISTENT:
        return relation
    # Outputs that were replaced bend the map; without them the rest may agree exactly.
    outputs = [n for n in fit.tables if n not in EMBEDDINGS]
    if relation.verdict != "unrelated" and not all(_fits(A, B, fit, n) for n in outputs):
        kept = without_outputs(A, B, fit)
        if kept.tables and all(_fits(A, B, kept, n) for n in kept.distances):
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
    if name not in fit.distances:
        return False
    return _is_rounding(A, B, fit.distances[name], fit.noise[name])


def _is_rounding(A: Reduced, B: Reduced, distance: float, noise: float) -> bool:
    half = any(m.model.dtype in HALF for m in (A, B))
    return distance <= max(FLOAT32, (EXPLAINED_HALF if half else EXPLAINED) * noise)


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
    judgement = _judge(A, B, fit, blocks, distances, matrix)
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
        fit.scores,
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
    if _shapes(A) == _shapes(B):
        return relation
    # Strangers of different shapes were not calibrated on.
    return replace(relation, calibrated=None, units=tuple(_units(relation, thumbnails)))


def _shapes(model: Reduced) -> tuple[object, ...]:
    """Width of the stream, and numbers of heads and neurons of every block."""
    blocks = [block for stack in model.description.stacks for block in stack.blocks]
    units = ((b.attention.heads, b.attention.groups, b.mlp.neurons, b.mlp.experts) for b in blocks)
    return model.description.width, *units


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
    from scipy.optimize import linear_sum_assignment  # slow to import

    likeness = matrix.where(matrix >= RELATED, 0.0) + 1e-3 * torch.eye(*matrix.shape)
    return list(zip(*(x.tolist() for x in linear_sum_assignment(-likeness)), strict=True))


def _sketches(
    model: Reduced, probes: Probes, stream: StreamMap | None = None
) -> Iterator[BlockSketch]:
    for block in map(model.block, model.blocks):
        moved = probes if stream is None else moved_probes(block, stream, probes)
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


@dataclass(frozen=True)
class _Judgement:
    """A verdict, its reason, and the blocks of A it rests on."""

    verdict: Verdict
    reason: str
    blocks: tuple[str, ...] = ()


def _judge(
    A: Reduced,
    B: Reduced,
    fit: StreamFit,
    blocks: Mapping[str, Mapping[str, Part]],
    constants: Sequence[tuple[float, float]],
    matrix: Tensor,
) -> _Judgement:
    """The verdict on two models from the scores of their blocks."""
    span = fit.map.span
    if span is not None and span.shape[1] < FEWEST:
        return _Judgement(
            "unclear",
            f"embeddings and outputs determine {span.shape[1]} of {len(span)} directions of the "
            "stream, too few to compare blocks by",
        )
    if A.blocks != B.blocks:
        return _judge_matrix(A, B, matrix)
    scores = {name: block_score(parts) for name, parts in blocks.items()}
    low, high = min(scores.values(), default=1.0), max(scores.values(), default=0.0)
    parts = [(p.distance, p.noise) for row in blocks.values() for p in row.values()]
    if low >= RELATED and _explained(A, B, fit, [*parts, *constants]):
        return _Judgement(
            CONSISTENT,
            "every part that scores compare agrees up to what the rounding of the files explains; "
            "scores see neither every tensor nor any scale",
            tuple(scores),
        )
    # The lowest score that rounding leaves of a part of an exact disguise.
    ceilings = {n: min((p.ceiling for p in row.values()), default=1.0) for n, row in blocks.items()}
    unreadable = [name for name, ceiling in ceilings.items() if ceiling < READABLE]
    if unreadable:
        return _Judgement(
            "unclear",
            f"in blocks {_listed(unreadable)} rounding leaves parts of even an exact disguise a "
            f"score of {min(ceilings.values()):.2f} only: their matrices have a condition that the "
            "dtype of the files does not carry",
        )
    related = tuple(name for name, score in scores.items() if score >= RELATED)
    if low >= RELATED:
        return _Judgement(
            "derived",
            f"every block scores at least {low:.2f}; of {UNRELATED_PAIRS} pairs of strangers "
            f"trained on the same data none had a block above {HIGHEST_UNRELATED:.2f}",
            related,
        )
    if high <= UNRELATED:
        return _no_blocks(A, B, high)
    if related:
        others = [name for name in scores if name not in related]
        return _Judgement(
            "partly",
            f"blocks {_listed(related)} agree (at least {RELATED}; strangers reach "
            f"{HIGHEST_UNRELATED:.2f}), blocks {_listed(others)} do not",
            related,
        )
    return _Judgement(
        "unclear",
        f"scores between {UNRELATED} and {RELATED} belong to neither relatives nor strangers",
    )


def _judge_matrix(A: Reduced, B: Reduced, matrix: Tensor) -> _Judgement:
    """The verdict on models of different depth, from the best partner of each block."""
    best = {
        name: (B.blocks[int(row.argmax())], float(row.max()))
        for name, row in zip(A.blocks, matrix, strict=True)
    }
    related = {name: partner for name, (partner, score) in best.items() if score >= RELATED}
    if related:
        pairs = ", ".join(f"{a} with {b}" for a, b in related.items())
        return _Judgement("partly", f"the depths differ; blocks agree: {pairs}", tuple(related))
    high = max((score for _, score in best.values()), default=0.0)
    if high <= UNRELATED:
        return _no_blocks(A, B, high)
    return _Judgement("unclear", f"the depths differ, and no block scores above {high:.2f}")


def _no_blocks(A: Reduced, B: Reduced, high: float) -> _Judgement:
    """The verdict on models without related blocks: their embeddings decide."""
    names = [n for n in ("token", "patch", "projection") if n in A.names and n in B.names]
    # In the basis that is best for the embeddings, whatever the outputs are.
    scores = [score for n in names for score in fit_stream(A, B, only=(n,)).scores.values()]
    if scores and max(scores) >= SHARED_EMBEDDINGS:
        return _Judgement(
            "embeddings only",
            f"no block scores above {high:.2f}, but embeddings agree to {max(scores):.2f} "
            "(those of strangers trained on the same data to 0.70 at most)",
        )
    return _Judgement(
        "unrelated",
        f"no block scores above {high:.2f}; of {DERIVED_PAIRS} pairs of trained relatives none had "
        f"a block below {LOWEST_DERIVED:.2f}",
    )


def _listed(names: Sequence[str]) -> str:
    """``0, 1, 4``; long lists shortened."""
    shown = list(names) if len(names) <= 12 else [*names[:10], "…", names[-1]]
    return ", ".join(shown)


def _explained(
    A: Reduced, B: Reduced, fit: StreamFit, measured: Sequence[tuple[float, float]]
) -> bool:
    """Whether rounding explains every distance of blocks (measured, with its noise) and embeddings.

    Outputs do not count: models that differ there may share all the rest.
    """
    if _shapes(A) != _shapes(B):
        return False
    embeddings = [n for n in EMBEDDINGS if n in A.names or n in B.names]
    if any((n in A.names) != (n in B.names) for n in embeddings):
        return False
    if any(A.table_rows(n) != B.table_rows(n) for n in embeddings):
        return False
    tables = [(fit.distances[n], fit.noise[n]) for n in embeddings if n in fit.distances]
    return all(_is_rounding(A, B, distance, noise) for distance, noise in (*measured, *tables))


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
    gated = {b.mlp.gated for m in (A, B) for s in m.description.stacks for b in s.blocks}
    if len(gated) > 1:
        yield "MLPs: those of one model are gated, those of the other are not"


def draw_relation(relation: Relation, out: str | Path, names: tuple[str, str] = ("A", "B")) -> Path:
    """Draw blocks of A against blocks of B as a heat map into ``out`` (png, pdf or svg).

    Args:
        relation: with a matrix, which identical files and streams of different width lack.
        out: the figure to write.
        names: of the two models, for the axes.
    """
    if relation.matrix is None:
        raise SpaceError(f"there is no matrix of blocks to draw: {relation.reason}")
    rows, columns = relation.matrix.shape
    figure = blank_figure(2.2 + 0.3 * columns, 1.6 + 0.3 * rows, SpaceError)
    axes = figure.subplots()
    image = axes.imshow(relation.matrix.numpy(), vmin=0, vmax=1, cmap="viridis")
    axes.set_xticks(range(columns), relation.columns, rotation=90 if columns > 12 else 0)
    axes.set_yticks(range(rows), relation.rows)
    axes.set(xlabel=f"blocks of {names[1]}", ylabel=f"blocks of {names[0]}")
    axes.set_title(relation.verdict, loc="left")
    figure.colorbar(image, ax=axes, label="score (unrelated 0, disguise 1)")
    return save_figure(figure, Path(out), SpaceError)
