"""What the kernels are handed: tensors, numbers and constants, grouped and named.

Triton takes a named tuple apart at launch: each tensor and each number in it is passed, and
specialised on (divisible by 16, equal to 1), as if it stood alone. `Constants` is compiled into
the kernel as a whole.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from transformer_nfn.zoo.sizes import NetworkSizes

# Samples a program takes; one program's weight gradients are added up on the chip.
CHUNK = 32
ROW_TILE = 64
UPDATE_TILE = 1024
# Warps a program, stages of its pipeline and registers a thread; for attention by the number of
# tokens a tile holds, with the tokens (forward) or keys (backward) taken at a time.
Options = dict[str, int]
FORWARD: dict[int, Options] = {
    16: {"num_warps": 1, "num_stages": 2, "QUERIES": 16},
    32: {"num_warps": 2, "num_stages": 2, "QUERIES": 32},
    64: {"num_warps": 4, "num_stages": 3, "QUERIES": 64, "maxnreg": 128},
    128: {"num_warps": 8, "num_stages": 2, "QUERIES": 128},
    256: {"num_warps": 8, "num_stages": 1, "QUERIES": 128},
    512: {"num_warps": 8, "num_stages": 1, "QUERIES": 64},
}
ATTENTION: dict[int, Options] = {
    16: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    32: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    64: {"num_warps": 1, "num_stages": 2, "KEYS": 16},
    128: {"num_warps": 8, "num_stages": 1, "KEYS": 128},
    256: {"num_warps": 8, "num_stages": 1, "KEYS": 256},
    512: {"num_warps": 8, "num_stages": 1, "KEYS": 512},
}
# Numbers of 32 bits take twice the room, and more where each is split in two for three products.
WIDE_FORWARD = FORWARD | {
    64: {"num_warps": 4, "num_stages": 1, "QUERIES": 64, "maxnreg": 128},
    128: {"num_warps": 4, "num_stages": 1, "QUERIES": 64},
    256: {"num_warps": 4, "num_stages": 1, "QUERIES": 64},
    512: {"num_warps": 4, "num_stages": 1, "QUERIES": 32},
}
SPLIT_FORWARD = WIDE_FORWARD | {64: {"num_warps": 4, "num_stages": 1, "QUERIES": 64}}
WIDE_ATTENTION = ATTENTION | {
    32: {"num_warps": 2, "num_stages": 2, "KEYS": 32},
    64: {"num_warps": 4, "num_stages": 1, "KEYS": 64},
}
ROW: Options = {"num_warps": 4, "num_stages": 3}
PROJECTIONS: Options = {"num_warps": 4, "num_stages": 2, "maxnreg": 128}
EMBED: Options = {"num_warps": 4, "num_stages": 3}
SPREAD: Options = {"num_warps": 2, "num_stages": 3}


class Tile(NamedTuple):
    """For samples of at most ``tokens`` tokens; another takes those of ``shorter`` or fewer."""

    tokens: int
    shorter: int


def padded(count: int) -> int:
    """The least power of two that holds ``count`` and suits the tensor cores."""
    return max(16, 1 << (count - 1).bit_length())


def tiles(longest: int, alike: bool) -> list[Tile]:
    """Tiles that together serve samples of up to ``longest`` tokens.

    Samples that are all ``alike`` have ``longest`` tokens each.
    """
    if alike or longest <= 64:
        return [Tile(padded(longest), longest - 1 if alike else 0)]
    heights = [64 << i for i in range((longest - 1).bit_length() - 5)]
    return list(map(Tile, heights, [0, *heights]))


class Clock(NamedTuple):
    """What says which batch is next, on the device, so that a captured pass can be repeated.

    Attributes:
        step: ``int32 [1]``, the batch now.
        steps: ``int32 [networks]``, how many each network has in this epoch.
        order: ``int32 [networks, samples]``, which sample is where (a row for all if one).
        lengths: ``int32 [networks, steps]``, tokens per sample in each batch.
        crop: ``int32 [networks, steps, 2]``.
        drop: ``int32 [networks, steps, sites, 2]``.
        coef: ``float32 [networks, steps, 7]``.
    """

    step: Tensor
    steps: Tensor
    order: Tensor
    lengths: Tensor
    crop: Tensor
    drop: Tensor
    coef: Tensor


class Sizes(NamedTuple):
    """Numbers that kernels stride and stop by.

    Attributes:
        batch: samples per batch.
        rows: tokens of a batch at most: what lies between two networks in a buffer of rows.
        networks: how many there are.
        steps: what lies between two networks in `Clock.lengths`.
        samples: what lies between two networks in `Clock.order`; 0 where all share a row.
        tokens: positions there are, by which dropout numbers the tokens of a batch.
        zero: 0, which the compiler cannot know.
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
        table: where the pixels of each patch lie in an image, or the words' vectors.
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
    """What forward leaves of a block for its own use and for backward.

    After the last block only ``z`` is there; without training only ``qkv``.

    Attributes:
        z: ``[networks, rows, D]``, what LayerNorm gives before the block.
        qkv: ``[networks, rows, 3·D]``.
        a: ``[networks, rows, D]``, the outputs of the heads.
        y: ``[networks, rows, D]``, what LayerNorm gives before the MLP.
        stats: ``float32 [networks, rows, STATS]``.
    """

    z: Tensor
    qkv: Tensor
    a: Tensor
    y: Tensor
    stats: Tensor


class Gradients(NamedTuple):
    """Gradients as backward passes them on, those of activations a block at a time.

    Attributes:
        pooled: ``float32 [networks, batch, D]``, of the mean token.
        x: ``[networks, rows, D]``, of the output of a block's MLP, with dropout done.
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
    """Masks of one step, a bit per entry, and what kept entries are multiplied by.

    Attributes:
        bits: ``int32 [networks, sites, rows]``.
        scale: ``float32 [networks]``.
    """

    bits: Tensor
    scale: Tensor


class Outcome(NamedTuple):
    """How a batch went.

    Attributes:
        pooled: ``float32 [networks, batch, D]``, the mean token.
        loss: ``float32 [chunks, networks]``, summed over samples.
        hits: ``float32 [chunks, networks]``.
    """

    pooled: Tensor
    loss: Tensor
    hits: Tensor


class Progress(NamedTuple):
    """What an epoch changes: moments ``[networks, weights]`` and sums ``[networks]``."""

    first: Tensor
    second: Tensor
    loss: Tensor
    hits: Tensor


class EmbeddingLayout(NamedTuple):
    """Where the embedding's tensors begin."""

    W: int
    b: int


class BlockLayout(NamedTuple):
    """Where a block's tensors begin."""

    W_QKV: int
    W_O: int
    W_A: int
    b_A: int
    W_B: int
    b_B: int


class ClassifierLayout(NamedTuple):
    """Where the classifier's tensors begin."""

    W_1: int
    b_1: int
    W_2: int
    b_2: int


class Layout(NamedTuple):
    """Where each tensor of `NetworkSizes.layout` begins in a flat row of ``size`` numbers."""

    size: int
    embedding: EmbeddingLayout | None
    blocks: tuple[BlockLayout, ...]
    classifier: ClassifierLayout


def layout(arch: NetworkSizes) -> Layout:
    """The offsets of an architecture; no embedding where words have no weights."""
    at, begin = {}, 0
    for name, shape in arch.layout.items():
        at[name] = begin
        begin += math.prod(shape)

    def offsets(stem: str, names: tuple[str, ...]) -> list[int]:
        return [at[f"{stem}.{name}"] for name in names]

    embedding = None
    if arch.patch:
        embedding = EmbeddingLayout(*offsets("embedding", EmbeddingLayout._fields))
    blocks = tuple(
        BlockLayout(*offsets(f"blocks.{i}", BlockLayout._fields)) for i in range(arch.blocks)
    )
    classifier = ClassifierLayout(*offsets("classifier", ClassifierLayout._fields))
    return Layout(begin, embedding, blocks, classifier)


class Constants(NamedTuple):
    """What a kernel is compiled for; powers of two that hold a number are its name twice.

    A kernel hands ``products`` on under a name of its own (``PREC: tl.constexpr = …``): Triton 3.6
    takes no bare string for a helper's argument.

    Attributes:
        layout: where the weights lie.
        D: the width of a token.
        FF: neurons of an MLP.
        C: classes (``CC``: the tile that holds them).
        P: pixels of a patch, 0 for words (``PP``: the tile that holds them).
        padding: how far a random crop may move an image.
        sites: how many times dropout acts.
        S: samples per program.
        R: rows a program takes at a time, where it takes rows as they lie.
        train: whether there is dropout and activations are kept for backward.
        products: how float32 products are done; see `launch.Pass`.
    """

    layout: Layout
    D: int
    FF: int
    C: int
    CC: int
    P: int
    PP: int
    padding: int
    sites: int
    S: int
    R: int
    train: bool
    products: str
