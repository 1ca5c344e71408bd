"""Map from one model's stream to another's, fitted on embeddings, positions and outputs.

Where only orthogonal matrices act, the map is the polar factor of the cross products of all
tables with a free axis (orthogonal Procrustes); where only permutations act, an assignment on the
correlations of their columns. Tokens are compared row by row as far as both have rows. A model of
few tokens (characters, amino acids) has fewer rows than its stream has directions: then the map
is determined on the span of those rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from transformer_nfn.checkpoints.reduced import INPUTS, Piece, Reduced, Table
from transformer_nfn.checkpoints.symmetries import StreamMap
from transformer_nfn.functional.description import StreamGroup
from transformer_nfn.spaces.actions.permutation import assign_signed

ROWS = 4096
"""Rows of a table that are in memory at a time."""
HELD_OUT = 8
"""One row in eight is held out and scored: a map of D² numbers fits anything a little."""
LARGE = 2048
"""From this width on the polar factor of a fit in float32 is taken in float32."""
OPEN = {torch.float64: 1e-9, torch.float32: 1e-6}
"""Singular values of the cross products below this share of the largest are rounding, and their
directions undetermined; by the dtype of the products."""
EMBEDDINGS = INPUTS


def reduced_group(A: Reduced) -> StreamGroup:
    """The group that acts on the stream of a reduced form."""
    if A.description.inputs == "vectors":
        return "none"
    if not A.description.norms_in_residual:
        return "orthogonal"
    return "permutation and sign" if A.description.norm == "layer" else "signed permutation"


@dataclass(frozen=True)
class StreamFit:
    """The best map, and how well each table agrees under it.

    Attributes:
        map: of the first stream to the second.
        tables: that were fitted.
        scores: cosine of each table's held-out rows; 0 for unrelated models. Empty where all rows
            were needed for the fit.
        distances: relative distance of the same rows.
        noise: the distance that the rounding of both files alone is expected to cause.
        rows: number of rows of each table that both models have.
        held_out: whether some rows were held out.
        crosses: sums of cross products ``[D, D]`` of embeddings (True) and of outputs (False).
    """

    map: StreamMap
    tables: tuple[str, ...]
    scores: Mapping[str, float]
    distances: Mapping[str, float]
    noise: Mapping[str, float]
    rows: Mapping[str, int]
    held_out: bool
    crosses: Mapping[bool, Tensor] = field(repr=False)


def fit_stream(
    A: Reduced, B: Reduced, *, hold_out: bool = True, only: Sequence[str] | None = None
) -> StreamFit:
    """Fit the map from A's stream to B's.

    Args:
        A: one model.
        B: the other, of the same width.
        hold_out: score on held-out rows, where enough are left to fit; otherwise all rows are
            fitted and none scored.
        only: the tables to fit; all if not given.
    """
    names = [n for n in A.table_names() if n in B.table_names() and (only is None or n in only)]
    both_tied = all(m.description.tied and "head" not in m.names for m in (A, B))
    if both_tied and "head" in names:
        names.remove("head")  # the tokens once more
    rows = {n: min(m.table_rows(n) for m in (A, B)) for n in names}
    fitted = sum(n - n // HELD_OUT - int(shifted(A, name)) for name, n in rows.items())
    hold_out = hold_out and fitted >= A.description.width - int(A.centred)
    empty = torch.zeros(A.description.width, A.description.width, dtype=torch.float64)
    crosses = {True: empty.clone(), False: empty}
    for name in names:
        cross = _cross(A, B, name, hold_out)
        if cross is not None:
            crosses[name in EMBEDDINGS] += cross
    fit = StreamFit(StreamMap(), tuple(names), {}, {}, {}, rows, hold_out, crosses)
    return _solved(A, B, fit, crosses[True] + crosses[False])


def without_outputs(A: Reduced, B: Reduced, fit: StreamFit) -> StreamFit:
    """The same fit on embeddings alone, from the stored cross products."""
    names = tuple(name for name in fit.tables if name in EMBEDDINGS)
    return _solved(A, B, replace(fit, tables=names), fit.crosses[True])


def _solved(A: Reduced, B: Reduced, fit: StreamFit, cross: Tensor) -> StreamFit:
    solved = solve_stream(cross, reduced_group(A), A.dtype, centred=A.centred)
    scored = {}
    if fit.held_out:
        scored = {n: s for n in fit.tables if (s := _score(A, B, n, solved)) is not None}
    scores, distances, noise = ({name: s[i] for name, s in scored.items()} for i in range(3))
    return replace(fit, map=solved, scores=scores, distances=distances, noise=noise)


def solve_stream(
    cross: Tensor, group: StreamGroup, dtype: torch.dtype, *, centred: bool = False
) -> StreamMap:
    """The map of a group that fits `Σ AᵀB` best.

    Args:
        cross: ``[D, D]`` in float64.
        group: that acts on the stream.
        dtype: precision of the fit; float32 takes half the time where it is large.
        centred: the all-ones direction is projected out of everything, and undetermined.
    """
    if group == "none":
        return StreamMap()
    if group == "orthogonal":
        if centred:
            cross = cross + cross.norm() / len(cross) ** 1.5  # that direction stays as it is
        U, S, Vh = torch.linalg.svd(cross.to(dtype) if len(cross) >= LARGE else cross)
        determined = OPEN[dtype] * S[0] < S
        span = None if bool(determined.all()) else U[:, determined]
        return StreamMap(matrix=U @ Vh, span=span)
    scaled = cross / cross.norm(dim=1, keepdim=True).clamp_min(1e-300)
    scaled = scaled / cross.norm(dim=0, keepdim=True).clamp_min(1e-300)
    fixed = torch.zeros_like(scaled)
    return StreamMap(*assign_signed(scaled, fixed, one_sign=group == "permutation and sign"))


def shifted(model: Reduced, name: str) -> bool:
    """Whether a vector may move between this table and another that is added to it."""
    added = [n for n in ("token", "position", "type") if n in model.names]
    return name in added and len(added) > 1


def common_pieces(a: Table, b: Table) -> Iterator[tuple[int, int]]:
    """Portions of the rows that both tables have."""
    count = min(len(a), len(b))
    for start in range(0, count, ROWS):
        yield start, min(start + ROWS, count)


def _rows(table: Table, start: int, stop: int, hold_out: bool, held: bool) -> Piece:
    rows = table.rows(start, stop)
    if not hold_out:
        return rows
    mask = torch.arange(start, stop) % HELD_OUT == 0
    mask = mask if held else ~mask
    return Piece(rows.value[mask], rows.error[mask])


def _cross(A: Reduced, B: Reduced, name: str, hold_out: bool) -> Tensor | None:
    """`AᵀB` of one table, weighted so that each row counts alike."""
    (a,), (b,) = A.tables((name,)), B.tables((name,))
    D = A.description.width
    cross = torch.zeros(D, D, dtype=torch.float64)
    means = [torch.zeros(D, dtype=torch.float64) for _ in "ab"]
    sizes, count = [0.0, 0.0], 0
    for start, stop in common_pieces(a, b):
        x, y = (_rows(t, start, stop, hold_out, False).value for t in (a, b))
        cross += (x.mT @ y).double()
        for i, z in enumerate((x, y)):
            means[i] += z.sum(0).double()
            sizes[i] += float(z.double().square().sum())
        count += len(x)
    if count == 0 or min(sizes) == 0:
        return None
    if shifted(A, name):
        cross -= torch.outer(means[0], means[1]) / count
        sizes = [s - float(m.square().sum()) / count for s, m in zip(sizes, means, strict=True)]
        if min(sizes) <= 0:
            return None
    cross *= count / (sizes[0] * sizes[1]) ** 0.5
    return cross


def _score(
    A: Reduced, B: Reduced, name: str, stream: StreamMap
) -> tuple[float, float, float] | None:
    """Cosine, relative distance and expected noise of a table's held-out rows."""
    (a,), (b,) = A.tables((name,)), B.tables((name,))
    # Sums over rows of x, y and x − y, and of their squares: a common shift is taken out.
    sums = torch.zeros(3, A.description.width, dtype=torch.float64)
    squares = torch.zeros(3, dtype=torch.float64)
    count, error = 0, 0.0
    for start, stop in common_pieces(a, b):
        pieces = [_rows(t, start, stop, True, True) for t in (a, b)]
        error += sum(float(p.error.sum()) for p in pieces)
        x, y = stream(pieces[0].value).double(), pieces[1].value.double()
        for i, z in enumerate((x, y, x - y)):
            sums[i] += z.sum(0)
            squares[i] += z.square().sum()
        count += len(x)
    if count < 4:
        return None
    if shifted(A, name):
        squares = squares - sums.square().sum(1) / count
    size_x, size_y, difference = (max(float(q), 0.0) for q in squares)
    if min(size_x, size_y) == 0:
        return None
    cosine = (size_x + size_y - difference) / (2 * (size_x * size_y) ** 0.5)
    largest = max(size_x, size_y)
    return cosine, (difference / largest) ** 0.5, (error / largest) ** 0.5
