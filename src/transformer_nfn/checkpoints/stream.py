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

from transformer_nfn.checkpoints.pieces import Piece, Table
from transformer_nfn.checkpoints.reduced import INPUTS, Reduced, ReducedBlock
from transformer_nfn.checkpoints.sketches import Probes
from transformer_nfn.checkpoints.symmetries import StreamMap
from transformer_nfn.functional.description import StreamGroup, Transformer
from transformer_nfn.spaces.actions.permutation import (
    assign_in_groups,
    assign_signed,
    match_rows,
)

ROWS = 4096
"""Rows of a table that are in memory at a time."""
HELD_OUT = 8
"""One row in eight is held out and scored: a map of D² numbers fits anything a little."""
LARGE = 2048
"""From this width on the polar factor of a fit in float32 is taken in float32."""
OPEN = {torch.float64: 1e-9, torch.float32: 1e-6}
"""Singular values of the cross products below this share of the largest are rounding, and their
directions undetermined; by the dtype of the products."""
CLEAR = 10.0
"""Rounding errors that a direction must stand out by to be determined."""
ENOUGH_NEURONS = 8
"""Matched neurons per direction of the stream, after which no further block is read."""
ALIKE = 0.1
"""Relative distance along the determined directions up to which a match counts."""


def reduced_group(model: Transformer) -> StreamGroup:
    """The group that acts on the stream of a reduced form."""
    if model.fixed_stream:
        return "none"
    if not model.norms_in_residual:
        return "orthogonal"
    return "permutation and sign" if model.norm == "layer" else "signed permutation"


@dataclass(frozen=True)
class Agreement:
    """Agreement of a table of two models.

    Attributes:
        score: cosine of the held-out rows; 0 for unrelated models.
        distance: relative distance of the same rows.
        noise: the distance that the rounding of both files alone is expected to cause.
    """

    score: float
    distance: float
    noise: float


@dataclass(frozen=True)
class StreamFit:
    """The best map, and how well each table agrees under it.

    Attributes:
        map: of the first stream to the second.
        tables: that were fitted.
        agreement: of each table; empty where all rows were needed for the fit.
        rows: number of rows of each table that both models have.
        held_out: whether some rows were held out.
        inputs: sum of the cross products ``[D, D]`` of input tables.
    """

    map: StreamMap
    tables: tuple[str, ...]
    agreement: Mapping[str, Agreement]
    rows: Mapping[str, int]
    held_out: bool
    inputs: Tensor = field(repr=False)


def fit_stream(
    A: Reduced, B: Reduced, *, hold_out: bool = True, only: Sequence[str] | None = None
) -> StreamFit:
    """Fit the map from A's stream to B's.

    Args:
        A: one model.
        B: the other; of two different widths the narrower stream is a part of the wider one.
        hold_out: score on held-out rows, where enough are left to fit; otherwise all rows are
            fitted and none scored.
        only: the tables to fit; all if not given.
    """
    names = [n for n in A.table_names() if n in B.table_names() and (only is None or n in only)]
    both_tied = all(m.description.tied and "head" not in m.names for m in (A, B))
    if both_tied and "head" in names:
        names.remove("head")  # the tokens once more
    rows = {n: min(m.table_rows(n) for m in (A, B)) for n in names}
    moving = [name for name in names if A.description.moves(name)]
    fitted = sum(rows[name] - rows[name] // HELD_OUT - int(shifted(A, name)) for name in moving)
    narrow = min(m.description.width for m in (A, B))
    hold_out = hold_out and fitted >= narrow - int(A.centred)
    empty = torch.zeros(A.description.width, B.description.width, dtype=torch.float64)
    inputs, outputs = empty.clone(), empty
    for name in moving:
        cross = _cross(A, B, name, hold_out)
        if cross is not None:
            total = inputs if name in INPUTS else outputs
            total += cross
    fit = StreamFit(StreamMap(), tuple(names), {}, rows, hold_out, inputs)
    return _solved(A, B, fit, inputs + outputs)


def acting(model: Reduced, name: str, stream: StreamMap) -> StreamMap:
    """The map of the stream that a tensor reads or writes; none acts on that of audio."""
    return stream if model.description.moves(name) else StreamMap()


def without_outputs(A: Reduced, B: Reduced, fit: StreamFit) -> StreamFit:
    """The same fit on input tables alone, from their stored cross products."""
    names = tuple(name for name in fit.tables if name in INPUTS)
    return _solved(A, B, replace(fit, tables=names), fit.inputs)


def _solved(A: Reduced, B: Reduced, fit: StreamFit, cross: Tensor) -> StreamFit:
    cut = A.description.width != B.description.width
    group = "orthogonal" if cut else reduced_group(A.description)
    solved = solve_stream(cross, group, A.dtype, centred=A.centred)
    each = {n: _agreement(A, B, n, acting(A, n, solved)) for n in fit.tables if fit.held_out}
    return replace(fit, map=solved, agreement={n: a for n, a in each.items() if a is not None})


def solve_stream(
    cross: Tensor, group: StreamGroup, dtype: torch.dtype, *, centred: bool
) -> StreamMap:
    """The map of a group that fits `Σ AᵀB` best.

    Args:
        cross: ``[D, D]`` in float64; with fewer columns for a part of the stream.
        group: that acts on the stream.
        dtype: precision of the fit; float32 takes half the time where it is large.
        centred: the all-ones direction is projected out of everything, and undetermined.
    """
    if group == "none":
        return StreamMap()
    if group == "orthogonal":
        if centred:
            # That direction stays as it is.
            cross = cross + cross.norm() / cross.numel() ** 0.75
        large = len(cross) >= LARGE
        U, S, Vh = torch.linalg.svd(cross.to(dtype) if large else cross, full_matrices=False)
        determined = OPEN[dtype] * S[0] < S
        whole = bool(determined.all()) and len(S) == len(cross)
        span = None if whole else U[:, determined]
        return StreamMap(matrix=U @ Vh, span=span)
    scaled = cross / cross.norm(dim=1, keepdim=True).clamp_min(1e-300)
    scaled = scaled / cross.norm(dim=0, keepdim=True).clamp_min(1e-300)
    fixed = torch.zeros_like(scaled)
    return StreamMap(*assign_signed(scaled, fixed, one_sign=group == "permutation and sign"))


@dataclass(frozen=True)
class BlockStreams:
    """Maps of the streams of one block; with residuals all three are one map.

    Attributes:
        before: of what its attention reads.
        middle: of what its attention writes and its MLP reads.
        after: of what its MLP writes.
        memory: of what an attention to an encoder reads there.
    """

    before: StreamMap
    middle: StreamMap
    after: StreamMap
    memory: StreamMap = field(default_factory=StreamMap)

    @staticmethod
    def of(block: ReducedBlock, stream: StreamMap) -> BlockStreams:
        """The maps of a block with residuals."""
        own, memory = (
            acting(block.network, f"{block.name}.{n}", stream) for n in ("W_Q", "cross.W_K")
        )
        return BlockStreams(own, own, own, memory)

    def moved(self, probes: Probes) -> Probes:
        """Probes of the attention after its streams were mapped."""
        return Probes(
            self.before(probes.into), self.middle(probes.out), self.memory(probes.into)
        )


def chain_streams(a: ReducedBlock, b: ReducedBlock, before: StreamMap) -> BlockStreams:
    """Fit the streams that two blocks write, given the one that they read.

    Without residuals no embedding fixes these: the products of matched heads and what matched
    neurons read fix the first, what the same neurons write (and a classifier reads) the second.
    Each row counts by its
    rounding error. Directions that nothing stands out in are mapped anyhow.

    Args:
        a: a block of one model. b: of the other, of the same description.
        before: takes the stream that ``a`` reads to that of ``b``.
    """
    features, written, errors = zip(
        *(_heads_written(block, before if block is a else None) for block in (a, b)), strict=True
    )
    cost = torch.stack([torch.cdist(y, x).square() for x, y in zip(*features, strict=True)]).sum(0)
    order, _ = assign_in_groups(-cost, a.description.attention.groups)
    weight = 1 / (errors[0][order] + errors[1]).clamp_min(1e-300)
    cross = torch.einsum("h,hij,hik->jk", weight, written[0][order], written[1])
    by_heads = _solve_weighted(cross)
    matched = _match_neurons(a, b, by_heads)
    cross = cross + matched.cross
    middle = _solve_weighted(cross)
    matched = _match_neurons(a, b, middle)
    (x, e), (y, f) = (_unit_rows(block.writer("W_B")) for block in (a, b))
    x, e = x[matched.order], e[matched.order]
    weight = matched.good / (e + f).clamp_min(1e-300)
    cross = x.mT @ (weight.unsqueeze(-1) * y)
    biases = a.mlp_bias(), b.mlp_bias()
    if biases[0] is not None and biases[1] is not None:
        error = (biases[0].error + biases[1].error).clamp_min(1e-300)
        cross = cross + torch.outer(biases[0].value, biases[1].value) / error
    after = _solve_weighted(cross)
    heads = a.network.classifier, b.network.classifier
    if a.name == a.network.blocks[-1] and heads[0] is not None and heads[1] is not None:
        after = _solve_weighted(cross + _match_neurons(heads[0], heads[1], after).cross)
    return BlockStreams(before, middle, after)


def _solve_weighted(cross: Tensor) -> StreamMap:
    """The orthogonal map that fits best where rows count by their errors; it fixes ones."""
    U, S, Vh = torch.linalg.svd(cross + cross.norm() / len(cross) ** 1.5)
    determined = len(cross) * S > CLEAR**2
    span = None if bool(determined.all()) else U[:, determined]
    return StreamMap(matrix=U @ Vh, span=span)


def _heads_written(
    block: ReducedBlock, before: StreamMap | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Heads of a block: features without a basis of what they write, ``[h, …]`` each, of one size;
    ``W_V W_O [h, D, D]``; and expected squared errors ``[h]`` of a row of that."""
    config = block.description.attention
    share = config.heads // config.groups
    pieces = block.query_key("")
    V, O_rows = block.reader("W_V")[0], block.writer("W_O")
    Q, K, W_V = (
        w if before is None else before.columns(w)
        for w in (pieces["W_Q"].value, pieces["W_K"].value, V.value)
    )
    K, W_V, error = (w.repeat_interleave(share, 0) for w in (K, W_V, V.error))
    written = W_V @ O_rows.value
    features = [
        (x / x.norm().clamp_min(1e-300)).flatten(1) for x in (Q @ K.mT, written @ written.mT)
    ]
    squares = error * O_rows.value.square().sum(-1) + W_V.square().sum(-2) * O_rows.error
    return (features[0], features[1]), written, squares.sum(-1) / written.shape[-2]


@dataclass(frozen=True)
class _Neurons:
    """Neurons of two blocks, matched by what they read.

    Attributes:
        order: neuron of the first that each of the second is, ``[f]``.
        good: whether they agree, ``[f]``.
        cross: ``[D, D]`` of what they read.
    """

    order: Tensor
    good: Tensor
    cross: Tensor


def _match_neurons(a: ReducedBlock, b: ReducedBlock, stream: StreamMap) -> _Neurons:
    """Match neurons along the directions that a map of what they read determines."""
    (x, e), (y, f) = (_neuron_inputs(block) for block in (a, b))
    moved = stream(stream.determined(x[:, :-1]))
    # A bias does not depend on the basis.
    first = torch.cat([moved, x[:, -1:]], 1)
    second = y
    if stream.span is not None:
        image = stream(stream.span.mT.to(y))
        second = torch.cat([y[:, :-1] @ image.mT @ image, y[:, -1:]], 1)
    order = match_rows(second, first).index
    distance = (first[order] - second).norm(dim=1)
    good = distance <= ALIKE * second.norm(dim=1)
    weight = good / (e[order] + f).clamp_min(1e-300)
    return _Neurons(order, good, x[order, :-1].mT @ (weight.unsqueeze(-1) * y[:, :-1]))


def _neuron_inputs(block: ReducedBlock) -> tuple[Tensor, Tensor]:
    """Input weights and bias of each neuron as unit vectors ``[f, D + 1]``, and their errors.

    For gated neurons those of the gate, on which no scale acts.
    """
    mlp, rows, errors = block.description.mlp, [], []
    for prefix in mlp.prefixes:
        weight, bias = block.reader(prefix + ("W_G" if mlp.gated else "W_A"))
        zero = weight.value.new_zeros(weight.value.shape[1])
        value, error = (zero, zero) if bias is None else (bias.value, bias.error)
        rows.append(torch.cat([weight.value.mT, value.unsqueeze(1)], 1))
        errors.append(weight.error + error)
    return _unit_rows(Piece(torch.cat(rows), torch.cat(errors)))


def _unit_rows(piece: Piece) -> tuple[Tensor, Tensor]:
    """Rows of length one, and their expected squared errors."""
    length: Tensor = torch.linalg.vector_norm(piece.value, dim=1).clamp_min(1e-150)
    return piece.value / length.unsqueeze(1), piece.error / length.square()


def refine_stream(a: Reduced, b: Reduced, stream: StreamMap) -> StreamMap:
    """Complete a map of the stream by what neurons read, where tables leave directions open.

    Neurons are matched by what they read along the directions that the tables determine; what
    matched neurons read along all directions is one more table, with a row for each of them.

    Args:
        a: one model. b: the other, of the same description.
        stream: returned unchanged if all directions are determined.
    """
    if stream.span is None or stream.matrix is None:
        return stream
    basis = stream.span.double()
    determined = basis @ (stream.matrix.double().mT @ basis).mT
    cross, count = torch.zeros_like(determined), 0
    for name in a.blocks:
        if not a.description.moves(f"{name}.W_A"):
            continue
        matched = _match_neurons(a.block(name), b.block(name), stream)
        cross += matched.cross
        count += int(matched.good.sum())
        if count >= ENOUGH_NEURONS * len(determined):
            break
    cross += cross.norm() / determined.norm() * determined
    return solve_stream(cross, reduced_group(a.description), torch.float64, centred=a.centred)


def shifted(model: Reduced, name: str) -> bool:
    """Whether a vector may move between this table and another that is added to it."""
    first, last = model.description.added
    return bool(first) and name in (*first, *last)


def common_pieces(a: Table, b: Table) -> Iterator[tuple[int, int]]:
    """Portions of the rows that both tables have."""
    count = min(len(a), len(b))
    for start in range(0, count, ROWS):
        yield start, min(start + ROWS, count)


def _rows(table: Table, start: int, stop: int, held: bool | None) -> Piece:
    """Rows that are held out, those that are not, or (None) all of them."""
    rows = table.rows(start, stop)
    if held is None:
        return rows
    mask = torch.arange(start, stop) % HELD_OUT == 0
    return rows[mask if held else ~mask]


def _cross(A: Reduced, B: Reduced, name: str, hold_out: bool) -> Tensor | None:
    """`AᵀB` of one table, weighted so that each row counts alike."""
    a, b = A.table(name), B.table(name)
    widths = [m.description.width for m in (A, B)]
    cross = torch.zeros(*widths, dtype=torch.float64)
    means = [torch.zeros(D, dtype=torch.float64) for D in widths]
    sizes, count = [0.0, 0.0], 0
    for start, stop in common_pieces(a, b):
        x, y = (_rows(t, start, stop, False if hold_out else None).value for t in (a, b))
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


def _agreement(A: Reduced, B: Reduced, name: str, stream: StreamMap) -> Agreement | None:
    """Agreement of a table's held-out rows; None where there are too few, or zeros."""
    a, b = A.table(name), B.table(name)
    # Sums over rows of x, y and x − y, and of their squares: a common shift is taken out.
    sums = torch.zeros(3, B.description.width, dtype=torch.float64)
    squares = torch.zeros(3, dtype=torch.float64)
    count, error = 0, 0.0
    for start, stop in common_pieces(a, b):
        pieces = [_rows(t, start, stop, True) for t in (a, b)]
        error += sum(float(p.error.sum()) for p in pieces)
        x, y = stream(pieces[0].value).double(), pieces[1].value.double()
        if stream.matrix is not None and len(stream.matrix) < y.shape[1]:
            part = stream.matrix.double()
            y = y @ part.mT @ part  # what the narrower stream has of the wider one
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
    return Agreement(cosine, (difference / largest) ** 0.5, (error / largest) ** 0.5)
