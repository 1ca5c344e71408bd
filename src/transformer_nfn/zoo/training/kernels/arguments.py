"""Arguments of the kernels as named tuples, and launch options.

Triton unpacks a named tuple at launch: each tensor and number is passed, and specialised on
(divisible by 16, equal to 1), like a single argument. `Constants` is compiled into the kernel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from transformer_nfn.zoo.sizes import NetworkSizes

# Samples per program, whose weight gradients are summed on the chip.
CHUNK = 32
UPDATE_TILE = 1024
# Warps per program, pipeline stages and registers per thread. Of images, by the tokens of a tile:
# with the tokens (forward) or keys (backward) processed at a time.
Options = dict[str, int]
FORWARD: dict[int, Options] = {
    16: {"num_warps": 1, "num_stages": 2, "QUERIES": 16},
    32: {"num_warps": 2, "num_stages": 2, "QUERIES": 32},
    64: {"num_warps": 4, "num_stages": 3, "QUERIES": 64, "maxnreg": 128},
}
ATTENTION: dict[int, Options] = {
    16: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    32: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    64: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
}
# 32-bit numbers need twice the memory, and more if each is split for three products.
WIDE_FORWARD = FORWARD | {64: {"num_warps": 4, "num_stages": 1, "QUERIES": 64, "maxnreg": 128}}
SPLIT_FORWARD = WIDE_FORWARD | {64: {"num_warps": 4, "num_stages": 1, "QUERIES": 64}}
WIDE_ATTENTION = ATTENTION | {
    32: {"num_warps": 2, "num_stages": 2, "KEYS": 32},
    64: {"num_warps": 4, "num_stages": 1, "KEYS": 64},
}
# Chosen by what the compiler reports: for tokens of more than 32 numbers or heads that fill more
# than 32 in their tiles, and for heads of more than 16. Those of rows in bf16 were chosen by time.
LARGE_FORWARD: dict[int, Options] = {
    16: {"num_warps": 4, "num_stages": 1, "QUERIES": 16},
    32: {"num_warps": 4, "num_stages": 1, "QUERIES": 32},
    64: {"num_warps": 4, "num_stages": 1, "QUERIES": 64},
}
LARGE_SPLIT_FORWARD = LARGE_FORWARD | {64: {"num_warps": 8, "num_stages": 1, "QUERIES": 32}}
LARGE_BF16_FORWARD = LARGE_FORWARD | {64: {"num_warps": 4, "num_stages": 2, "QUERIES": 64}}
LARGE_ATTENTION: dict[int, Options] = {
    16: {"num_warps": 1, "num_stages": 1, "KEYS": 16},
    32: {"num_warps": 2, "num_stages": 1, "KEYS": 32},
    64: {"num_warps": 4, "num_stages": 1, "KEYS": 64},
}
# Of texts: with the queries and keys processed at a time and the samples of a program.
TEXT_ATTENTION: Options = {
    "num_warps": 1, "num_stages": 2, "QUERIES": 32, "KEYS": 32, "SAMPLES": 8
}  # fmt: skip


class RowOptions(NamedTuple):
    """Options of the other kernels, with the rows and neurons that are processed at a time.

    ``rows_forward`` is None where `block_forward` does its work, ``mlp`` (`mlp_gradients`) where
    `rows_backward` does.
    """

    embed: Options
    rows_forward: Options | None
    rows: Options
    mlp: Options | None
    projections: Options
    spread: Options
    classify: Options


ROWS = RowOptions(
    embed={"num_warps": 4, "num_stages": 3, "ROWS": 64},
    rows_forward=None,
    rows={"num_warps": 4, "num_stages": 3, "ROWS": 64, "NEURONS": 64},
    mlp=None,
    projections={"num_warps": 4, "num_stages": 2, "ROWS": 64, "maxnreg": 128},
    spread={"num_warps": 2, "num_stages": 3, "ROWS": 64},
    classify={"num_warps": 2},
)
TEXT_ROWS = ROWS._replace(rows_forward={"num_warps": 4, "num_stages": 2, "ROWS": 64})
LARGE_ROWS = RowOptions(
    embed={"num_warps": 4, "num_stages": 2, "ROWS": 64},
    rows_forward={"num_warps": 4, "num_stages": 2, "ROWS": 64},
    rows={"num_warps": 4, "num_stages": 2, "ROWS": 64, "NEURONS": 32},
    mlp={"num_warps": 4, "num_stages": 2, "ROWS": 64, "NEURONS": 64, "maxnreg": 168},
    projections={"num_warps": 4, "num_stages": 2, "ROWS": 64},
    spread={"num_warps": 4, "num_stages": 3, "ROWS": 32},
    classify={"num_warps": 8},
)
WIDE_LARGE_ROWS = LARGE_ROWS._replace(
    embed={"num_warps": 4, "num_stages": 3, "ROWS": 32},
    rows_forward={"num_warps": 4, "num_stages": 1, "ROWS": 64},
    rows={"num_warps": 8, "num_stages": 2, "ROWS": 32, "NEURONS": 64},
    projections={"num_warps": 8, "num_stages": 2, "ROWS": 32},
)
SPLIT_LARGE_ROWS = WIDE_LARGE_ROWS._replace(
    rows_forward={"num_warps": 8, "num_stages": 1, "ROWS": 32}
)


def padded(count: int) -> int:
    """The smallest power of two from ``count`` on that tensor cores accept."""
    return max(16, 1 << (count - 1).bit_length())


class Clock(NamedTuple):
    """The current batch, in device memory, so that a captured pass can be replayed.

    Attributes:
        step: ``int32 [1]``, the current batch.
        steps: ``int32 [networks]``, batches of each network in this epoch.
        order: ``int32 [networks, samples]``, order of the samples (one row if all share it).
        lengths: ``int32 [networks, steps]``, tokens per sample in each batch.
        ranked: ``int32 [steps, networks]``, the networks, longest batches first.
        crop: ``int32 [networks, steps, 2]``.
        drop: ``int32 [networks, steps, sites, 2]``.
        coef: ``float32 [networks, steps, 7]``.
    """

    step: Tensor
    steps: Tensor
    order: Tensor
    lengths: Tensor
    ranked: Tensor
    crop: Tensor
    drop: Tensor
    coef: Tensor


class Sizes(NamedTuple):
    """Strides and limits.

    Attributes:
        batch: samples per batch.
        rows: maximum tokens of a batch, the stride of networks in a buffer of rows.
        networks: number of networks.
        steps: stride of networks in `Clock.lengths`.
        samples: stride of networks in `Clock.order`; 0 if all share a row.
        tokens: number of positions, by which dropout numbers the tokens of a batch.
        zero: 0, unknown to the compiler.
    """

    batch: int
    rows: int
    networks: int
    steps: int
    samples: int
    tokens: int
    zero: int = 0


class Samples(NamedTuple):
    """A split of a task.

    Attributes:
        stored: images ``uint8 [samples, wide, wide]`` or words ``int32 [samples, wide]``.
        table: offsets of the pixels of each patch in an image, or the word vectors.
        positions: ``[tokens, D]``.
        labels: ``int64 [samples]``.
        wide: the side of a stored image, or the words of a stored text.
        white: the value of a white pixel.
    """

    stored: Tensor
    table: Tensor
    positions: Tensor
    labels: Tensor
    wide: int
    white: float


class Activations(NamedTuple):
    """Activations of a block.

    After the last block there is only ``z``; without training only ``qkv``.

    Attributes:
        z: ``[networks, rows, D]``, output of the LayerNorm before the block.
        qkv: ``[networks, rows, 3·D]``.
        a: ``[networks, rows, D]``, the outputs of the heads.
        y: ``[networks, rows, D]``, output of the LayerNorm before the MLP.
        stats: ``float32 [networks, rows, stats]``, see `Constants`.
    """

    z: Tensor
    qkv: Tensor
    a: Tensor
    y: Tensor
    stats: Tensor


class Gradients(NamedTuple):
    """Gradients; those of activations are of one block at a time.

    Attributes:
        pooled: ``float32 [networks, batch, D]``, of the mean token.
        x: ``[networks, rows, D]``, of the output of a block's MLP, before dropout.
        a: ``[networks, rows, D]``, of the outputs of the heads.
        qkv: ``[networks, rows, 3·D]``.
        weights: ``float32 [chunks, networks, weights]``.
    """

    pooled: Tensor
    x: Tensor
    a: Tensor
    qkv: Tensor
    weights: Tensor


class Dropout(NamedTuple):
    """Masks of one step, a bit per entry, and the scale of kept entries.

    Attributes:
        bits: ``int32 [networks, sites, words, rows]``, see `Constants`.
        scale: ``float32 [networks]``.
    """

    bits: Tensor
    scale: Tensor


class Outcome(NamedTuple):
    """Results of a batch.

    Attributes:
        pooled: ``float32 [networks, batch, D]``, the mean token.
        loss: ``float32 [chunks, networks]``, summed over samples.
        hits: ``float32 [chunks, networks]``.
    """

    pooled: Tensor
    loss: Tensor
    hits: Tensor


class Progress(NamedTuple):
    """State of an epoch: moments ``[networks, weights]`` and sums ``[networks]``."""

    first: Tensor
    second: Tensor
    loss: Tensor
    hits: Tensor


class EmbeddingLayout(NamedTuple):
    """Offsets of the embedding's tensors."""

    W: int
    b: int


class BlockLayout(NamedTuple):
    """Offsets of a block's tensors."""

    W_QKV: int
    W_O: int
    W_A: int
    b_A: int
    W_B: int
    b_B: int


class ClassifierLayout(NamedTuple):
    """Offsets of the classifier's tensors."""

    W_1: int
    b_1: int
    W_2: int
    b_2: int


class Layout(NamedTuple):
    """Offset of each tensor of `NetworkSizes.layout` in a flat row of ``size`` numbers."""

    size: int
    embedding: EmbeddingLayout | None
    blocks: tuple[BlockLayout, ...]
    classifier: ClassifierLayout


def layout(sizes: NetworkSizes) -> Layout:
    """The layout of a network; text networks have no embedding."""
    at, begin = {}, 0
    for name, shape in sizes.layout.items():
        at[name] = begin
        begin += math.prod(shape)

    def offsets(stem: str, names: tuple[str, ...]) -> list[int]:
        return [at[f"{stem}.{name}"] for name in names]

    embedding = None
    if sizes.patch:
        embedding = EmbeddingLayout(*offsets("embedding", EmbeddingLayout._fields))
    blocks = tuple(
        BlockLayout(*offsets(f"blocks.{i}", BlockLayout._fields)) for i in range(sizes.blocks)
    )
    classifier = ClassifierLayout(*offsets("classifier", ClassifierLayout._fields))
    return Layout(begin, embedding, blocks, classifier)


class Constants(NamedTuple):
    """Compile-time constants; a doubled name is the tile, a power of two, that holds the number.

    Kernels bind ``products`` to a name first (``PREC: tl.constexpr = …``): Triton 3.6 accepts no
    bare string as the argument of a helper.

    Attributes:
        layout: offsets of the weights.
        D: the width of a token (``DDD``: the tile of its q, k and v, ``3·D`` numbers).
        F: neurons of an MLP.
        H: heads.
        J: the width of a head.
        C: classes.
        P: pixels of a patch, 0 for words.
        T: tokens of an image.
        padding: maximum shift of a random crop.
        sites: number of dropout sites.
        words: 32-bit words that hold the dropout mask of a token.
        stats: numbers per row of a block stored for backward: the log-sums of the heads, then the
            reciprocal deviations of its input, of the MLP's input and, in the last block, of its
            output; for texts then the scalar products of the heads' outputs and their gradients.
        S: samples per program.
        train: whether there is dropout and a backward pass.
        products: precision of float32 products; see `runner.Pass`.
    """

    layout: Layout
    D: int
    DD: int
    DDD: int
    F: int
    FF: int
    H: int
    J: int
    JJ: int
    C: int
    CC: int
    P: int
    PP: int
    T: int
    TT: int
    padding: int
    sites: int
    words: int
    stats: int
    S: int
    train: bool
    products: str


class Launch(NamedTuple):
    """Launch options of a pass.

    ``forward`` is of `block_forward` or the forward of attention, ``attention`` of its backward.
    """

    forward: Options
    attention: Options
    other: RowOptions


def launch_options(constants: Constants, wide: bool) -> Launch:
    """Launch options for networks of these sizes; ``wide`` activations have 32 bits."""
    other = TEXT_ROWS if constants.P == 0 else ROWS
    if constants.DD > 32:
        other = WIDE_LARGE_ROWS if wide else LARGE_ROWS
        if constants.products == "tf32x3":
            other = SPLIT_LARGE_ROWS
    if constants.P == 0:
        return Launch(TEXT_ATTENTION, TEXT_ATTENTION, other)
    attention = WIDE_ATTENTION if wide else ATTENTION
    if constants.JJ > 16:
        attention = LARGE_ATTENTION
    forward = WIDE_FORWARD if wide else FORWARD
    if constants.products == "tf32x3":
        forward = SPLIT_FORWARD
    if max(constants.DD, constants.H * constants.JJ) > 32:
        forward = LARGE_SPLIT_FORWARD if constants.products == "tf32x3" else LARGE_FORWARD
        if constants.DD > 32 and not wide:
            forward = LARGE_BF16_FORWARD
    return Launch(forward[constants.TT], attention[constants.TT], other)
