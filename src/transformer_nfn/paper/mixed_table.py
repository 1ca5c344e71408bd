"""One predictor for networks of unlike sizes: τ on each kind, and on a kind it never learned from.

A training on all kinds fills a column, a training without one kind fills one cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformer_nfn.paper.numbers import PaperTable
from transformer_nfn.prediction.runs import RunError, RunRecord

ALL_KINDS, WITHIN = "all kinds", "within kinds"
WHOLE, INVARIANTS, LEFT_OUT = "whole_network", "invariants", "left_out"
TESTED, TESTED_LEFT_OUT, HELD = "networks", "left_out_networks", "coverage"

MIXED = PaperTable(
    name="mixed",
    title="Kendall’s τ on each kind of a mixed zoo, of one predictor over all of them",
    rows={},
    columns={
        TESTED: "Test networks",
        WHOLE: "Whole network",
        INVARIANTS: "Its invariants alone",
        TESTED_LEFT_OUT: "Networks left out",
        LEFT_OUT: "Whole network, kind left out",
        HELD: "Its intervals hold",
    },
    printed={},
    corner="Kind",
    quantity="tau of a kind",
    note="A kind left out of training is tested on with all its networks, and its intervals are "
    "the widened ones that tnfn predict gives for sizes never seen.",
)


def kinds_to_leave_out(weights: Mapping[str, int], asked: Sequence[str] | None) -> list[str]:
    """The kinds that are left out in turn: those asked for, else small, middling and large.

    Args:
        weights: how many numbers a network of each kind has.
        asked: names of kinds; None for a choice.
    """
    for name in asked or ():
        if name not in weights:
            raise RunError(
                f"there are no networks of the kind '{name}' to leave out, only of "
                f"{', '.join(weights)}"
            )
    if len(weights) < 2:
        raise RunError("a table of kinds needs a mixed zoo of at least two kinds")
    if asked is not None:
        return list(dict.fromkeys(asked))
    by_size = sorted(weights, key=lambda name: weights[name])
    return list(dict.fromkeys([by_size[0], by_size[len(by_size) // 2], by_size[-1]]))


def kind_records(record: RunRecord) -> Iterator[tuple[str, str, RunRecord]]:
    """Row, column, and the record of one kind, as if its networks were all that was tested."""
    table = record.table or {}
    row, column = str(table.get("row")), str(table.get("column"))
    if record.status != "done":
        yield row, column, record
        return
    if column == LEFT_OUT:
        yield row, column, _of_kind(record, record.summary.get(LEFT_OUT, {}).get(row, {}))
        return
    for kind, figures in record.summary.get("kinds", {}).items():
        yield kind, column, _of_kind(record, figures)
    yield ALL_KINDS, column, record
    mean = {"tau": record.summary.get("tau_within")}
    yield WITHIN, column, replace(record, summary=mean)


def is_variant(record: RunRecord) -> bool:
    """Whether a run of the table is not that of the whole model on all kinds."""
    table = record.table or {}
    return table.get("table") == MIXED.name and table.get("column") != WHOLE


def _of_kind(record: RunRecord, figures: Mapping[str, Any]) -> RunRecord:
    selection = {**record.selection, "test": figures.get("networks")}
    return replace(record, summary=dict(figures), selection=selection)
