"""Checks of embeddings, positions and outputs of two models under a map of the stream.

Tokens, positions and types are added to each other, so a vector may move between them: all but
one take the shift that fits them best, and the last one has to make up for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from transformer_nfn.checkpoints.proof.checks import Check, check
from transformer_nfn.checkpoints.proof.outputs import Outputs
from transformer_nfn.checkpoints.reduced import Piece, Reduced, Table
from transformer_nfn.checkpoints.stream import EMBEDDINGS, StreamMap, common_pieces
from transformer_nfn.functional.description import KEPT
from transformer_nfn.spaces.actions.permutation import match_rows

ADDED = ("token", "type", "position")


def table_shifts(A: Reduced, B: Reduced, stream: StreamMap) -> dict[str, Piece]:
    """What is added to each table on the way from A to B; the shifts add up to nothing.

    A shift has the rounding error of the means that it comes from: a row of zeros has none.
    """
    names = [n for n in ADDED if n in A.names and n in B.names]
    if len(names) < 2:
        return {}
    shifts: dict[str, Piece] = {}
    for name in names[:-1]:
        a, b = (_mean(next(iter(side.tables((name,))))) for side in (A, B))
        shifts[name] = Piece(b.value - stream(a.value), a.error + b.error)
    taken = list(shifts.values())
    total = torch.stack([shift.value for shift in taken]).sum(0)
    shifts[names[-1]] = Piece(-total, torch.stack([shift.error for shift in taken]).sum())
    return shifts


def _mean(table: Table) -> Piece:
    sums = []
    for start, stop in common_pieces(table, table):
        rows = table.rows(start, stop)
        sums.append((rows.value.sum(0), rows.error.sum()))
    value, error = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return Piece(value / len(table), error / len(table) ** 2)


def check_ends(
    A: Reduced, B: Reduced, stream: StreamMap, shifts: Mapping[str, Piece], outputs: Outputs
) -> Iterator[Check]:
    """Every table and vector outside the blocks that both models have."""
    for name in A.table_names():
        if name not in EMBEDDINGS and name not in outputs.common:
            continue
        (a,), (b,) = A.tables((name,)), B.tables((name,))
        yield from check_table(a, b, stream, shifts.get(name))
    final, other_final = A.output(), B.output()
    if final is not None and other_final is not None:
        yield from check_table(final, other_final, stream, None)
    theirs = B.vectors()
    for name, piece in A.vectors().items():
        moved = piece.value if stream.index is None else piece.value[stream.index]
        other = theirs[name]
        away, size = (moved - other.value).square().sum(), other.value.square().sum()
        yield check(name, away, piece.error + other.error, size, 1, sites=False)
    if {"head", "extra.mlm"} <= outputs.common:
        yield from _masked_head(A, B, stream)
    yield from _kept(A, B, outputs)


def check_table(
    a: Table, b: Table, stream: StreamMap, shift: Piece | None, order: Tensor | None = None
) -> Iterator[Check]:
    """Row by row; ``order`` instead of a map of the stream where other axes are permuted."""
    found: dict[str, list[Tensor]] = {"away": [], "error": [], "size": []}
    biases: dict[str, list[Tensor]] = {"away": [], "error": [], "size": []}
    entries = 0
    for start, stop in common_pieces(a, b):
        x, y = a.rows(start, stop), b.rows(start, stop)
        moved = stream(x.value) if order is None else x.value[:, order]
        error = x.error + y.error
        if shift is not None:
            moved, error = moved + shift.value, error + shift.error
        entries = moved.shape[1]
        away = (moved - y.value).square().sum(1)
        _note(found, away, error, y.value.square().sum(1))
        p, q = a.biases(start, stop), b.biases(start, stop)
        if p is not None or q is not None:
            zero = Piece(torch.zeros_like(away), torch.zeros_like(away))
            p, q = p or zero, q or zero
            size = torch.maximum(p.value.square(), q.value.square())
            _note(biases, (p.value - q.value).square(), p.error + q.error, size)
    joined = {k: torch.cat(v) for k, v in found.items()}
    yield check(a.name, joined["away"], joined["error"], joined["size"], entries)
    if biases["away"]:
        joined = {k: torch.cat(v) for k, v in biases.items()}
        name = "head_bias" if a.name == "head" else f"{a.name}.b"
        yield check(name, joined["away"], joined["error"], joined["size"], 1)


def _note(found: dict[str, list[Tensor]], away: Tensor, error: Tensor, size: Tensor) -> None:
    found["away"].append(away)
    found["error"].append(error)
    found["size"].append(size)


def _masked_head(A: Reduced, B: Reduced, stream: StreamMap) -> Iterator[Check]:
    """BERT's head: hidden units in any order, read by the output matrix."""
    a, b = A.masked_head(), B.masked_head()
    if a is None or b is None:
        return
    (W, c, table), (V, d, other) = a, b
    moved = stream.columns(W.value)
    order = match_rows(
        torch.cat([V.value, d.value.unsqueeze(0)]).mT, torch.cat([moved, c.value.unsqueeze(0)]).mT
    ).index
    away = (moved[:, order] - V.value).square().sum(0)
    error = W.error[order] + V.error
    yield check("extra.mlm.W", away, error, V.value.square().sum(0), len(moved))
    away, size = (c.value[order] - d.value).square(), d.value.square()
    yield check("extra.mlm.b", away, c.error[order] + d.error, size, 1)
    yield from check_table(table, other, stream, None, order)


def _kept(A: Reduced, B: Reduced, outputs: Outputs) -> Iterator[Check]:
    """Tensors that nothing acts on."""
    for name in A.names:
        if not name.startswith(KEPT) or (name not in outputs.common and name not in B.names):
            continue
        x, y = (m.model[name].to(m.dtype) for m in (A, B))
        error = A.unit * x.square() + B.unit * y.square()
        yield check(name, (x - y).square(), error, y.square(), 1)
