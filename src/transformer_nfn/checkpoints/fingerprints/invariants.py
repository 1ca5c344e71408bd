"""Invariant numbers of a checkpoint, scale included, from which its fingerprint is made.

Frame. Whatever acts on the stream acts on the embedding of every token alike, so a sum of
embeddings with fixed signs moves with the stream, `Σ ±(t R) = (Σ ±t) R`: it is the same direction
in each disguise of a model, and nearly the same in models made from it. A few strong directions
would dominate such sums; the polar factor of all of them weighs every direction alike.

Blocks. With z and y two vectors of the frame, the numbers are sums over all heads and neurons of
what no change of basis inside a head can change: `q(z)·k(y)` without biases, under rotary positions
at several distances (QK); `z V O y` (VO); `MLP(z)·y`, activation included. Heads that share keys
and values may exchange their queries, which neither sum shows: products of the two numbers of a
head, summed over heads, do (`HEADS`). Biases, gains that stay in a residual, T5's table of position
biases and ESM's contact head have rows of their own (`CONSTANTS`): a change of one must not drown
in the matrices. Sizes are norms of `W_Q W_Kᵀ`, `W_V W_O` and neurons.

Ends. Each table (tokens, positions, outputs, pooler) is summed over all its rows with fixed signs,
and the sums are read by the frame. Vectors may move between tables that are added to each other, so
their means count as one sum. The final norm is folded into the tables that read it; tensors that
nothing acts on are projected as they are.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.checkpoints.families import Model
from transformer_nfn.checkpoints.fingerprints.fingerprint import (
    CONSTANT_NUMBERS,
    END_NUMBERS,
    ENDS,
    HEAD_NUMBERS,
    PART_NUMBERS,
    PARTS,
    QUANTILES,
    STEPS,
    Fingerprint,
    stored_rows,
)
from transformer_nfn.checkpoints.pieces import Piece, Table
from transformer_nfn.checkpoints.reduced import Reduced, ReducedBlock
from transformer_nfn.checkpoints.sketches import OFFSETS, normed_heads, read_heads, turned
from transformer_nfn.checkpoints.stream import ROWS, shifted
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.description import KEPT, POSITIONS, Attention, Transformer
from transformer_nfn.functional.transformer import activation
from transformer_nfn.symmetry.sources import directions, sketch

VECTORS = 256
"""Vectors of a frame."""
RIDGE = 0.1
"""Directions weaker than this share of the mean one are not brought up to its strength: they are
as much rounding as embedding."""
QUIET = 0.1
"""Heads with norms below this share of the largest are not scaled up to the others."""
DEAD = 1e-6
"""Sizes below this share of the largest count as this."""


def take_fingerprint(
    model: Model, progress: Callable[[str], None] | None = None
) -> Fingerprint:
    """Take the fingerprint of an open checkpoint, one block in memory at a time.

    No symmetry of its family changes it (beyond rounding), and a small change of the weights is a
    small change of it.

    Args:
        progress: called with the name of each finished block.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> with open_model(write_example_checkpoint("model")) as model:
    ...     fingerprint = take_fingerprint(model)
    >>> fingerprint.family, fingerprint.depth, fingerprint.sketch.shape
    ('llama', 2, (8, 3, 64))
    """
    # In a precision beyond that of the file, so that storing it is the only rounding.
    half = model.dtype in (torch.float16, torch.bfloat16)
    reduced = Reduced(model, torch.float32 if half else torch.float64)
    if not reduced.blocks:
        raise SpaceError(f"'{model.where}' has no blocks to take a fingerprint of")
    frame = last = _draw_frame(reduced)
    audio = frame if reduced.description.moves("encoder.W_Q") else _fixed_frame(reduced)
    parts, constants, heads, sizes = [], [], [], []
    for name in reduced.blocks:
        block = reduced.block(name)
        stays = not reduced.description.moves(f"{name}.W_Q")
        frames = (audio, audio, audio) if stays else _frames(block, last)
        part_rows, constant_rows, head_row = _block_rows(block, *frames, audio)
        last = last if stays else frames[-1]
        parts.append(part_rows)
        constants.append(constant_rows)
        heads.append(head_row)
        sizes.append(_block_sizes(block))
        if progress is not None:
            progress(name)
    depth = len(reduced.blocks)
    steps = [_shares(step, depth) for step in range(STEPS)]
    by_part, by_constant = ([*zip(*rows, strict=True)] for rows in (parts, constants))
    arrays = [
        _arrays([[_part(rows, step) for rows in by_part] for step in steps]),
        _arrays([[_mean(rows, step) for rows in by_constant] for step in steps]),
        _arrays([_end_rows(reduced, frame, last, audio)]),
        _arrays([[_mean(heads, step)] for step in steps]),
    ]
    step_sizes = torch.zeros(STEPS, len(PARTS), len(QUANTILES), dtype=torch.float64)
    for i, step in enumerate(steps):
        for at, share in step:
            step_sizes[i] += share * sizes[at]
    if not all(bool(torch.isfinite(x).all()) for pair in arrays for x in pair):
        raise SpaceError(f"'{model.where}' has weights so large that their products overflow")
    values = [stored_rows(pair[0].numpy()) for pair in arrays]
    noise = [pair[1].float().numpy() for pair in arrays]
    return Fingerprint(
        model.description.family,
        model.description.width,
        depth,
        sum(math.prod(shape) for shape in model.names.values()),
        frame.table,
        frame.rows,
        _settings(model.description),
        values[0],
        values[1],
        values[2][0],
        values[3],
        noise[0],
        noise[1],
        noise[2][0],
        noise[3],
        step_sizes.half().numpy(),
    )


def _settings(description: Transformer) -> bytes:
    """Digest of whatever decides the function and neither rows nor sizes of tensors show."""
    sizes: dict[str, Any] = {"heads": 0, "groups": 0, "d_k": 0, "d_v": 0}
    settings = description.settings()
    for name, block in description.blocks.items():
        plain = block.without_scales()
        cross = None if plain.cross is None else replace(plain.cross, **sizes)
        attention, mlp = replace(plain.attention, **sizes), replace(plain.mlp, neurons=0)
        settings[name] = replace(plain, attention=attention, cross=cross, mlp=mlp)
    return hashlib.blake2b(repr(settings).encode(), digest_size=8).digest()



def _shares(step: int, depth: int) -> list[tuple[int, float]]:
    """Blocks of a step of depth, each with its share; the shares sum to one."""
    start, stop = step * depth / STEPS, (step + 1) * depth / STEPS
    overlaps = ((block, min(stop, block + 1) - max(start, block)) for block in range(depth))
    return [(block, overlap * STEPS / depth) for block, overlap in overlaps if overlap > 0]


@dataclass(frozen=True)
class _Row:
    """Invariant numbers of one part of a model, with its scale.

    Attributes:
        values: ``[n]`` in float64.
        error: expected square of the length of their rounding error.
    """

    values: Tensor
    error: float

    @staticmethod
    def zeros(count: int) -> _Row:
        """The row of a part that a model does not have."""
        return _Row(torch.zeros(count, dtype=torch.float64), 0.0)

    @property
    def length(self) -> float:
        return float(torch.linalg.vector_norm(self.values))

    def folded(self, count: int) -> _Row:
        """Sums of every ``count``-th number, ``[count]``."""
        return _Row(self.values.reshape(-1, count).sum(0), self.error)

    def moved(self, share: float) -> _Row:
        """The row with a further relative error, ``share`` its expected square."""
        return _Row(self.values, self.error + share * self.length**2)

    def times(self, factor: float) -> _Row:
        return _Row(self.values * factor, self.error * factor**2)


def _added(rows: Iterable[_Row], count: int) -> _Row:
    """The sum of rows of ``count`` numbers, whose errors are independent."""
    total = _Row.zeros(count)
    for row in rows:
        total = _Row(total.values + row.values, total.error + row.error)
    return total


def _part(rows: Sequence[_Row], step: Sequence[tuple[int, float]]) -> _Row:
    """A part at a step of depth: blocks have equal weight, and the scale is the mean of theirs."""
    units = (rows[i].times(share / max(rows[i].length, 1e-100)) for i, share in step)
    return _added(units, PART_NUMBERS).times(sum(share * rows[i].length for i, share in step))


def _mean(rows: Sequence[_Row], step: Sequence[tuple[int, float]]) -> _Row:
    """A row at a step of depth, the mean over its blocks."""
    return _added((rows[i].times(share) for i, share in step), len(rows[0].values))


def _products(left: Tensor, right: Tensor, left_error: Tensor, right_error: Tensor) -> _Row:
    """``[n]`` scalar products of rows ``[n, k]``; errors are expected squares that broadcast."""
    error = (right.square() * left_error).sum() + (left.square() * right_error).sum()
    return _Row((left * right).sum(-1).double(), float(error))


def _arrays(rows: Sequence[Sequence[_Row]]) -> tuple[Tensor, Tensor]:
    """Numbers ``[a, b, n]`` of rows, and the expected lengths of their errors ``[a, b]``."""
    values = torch.stack([torch.stack([row.values for row in line]) for line in rows])
    return values, torch.tensor([[row.error for row in line] for line in rows]).double().sqrt()


@dataclass(frozen=True)
class _Frame:
    """Vectors of one model's stream that all its disguises share.

    Attributes:
        vectors: ``[VECTORS, D]``, each of the length √D that a norm gives.
        table: the table they are sums of, ``token``, ``patch`` or ``head``; ``fixed`` where nothing
            acts on the stream.
        rows: of that table that were summed.
        error: expected square of the relative rounding error of a vector.
    """

    vectors: Tensor
    table: str
    rows: int
    error: float


def rows_used(count: int) -> int:
    """The first 2ⁿ or 3·2ⁿ rows: a vocabulary that grew by a few tokens keeps its frame.

    >>> rows_used(50257), rows_used(50304)
    (49152, 49152)
    """
    power: int = 1 << (count.bit_length() - 1)
    return power + power // 2 if count >= power + power // 2 else power


def _draw_frame(model: Reduced) -> _Frame:
    tables = model.table_names()
    name = next((n for n in ("token", "patch", "projection", "head") if n in tables), None)
    D = model.description.width
    if name is None or model.description.inputs == "vectors":
        return _fixed_frame(model)
    table = model.table(name)
    used = rows_used(len(table))
    sums = torch.zeros(VECTORS, D, dtype=torch.float64)
    mean, signs_sum = torch.zeros(D, dtype=torch.float64), torch.zeros(VECTORS, dtype=torch.float64)
    error = 0.0
    for start in range(0, used, ROWS):
        rows = table.rows(start, min(start + ROWS, used))
        signs = _signs("rows", start, len(rows.value), VECTORS).to(rows.value)
        sums += (signs @ rows.value).double()
        mean += rows.value.sum(0).double() / used
        signs_sum += signs.sum(1).double()
        error += float(rows.error.sum())
    if not bool(torch.isfinite(sums).all()):
        raise SpaceError(f"'{model.model.where}': '{name}' has numbers whose sums overflow")
    if shifted(model, name):  # a vector may move between the rows and what is added to them
        sums -= torch.outer(signs_sum, mean)
    even, relative_error = _even(sums, error)
    return _Frame(_as_after_norm(even, model), name, used, relative_error)


def _fixed_frame(model: Reduced) -> _Frame:
    """Vectors of a stream that nothing acts on."""
    like = torch.zeros(0, dtype=torch.float64)
    fixed = directions("print fixed", VECTORS, model.description.width, like)
    return _Frame(_as_after_norm(fixed, model), "fixed", 0, 0.0)


def _signs(key: str, start: int, count: int, rows: int) -> Tensor:
    """Signs of the rows of a table, ``[rows, count]``; those of a row whatever comes after it.

    Args:
        start: first of the rows; a multiple of ``ROWS``.
        rows: number of signs of each; a multiple of 8.
    """
    state = np.random.RandomState(zlib.crc32(f"print {key} {start}".encode()))
    bits = np.frombuffer(state.bytes(rows // 8 * ROWS), dtype=np.uint8).reshape(ROWS, -1)
    return torch.as_tensor(np.unpackbits(bits[:count], axis=1).T.copy()).float() * 2 - 1


def _even(sums: Tensor, error: float) -> tuple[Tensor, float]:
    """The polar factor of ``sums [VECTORS, D]``, weak directions left weak, and its expected
    relative square error; ``error`` is the expected squared rounding error of one sum."""
    U, S, Vh = torch.linalg.svd(sums, full_matrices=False)
    size = S.square().mean().clamp_min(1e-300)
    damped = S.square() + RIDGE**2 * size
    even: Tensor = U * (S / damped.sqrt()) @ Vh
    noise = error * len(sums) / sums.shape[1] * (1 / damped).sum()
    return even, float(noise / (S.square() / damped).sum().clamp_min(1e-300))


def _as_after_norm(vectors: Tensor, model: Reduced) -> Tensor:
    # The first block of a post-norm network may read the mean of the embeddings.
    if model.description.hides_mean_of_embeddings:
        vectors = vectors - vectors.mean(-1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(1e-300)
    scaled: Tensor = vectors * model.description.width**0.5 / length
    return scaled.to(model.dtype)


@dataclass(frozen=True)
class _Heads:
    """Numbers of the heads of one attention: ``values [h, n]``, and expected squared errors."""

    values: Tensor
    errors: Tensor

    def evened(self) -> _Row:
        """Sum over heads with their norms evened out; the total scale stays."""
        size: Tensor = torch.linalg.vector_norm(self.values.double(), dim=1, keepdim=True)
        weight = size.square().mean().sqrt() / (size + QUIET * size.max()).clamp_min(1e-300)
        error = (weight.square() * self.errors).sum()
        return _Row((weight * self.values).sum(0), float(error))


def _frames(block: ReducedBlock, frame: _Frame) -> tuple[_Frame, _Frame, _Frame]:
    """Frames of what attention reads, of what it writes and the MLP reads, and of what that writes.

    Without a residual the block itself carries the frame of one stream to the next.
    """
    if block.description.order != "chain":
        return frame, frame, frame
    z = frame.vectors
    W_V, W_O = block.reader("W_V")[0], block.writer("W_O")
    share = len(W_O.value) // len(W_V.value)
    v = read_heads(z, W_V.value).repeat_interleave(share, dim=0)
    v_error = W_V.error.unsqueeze(-2).repeat_interleave(share, dim=0)
    written = torch.einsum("hnd,hde->ne", v, W_O.value)
    error = v_error * W_O.value.square().sum(-1).unsqueeze(-2) * len(z)
    error = error.sum() + (v.square() * W_O.error.unsqueeze(-2)).sum()
    middle = _carried(frame, written, float(error))
    hidden, noise = _hidden(block, "", middle.vectors)
    writer, bias = block.writer("W_B"), block.mlp_bias()
    written = hidden @ writer.value
    error = (noise * writer.value.square().sum(-1)).sum() * len(z)
    error = error + (hidden.square() * writer.error).sum()
    if bias is not None:
        written, error = written + bias.value, error + bias.error * len(z)
    return frame, middle, _carried(middle, written, float(error))


def _carried(frame: _Frame, written: Tensor, error: float) -> _Frame:
    """The frame of a stream, from what is written to it for the vectors of another.

    Args:
        frame: the other.
        written: ``[VECTORS, D]``.
        error: expected square of the rounding error of all of it.
    """
    even, relative = _even(written.double(), error / len(written))
    even = even - even.mean(-1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(even, dim=-1, keepdim=True).clamp_min(1e-300)
    vectors = (even * even.shape[-1] ** 0.5 / length).to(written.dtype)
    # What was wrong before passes through as the frame does.
    return _Frame(vectors, frame.table, frame.rows, min(frame.error + relative, 1.0))


def _block_rows(
    block: ReducedBlock, frame: _Frame, middle: _Frame, after: _Frame, encoder: _Frame
) -> tuple[list[_Row], list[_Row], _Row]:
    """Rows of one block, as in `PARTS`, as in `CONSTANTS` and as in `HEADS`.

    Args:
        encoder: frame of the output of an encoder, which another attention reads.
    """
    z = frame.vectors
    y, out, end = (f.vectors.roll(len(z) // 2, 0) for f in (frame, middle, after))
    QK, VO, both, biases, written = [], [], [], [], []
    for prefix, attention in block.attentions():
        read = encoder.vectors if prefix else z
        keyed = read.roll(len(z) // 2, 0) if prefix else y
        scores, constant = _scores(block, prefix, attention, z, keyed)
        QK.append(scores.evened())
        biases.append(constant)
        table = None if prefix else block.bias_table()
        if table is not None:
            biases.append(_position_bias(scores, table))
        contact = None if prefix else block.contact()
        if contact is not None:
            column = (x.double().unsqueeze(-1) for x in (contact.value, contact.error))
            biases.append(_head_products(scores, _Heads(*column)))
        outputs = _value_output(block, prefix, attention, read, out)
        VO.append(outputs.evened())
        both.append(_head_products(scores, outputs))
        bias = block.output_bias(prefix)
        if bias is not None:
            written.append(_vector(bias, middle.vectors if not prefix else out))
    MLP, neurons = _mlp(block, middle.vectors, end)
    bias = block.mlp_bias()
    constants = (
        _added(biases, len(z)),
        _added(written, len(z)),
        neurons,
        _Row.zeros(len(z)) if bias is None else _vector(bias, after.vectors),
        _added(_gains(block.norms(), z), len(z)),
    )
    parts = (_added(QK, len(z)), _added(VO, len(z)), MLP)
    error = 2 * max(frame.error, middle.error, after.error)
    return (
        [row.moved(error).folded(PART_NUMBERS) for row in parts],
        [row.moved(error).folded(CONSTANT_NUMBERS) for row in constants],
        _added(both, len(z)).moved(2 * error).folded(HEAD_NUMBERS),
    )


def _scores(
    block: ReducedBlock, prefix: str, attention: Attention, z: Tensor, y: Tensor
) -> tuple[_Heads, _Row]:
    """``q(z)·k(y)`` of every head without biases, and what biases add, summed over heads."""
    pieces = block.query_key(prefix)
    share = attention.heads // attention.groups
    q, k = read_heads(z, pieces["W_Q"].value), read_heads(y, pieces["W_K"].value)
    q_error, k_error = (pieces[f"W_{p}"].error.unsqueeze(-2) for p in "QK")  # [h, 1, d]
    zero = torch.zeros_like(q_error), torch.zeros_like(k_error)
    (b_Q, b_Q_error), (b_K, b_K_error) = (
        (pieces[name].value.unsqueeze(-2), pieces[name].error.unsqueeze(-2))
        if (name := f"b_{p}") in pieces
        else (none, none)
        for p, none in zip("QK", zero, strict=True)
    )
    if attention.qk_norm:  # which biases pass through as well
        q, q_error = normed_heads(q + b_Q, q_error + b_Q_error, pieces["q_norm.g"], attention)
        k, k_error = normed_heads(k + b_K, k_error + b_K_error, pieces["k_norm.g"], attention)
        b_Q, b_Q_error, b_K, b_K_error = (torch.zeros_like(x[:, :1]) for x in (q, q, k, k))
    k, k_error, b_K, b_K_error = (
        x.repeat_interleave(share, dim=0) for x in (k, k_error, b_K, b_K_error)
    )
    offsets = OFFSETS if attention.rotary else OFFSETS[:1]
    values = torch.empty(q.shape[:2], dtype=torch.float64)
    constants, error = torch.empty(len(z), dtype=torch.float64), 0.0
    for i, offset in enumerate(offsets):
        at = slice(i, None, len(offsets))
        q_at, b_at = (turned(x, attention, offset) for x in (q[:, at], b_Q))
        k_at = k[:, at]
        values[:, at] = (q_at * k_at).sum(-1).double()
        constants[at] = (b_at * (k_at + b_K) + q_at * b_K).sum((0, -1)).double()
        error += float(
            ((k_at + b_K).square() * b_Q_error).sum()
            + (q_at.square() * b_K_error).sum()
            + (b_at.square() * k_error + b_K.square() * q_error).sum() * k_at.shape[1]
        )
    errors = (k.square() * q_error).sum(-1) + (q.square() * k_error).sum(-1)
    return _Heads(values, errors.double()), _Row(constants, error)


def _position_bias(scores: _Heads, table: Piece) -> _Row:
    """T5's table ``[buckets, h]``, each column with the scores of its head."""
    n = scores.values.shape[1]
    rows = _signs("bias_table", 0, len(table.value), n).to(table.value)
    errors = table.error.sum(0).unsqueeze(-1).expand(-1, n)
    return _head_products(scores, _Heads((rows @ table.value).mT.double(), errors.double()))


def _head_products(scores: _Heads, others: _Heads) -> _Row:
    """Sum over heads of other numbers times scores, these in units of their mean."""
    size = scores.values.square().mean().sqrt().clamp_min(1e-300)
    values = scores.values / size
    error = values.square() * others.errors + others.values.square() * scores.errors / size.square()
    return _Row((others.values * values).sum(0), float(error.sum()))


def _value_output(
    block: ReducedBlock, prefix: str, attention: Attention, z: Tensor, y: Tensor
) -> _Heads:
    W_V, W_O = block.reader(f"{prefix}W_V")[0], block.writer(f"{prefix}W_O")
    share = attention.heads // attention.groups
    v = read_heads(z, W_V.value).repeat_interleave(share, dim=0)
    v_error = W_V.error.unsqueeze(-2).repeat_interleave(share, dim=0)
    o = read_heads(y, W_O.value.mT)
    errors = (o.square() * v_error).sum(-1) + (v.square() * W_O.error.unsqueeze(-2)).sum(-1)
    return _Heads((v * o).sum(-1).double(), errors.double())


def _mlp(block: ReducedBlock, z: Tensor, y: Tensor) -> tuple[_Row, _Row]:
    """``MLP(z)·y`` without the constant it writes, and the bias of what neurons read.

    Of a mixture the mean over all experts with the weights of the router: which of them are active
    would change at a step.
    """
    mlp = block.description.mlp
    if not mlp.experts:
        return _expert(block, "", z, y)
    router, bias = block.router()
    scores = z @ router.value if bias is None else z @ router.value + bias.value
    shares = torch.softmax(scores, -1)
    score_error = router.error if bias is None else router.error + bias.error
    outputs, reads = [], []
    for e, prefix in enumerate(mlp.prefixes):
        output, read = _expert(block, prefix, z, y)
        share = shares[:, e].double()
        moved = float(score_error.mean() * (share * output.values).square().sum())
        error = output.error * float(share.square().mean()) + moved
        outputs.append(_Row(share * output.values, error))
        reads.append(read)
    return _added(outputs, len(z)), _added(reads, len(z))


def _expert(block: ReducedBlock, prefix: str, z: Tensor, y: Tensor) -> tuple[_Row, _Row]:
    """The same of one MLP."""
    hidden, error = _hidden(block, prefix, z)
    b = block.reader(f"{prefix}W_A")[1]
    writer = block.writer(f"{prefix}W_B")
    write = y @ writer.value.mT  # [n, f]
    read = _Row.zeros(len(z))
    if b is not None:
        read = _products(b.value.expand_as(write), write, b.error, writer.error)
    return _products(hidden, write, error, writer.error), read


def _hidden(block: ReducedBlock, prefix: str, z: Tensor) -> tuple[Tensor, Tensor]:
    """Activations ``[n, f]`` of the neurons of an MLP, and their expected squared errors."""
    mlp = block.description.mlp
    W, b = block.reader(f"{prefix}W_A")
    hidden = z @ W.value
    error = W.error
    if b is not None:
        hidden, error = hidden + b.value, error + b.error
    if mlp.gated:
        gate, c = block.reader(f"{prefix}W_G")
        before = z @ gate.value if c is None else z @ gate.value + c.value
        gate_error = gate.error if c is None else gate.error + c.error
        opened = activation(mlp.activation)(before)
        error = opened.square() * error + hidden.square() * gate_error
        hidden = hidden * opened
    else:
        hidden = activation(mlp.activation)(hidden)
    return hidden, error


def _vector(piece: Piece, vectors: Tensor) -> _Row:
    """A vector of the stream, read by the frame."""
    return _Row((vectors @ piece.value).double(), float(piece.error) * len(vectors))


def _gains(gains: Mapping[str, Piece], z: Tensor) -> Iterator[_Row]:
    """Gains of the stream, ``Σ_d z_d g_d y_d``: a sign of the stream changes z and y alike.

    A bias that remains is read as a vector.
    """
    for i, (name, gain) in enumerate(gains.items(), start=1):
        read = z * z.roll(len(z) // 2 + i, 0) if name.endswith(".g") else z
        yield _Row((read @ gain.value).double(), float(gain.error) * len(z))


def _block_sizes(block: ReducedBlock) -> Tensor:
    """``[PARTS, QUANTILES]`` of the logarithms of the sizes of a block's heads and neurons."""
    QK, VO = [], []
    for prefix, attention in block.attentions():
        share = attention.heads // attention.groups
        pieces = block.query_key(prefix)
        W_Q, W_K = pieces["W_Q"].value, pieces["W_K"].value
        if attention.qk_norm:
            W_Q = W_Q * pieces["q_norm.g"].value.unsqueeze(-2)
            W_K = W_K * pieces["k_norm.g"].value.unsqueeze(-2)
        W_V = block.reader(f"{prefix}W_V")[0].value
        W_O = block.writer(f"{prefix}W_O").value
        QK.append(_product_sizes(W_Q.mT, W_K.mT, share))
        VO.append(_product_sizes(W_O, W_V.mT, share))
    neurons = []
    for prefix in block.description.mlp.prefixes:
        reads = block.reader(f"{prefix}W_A")[0].value.norm(dim=0)
        if block.description.mlp.gated:
            reads = reads * block.reader(f"{prefix}W_G")[0].value.norm(dim=0)
        neurons.append(reads * block.writer(f"{prefix}W_B").value.norm(dim=1))
    return torch.stack([_quantiles(torch.cat(x).double()) for x in (QK, VO, neurons)])


def _product_sizes(left: Tensor, right: Tensor, share: int) -> Tensor:
    """Norms of ``leftᵀ right`` by head, from ``[h, d, D]`` and ``[g, d, D]``: √tr(LLᵀ RRᵀ)."""
    grams = [(x @ x.mT).double() for x in (left, right)]
    return (grams[0] * grams[1].repeat_interleave(share, 0)).sum((-1, -2)).clamp_min(0).sqrt()


def _quantiles(sizes: Tensor) -> Tensor:
    top = sizes.max().clamp_min(1e-300)
    at = torch.tensor(QUANTILES, dtype=torch.float64)
    return torch.quantile(sizes.clamp_min(DEAD * top).log(), at)


def _end_rows(model: Reduced, frame: _Frame, last: _Frame, encoder: _Frame) -> list[_Row]:
    """The rows of `ENDS`; ``last`` is the frame of what a classifier reads, ``encoder`` that of an
    encoder's stream."""
    rows: dict[str, list[_Row]] = {name: [] for name in ENDS}
    z = frame.vectors[:END_NUMBERS].double()

    def add(name: str, row: _Row, bias: _Row | None) -> None:
        rows[name].append(row)
        if bias is not None:
            rows[f"{name} bias"].append(bias)

    names = dict.fromkeys(("token", "patch", "projection"), "embedding") | {"type": "token type"}
    names |= dict.fromkeys(POSITIONS, "position")
    receivers = model.description.added[1]
    for table in map(model.table, model.table_names()):
        movable = shifted(model, table.name)
        own = frame if model.description.moves(table.name) else encoder
        vectors = own.vectors[:END_NUMBERS].double()
        row, mean, bias = _table_rows(table, vectors, centred=movable)
        pooler = table.name.startswith("extra.")
        add("pooler" if pooler else names.get(table.name, table.name), row, bias)
        if movable:
            count = 1 if table.name in receivers else len(receivers)
            rows["input constant"].append(mean.times(count))
    output = model.output()
    if output is not None:
        row, _, bias = _table_rows(output, z)
        add("head", row, bias)
    head = model.masked_head()
    if head is not None and model.description.mlm is not None:  # BERT: norm(φ(z W + b)) and a table
        W, b, table = head
        hidden = activation(model.description.mlm)(z @ W.value.double() + b.value.double())
        if model.description.norm == "layer":
            hidden = hidden - hidden.mean(-1, keepdim=True)
        size = hidden.square().mean(-1, keepdim=True).clamp_min(1e-300).sqrt()
        row, _, bias = _table_rows(table, hidden / size, (W.error + b.error) / size.square())
        add("head", row, bias)
    if model.classifier is not None:
        hidden, error = _hidden(model.classifier, "", last.vectors[:END_NUMBERS])
        W_B, b_B = (model.model[f"classifier.{n}_B"] for n in "Wb")
        table = Table("head", W_B.mT, model.dtype, model.unit, bias=b_B)
        row, _, bias = _table_rows(table, hidden.double(), error + last.error * hidden.square())
        add("head", row, bias)
    for name, piece in model.vectors().items():
        read = z * z.roll(1, 0) if name.endswith(".g") else z
        rows["input norm"].append(_Row(read @ piece.value.double(), float(piece.error) * len(z)))
    joined = {
        name: _added((row.moved(frame.error) for row in by_name), END_NUMBERS)
        for name, by_name in rows.items()
    }
    joined["other tensors"] = _added(_kept(model), END_NUMBERS)
    return [joined[name] for name in ENDS]


def _table_rows(
    table: Table, z: Tensor, z_error: Tensor | None = None, *, centred: bool = False
) -> tuple[_Row, _Row, _Row | None]:
    """Signed sums over all rows of a table, read by ``z``; their mean, likewise; signed sums of the
    biases that belong to the rows, or None.

    Args:
        z: ``[END_NUMBERS, D]``.
        z_error: expected squares of the errors of z; none if not given.
        centred: sum the deviations from the mean.
    """
    sums, mean, total, error = None, None, torch.zeros(END_NUMBERS).double(), 0.0
    biases: list[_Row] = []
    for start in range(0, len(table), ROWS):
        stop = min(start + ROWS, len(table))
        rows, signs = table.rows(start, stop), _signs(table.name, start, stop - start, END_NUMBERS)
        part, part_mean = (signs.to(rows.value) @ rows.value).double(), rows.value.sum(0).double()
        sums = part if sums is None else sums + part
        mean = part_mean if mean is None else mean + part_mean
        total += signs.sum(1).double()
        error += float(rows.error.sum())
        bias = table.biases(start, stop)
        if bias is not None:
            values = (signs.to(bias.value) @ bias.value).double()
            biases.append(_Row(values, float(bias.error.sum()) * END_NUMBERS))
    assert sums is not None
    assert mean is not None
    mean /= len(table)
    if centred:
        sums -= torch.outer(total, mean)
    entry_error = torch.as_tensor(error / z.shape[1])
    row = _products(sums, z, entry_error, torch.zeros(()) if z_error is None else z_error)
    mean_row = _Row(z @ mean, error / len(table) ** 2 * len(z))
    return row, mean_row, _added(biases, END_NUMBERS) if biases else None


def _kept(model: Reduced) -> Iterator[_Row]:
    """Tensors that nothing acts on, each divided by the root of its norm."""
    for name in model.names:
        if name.startswith(KEPT):
            value = model.model[name].double().flatten()
            numbers = sketch(value, (0,), END_NUMBERS, f"print {name}")
            size = float(torch.linalg.vector_norm(value))
            row = _Row(numbers, model.unit * size**2 * END_NUMBERS)
            yield row.times(max(size, 1e-300) ** -0.5)
