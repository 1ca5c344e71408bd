"""Relation of two checkpoints: its verdict, scores and proof as text, JSON and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_nfn.checkpoints.calibration import CalibratedTest
from transformer_nfn.checkpoints.conversion import Conversion
from transformer_nfn.checkpoints.edits import Edit, describe_edits
from transformer_nfn.checkpoints.evidence import ExactTest
from transformer_nfn.checkpoints.proof import Proof
from transformer_nfn.checkpoints.relations.verdicts import RELATED, Verdict
from transformer_nfn.checkpoints.sketches import Part, block_score
from transformer_nfn.checkpoints.survivors import BlockUnits
from transformer_nfn.errors import SpaceError
from transformer_nfn.io.files import blank_figure, save_figure
from transformer_nfn.notebook import to_html

SAME_BLOCK = 0.98
"""Share of the best score from which on a block counts as the one in the same place."""
LEVEL = 0.05
"""p-value up to which a test counts as rejecting."""
IN_ORDER = (
    "the tests disagree: units with the same index are alike, as from one initialisation, which "
    "only the exact test sees; the score is no higher than that of strangers"
)
OUT_OF_ORDER = (
    "the tests disagree: units with the same index are not alike, as in a disguise that permutes "
    "them, which defeats the exact test; the score does not depend on their order"
)
NO_DIRECTION = (
    "Scores are symmetric: they do not show which model came first, or whether both came from a "
    "third."
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
        edits: tensors that differ as the files lie, where no basis was changed throughout.

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
    edits: tuple[Edit, ...] = ()

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
        head, rows = self._scores()
        if rows:
            width = max(5, *(len(name) for name in self.blocks))
            for name, cells in {head[0]: head[1:], **rows}.items():
                lines.append("  ".join([f"{name:{width}}", *(f"{cell:>8}" for cell in cells)]))
        if self.tables:
            lines.append(f"tables: {self._table_scores()}")
        lines.append(f"{self._title()}: {self.reason}")
        if self.proof is not None:
            first, *more = self.proof.lines()
            lines += more if self.proof.reason == self.reason else [first, *more]
        if self.edits and (text := describe_edits(self.edits)) not in self.reason:
            lines.append(f"as the files lie: {text}")
        lines += [str(test) for test in self._tests().values()]
        lines += [] if self.disagreement is None else [self.disagreement]
        lines += [f"not compared: {text}" for text in self.not_compared]
        lines += [str(unit) for unit in self.units]
        if self.verdict in ("derived", "partly", "embeddings only"):
            lines.append(NO_DIRECTION)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        facts: dict[str, object] = {
            "reason": self.reason,
            "tables": self._table_scores(),
            **self._tests(),
            "the tests": self.disagreement,
            "not compared": "; ".join(self.not_compared),
        }
        facts = {name: text for name, text in facts.items() if text}
        head, rows = self._scores()
        return to_html(self._title(), facts) + (to_html("", rows, head) if rows else "")

    def _tests(self) -> dict[str, ExactTest | CalibratedTest]:
        """Tests by name; none beside *same*: a proof leaves no doubt that a p-value could state."""
        tests = {"exact test": self.exact, "calibrated test": self.calibrated}
        known = {name: test for name, test in tests.items() if test is not None}
        return {} if self.verdict == "same" else known

    @property
    def disagreement(self) -> str | None:
        """Why only one of the two tests rejects independent training; None where they agree."""
        if self.exact is None or self.calibrated is None or not self._tests():
            return None
        exact, calibrated = (10**self.exact.total.log10_p <= LEVEL, self.calibrated.p <= LEVEL)
        if exact == calibrated:
            return None
        return IN_ORDER if exact else OUT_OF_ORDER

    def _title(self) -> str:
        return self.verdict if self.score is None else f"{self.verdict} (score {self.score:.3f})"

    def _scores(self) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """Scores of the parts of each block, as text: the head of the table, and its rows."""
        parts = list(dict.fromkeys(part for row in self.blocks.values() for part in row))
        rows = {
            name: (*(f"{row[p].score:.3f}" if p in row else "" for p in parts),
                   f"{block_score(row):.3f}")
            for name, row in self.blocks.items()
            if parts
        }  # fmt: skip
        return ("block", *parts, "score"), rows

    def _table_scores(self) -> str:
        return ", ".join(f"{name} {score:.3f}" for name, score in self.tables.items())

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
            "edits": [edit.as_json() for edit in self.edits],
        }


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
