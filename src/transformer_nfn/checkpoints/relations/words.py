"""A relation as text (a table by block, the verdict in a sentence) and as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from transformer_nfn.checkpoints.scores.scores import block_score
from transformer_nfn.checkpoints.scores.verdict import NO_DIRECTION

if TYPE_CHECKING:
    from transformer_nfn.checkpoints.relations.relation import Relation


def describe(relation: Relation) -> str:
    """A table by block and part, the verdict in a sentence, and what was not compared."""
    lines = []
    parts = list(dict.fromkeys(p for row in relation.blocks.values() for p in row))
    if parts:
        width = max(5, *(len(name) for name in relation.blocks))
        lines.append("  ".join([f"{'block':{width}}", *(f"{p:>8}" for p in parts), "   score"]))
        for name, row in relation.blocks.items():
            cells = [f"{row[p].score:8.3f}" if p in row else " " * 8 for p in parts]
            lines.append("  ".join([f"{name:{width}}", *cells, f"{block_score(row):8.3f}"]))
    if relation.tables:
        shown = ", ".join(f"{name} {score:.3f}" for name, score in relation.tables.items())
        lines.append(f"tables: {shown}")
    score = "" if relation.score is None else f" (score {relation.score:.3f})"
    lines.append(f"{relation.verdict}{score}: {relation.reason}")
    if relation.proof is not None:
        first, *more = relation.proof.lines()
        lines += more if relation.proof.reason == relation.reason else [first, *more]
    lines += [f"not compared: {text}" for text in relation.not_compared]
    if relation.verdict in ("derived", "partly", "embeddings only"):
        lines.append(NO_DIRECTION)
    return "\n".join(lines)


def as_json(relation: Relation) -> dict[str, Any]:
    """A relation as numbers and words."""
    return {
        "verdict": relation.verdict,
        "same_function": relation.same_function,
        "score": relation.score,
        "reason": relation.reason,
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
            for name, parts in relation.blocks.items()
        },
        "tables": dict(relation.tables),
        "matrix": None if relation.matrix is None else relation.matrix.tolist(),
        "rows": list(relation.rows),
        "columns": list(relation.columns),
        "related_blocks": list(relation.related),
        "not_compared": list(relation.not_compared),
        "direction": "none: scores are symmetric",
        "proof": None if relation.proof is None else relation.proof.as_json(),
    }
