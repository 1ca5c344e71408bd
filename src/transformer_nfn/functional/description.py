"""Description of a transformer without its weights: stacks of blocks, and canonical tensor names.

Tensors of every file are read under the names of this module. ``D`` is the width
of the stream, ``h`` the query heads, ``g`` the groups of keys and values (query head ``i`` belongs
to group ``i // (h / g)``); vectors are rows, ``y = x W + b``. Names of a block begin with
``{stack}{i}.``, where ``stack`` is empty, or ``encoder.`` or ``decoder.``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

Order = Literal["pre", "post", "parallel", "sandwich", "chain"]
Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
Pooling = Literal["first", "last", "mean"]
QueryKeyNorm = Literal["each head", "all heads"]
StreamGroup = Literal[
    "orthogonal", "orthogonal fixing ones", "signed permutation", "permutation and sign", "none"
]

BLOCK_AXES = {
    **{f"norm_{n}.{p}": ("D",) for n in ("1", "2", "x") for p in "gb"},
    **{f"after_{n}.g": ("D",) for n in (1, 2)},
    "W_Q": ("head", "D", "d_k"),
    "b_Q": ("head", "d_k"),
    "W_K": ("group", "D", "d_k"),
    "b_K": ("group", "d_k"),
    "W_V": ("group", "D", "d_v"),
    "b_V": ("group", "d_v"),
    "W_O": ("head", "d_v", "D"),
    "b_O": ("D",),
    "q_norm.g": ("d_k",),
    "k_norm.g": ("d_k",),
    "bias_table": ("bucket", "head"),
    "contact": ("head",),
    "W_A": ("D", "neuron"),
    "W_A.A": ("D", "rank"),
    "W_A.B": ("rank", "neuron"),
    "b_A": ("neuron",),
    "W_G": ("D", "neuron"),
    "W_B": ("neuron", "D"),
    "b_B": ("D",),
    "router": ("D", "expert"),
}
"""The axes of a block's tensors, by their names without the block's prefix.

``W_A.A`` and ``W_A.B`` are a low-rank term that is added to ``W_A`` (an adapter). ``contact`` is
what a head outside the network reads of the attention maps (ESM). The tensors of an expert have
``expert.{e}.`` before their names.
"""
BLOCK_AXES |= {f"cross.{m}_{p}": BLOCK_AXES[f"{m}_{p}"] for m in "Wb" for p in "QKVO"}
ALL_HEADS_AXES = {"q_norm.g": ("head", "d_k"), "k_norm.g": ("group", "d_k")}
"""The axes of gains of queries and keys where one norm is taken over all heads."""

END_AXES = {
    "token": ("vocab", "D"),
    "position": ("position", "D"),
    "encoder.position": ("source", "D"),
    "type": ("type", "D"),
    "patch": ("pixel", "D"),
    "patch_bias": ("D",),
    "cls": ("D",),
    "dist": ("D",),
    "embed_norm.g": ("D",),
    "embed_norm.b": ("D",),
    "norm.g": ("D",),
    "norm.b": ("D",),
    "head": ("D", "class"),
    "head_bias": ("class",),
    "classifier.W_A": ("D", "hidden"),
    "classifier.b_A": ("hidden",),
    "classifier.W_B": ("hidden", "class"),
    "classifier.b_B": ("class",),
    "projection": ("E", "D"),
    "projection_bias": ("D",),
    "kept.token": ("vocab", "E"),
    "kept.position": ("position", "E"),
    "kept.type": ("type", "E"),
    "kept.head": ("E", "class"),
    "kept.head_bias": ("class",),
    "kept.pooled.W": ("pooler", "class"),
    "kept.pooled.b": ("class",),
    "kept.conv_1.W": ("channel", "mel", "tap"),
    "kept.conv_1.b": ("channel",),
    "kept.conv_2.W": ("E", "channel", "tap"),
    "kept.conv_2.b": ("E",),
    **{f"kept.{norm}.{p}": ("E",) for norm in ("norm", "decoder_norm") for p in "gb"},
}
"""The axes of the tensors before the first block and after the last one.

An embedding of another width ``E`` is projected into the stream (ALBERT); tensors of that width are
taken as they are. An encoder and a decoder may have positions and a norm of their embedding each,
``decoder.position``; an encoder may have more or fewer positions.
"""
POSITIONS = ("position", "encoder.position", "decoder.position")

EXTRA, KEPT = "extra.", "kept."


@dataclass(frozen=True)
class RotaryScaling:
    """Scaling of rotary frequencies for longer texts.

    Attributes:
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` the low ones only.
        factor: of the scaling.
        low: waves longer than ``original / low`` tokens are stretched in full.
        high: waves shorter than ``original / high`` tokens stay.
        original: length before scaling.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: float = 8192.0


@dataclass(frozen=True)
class Attention:
    """Description of one attention.

    Attributes:
        heads: of queries.
        groups: of keys and values; as many as heads without grouped queries.
        d_k: size of a query and a key.
        d_v: size of a value.
        scale: of the scores, ``softmax(scale · q kᵀ)``.
        causal: a token sees itself and those before it.
        rotary: how many leading coordinates of queries and keys are turned; coordinate ``i`` is
            paired with ``i + rotary / 2``.
        rotary_base: of the frequencies.
        rotary_scaling: of the frequencies.
        qk_norm: queries and keys are divided by their root mean square, in each head (with one
            gain ``[d_k]`` for all heads) or over all heads together (gains ``[h, d_k]`` and
            ``[g, d_k]``), times the gain; None without a norm.
        softcap: scores are ``softcap · tanh(score / softcap)``.
        window: a token sees this many, itself included.
        position_bias: a table of buckets of distances is added to the scores; block 0 of a
            stack holds it for all its blocks.
        buckets: of that table.
        max_distance: from which on all distances share a bucket.
        alibi: head ``i`` of ``h`` adds a slope of its own times the distance to its scores, which
            fixes the order of the heads.
    """

    heads: int
    groups: int
    d_k: int
    d_v: int
    scale: float
    causal: bool = False
    rotary: int = 0
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    qk_norm: QueryKeyNorm | None = None
    softcap: float | None = None
    window: int | None = None
    position_bias: bool = False
    buckets: int = 0
    max_distance: int = 0
    alibi: bool = False

    @property
    def gain_groups(self) -> int:
        """Groups of heads whose gains of queries and keys are their own; 1 if all share them."""
        return self.groups if self.qk_norm == "all heads" else 1

    def slopes(self) -> Tensor:
        """ALiBi's slope of each head, ``[h]`` in float64.

        A geometric series for a power of two; further heads take every other term of the series
        for twice as many.
        """

        def series(n: int) -> Tensor:
            return torch.exp2(-8 * torch.arange(1, n + 1, dtype=torch.float64) / n)

        whole = 1 << (self.heads.bit_length() - 1)
        return torch.cat([series(whole), series(2 * whole)[::2][: self.heads - whole]])

    def frequencies(self) -> Tensor:
        """Angle per position of each rotated pair, ``[rotary / 2]`` in float64."""
        powers = torch.arange(0, self.rotary, 2, dtype=torch.float64) / max(self.rotary, 1)
        plain = self.rotary_base**-powers
        scaling = self.rotary_scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        waves = scaling.original * plain / (2 * math.pi)  # turns within the original length
        kept = ((waves - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        return plain * (kept + (1 - kept) / scaling.factor)


@dataclass(frozen=True)
class Mlp:
    """``φ(x W_A + b_A) W_B + b_B``, or gated ``(φ(x W_G) ∘ x W_A) W_B``; or a mixture of these.

    Attributes:
        neurons: of the MLP, or of each expert.
        activation: φ.
        gated: see above.
        experts: of a mixture; 0 for a single MLP.
        active: experts that a token uses, those with the largest ``softmax(x router)``.
        normalised: their weights are divided by their sum.
    """

    neurons: int
    activation: Activation
    gated: bool = False
    experts: int = 0
    active: int = 0
    normalised: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What stands before the names of the tensors of each MLP: nothing, or ``expert.3.``."""
        return tuple(f"expert.{e}." for e in range(self.experts)) or ("",)


@dataclass(frozen=True)
class Block:
    """One block of a stack.

    Attributes:
        attention: of the block to its own stack.
        mlp: of the block.
        order: ``pre``: ``x + f(norm(x))``; ``post``: ``norm(x + f(x))``; ``parallel``: attention
            and MLP read the same ``x``, through a norm each or through one; ``sandwich``:
            ``x + norm(f(norm(x)))``, or ``x + norm(f(x))`` where there is no ``norm_1``;
            ``chain``: ``f(norm(x))`` without a residual, so that what each sublayer writes is a
            stream of its own, and without gains.
        cross: attention to the encoder, between the two.
    """

    attention: Attention
    mlp: Mlp
    order: Order
    cross: Attention | None = None

    def without_scales(self) -> Block:
        """The block with scores at scale 1."""
        cross = None if self.cross is None else replace(self.cross, scale=1.0)
        return replace(self, attention=replace(self.attention, scale=1.0), cross=cross)


@dataclass(frozen=True)
class Stack:
    """Blocks one after another.

    Attributes:
        prefix: empty, ``encoder.`` or ``decoder.``.
        blocks: with weights of their own.
        final_norm: a norm follows the last of them.
        repeats: times that all blocks are run, one round after another (ALBERT).
    """

    prefix: str
    blocks: tuple[Block, ...]
    final_norm: bool
    repeats: int = 1

    @property
    def last_norm(self) -> str:
        """Name of the norm after the last block, or of the one that ends a post-norm block."""
        ends = not self.final_norm and self.blocks[-1].order == "post"
        return f"{self.prefix}{len(self.blocks) - 1}.norm_2" if ends else f"{self.prefix}norm"


@dataclass(frozen=True)
class Transformer:
    """A transformer without its weights.

    Attributes:
        family: the data file that describes it, ``gpt2``.
        width: of the stream, ``D``.
        norm: LayerNorm or RMS norm.
        eps: of every norm.
        stacks: one, or encoder and decoder.
        inputs: what it reads: token ids, image patches, vectors (of width ``D``, or of any width
            where ``patch`` embeds them), or audio features, which convolutions bring to an encoder.
        vocab: tokens; None where it reads none.
        tied: the output matrix is the token embedding (a head of another size may be there too).
        headless: the final stream itself is the output, so whatever moves it moves the output.
        embedding_scale: the token embedding is multiplied by it.
        head_scale: the final stream is multiplied by it before the output matrix.
        final_softcap: logits are ``c · tanh(logits / c)``.
        dropped_token: has no embedding; the others are scaled by the inverse of their share, None
            where every token has one.
        position_offset: the row of ``position`` that the first token takes.
        pooler: activation of ``extra.pooler``, None without one.
        mlm: activation of ``extra.mlm``, which a norm (``extra.mlm_norm``) and the output matrix
            follow; None without one.
        pooling: what the output matrix reads of the final stream: its first or last token, or the
            mean of all; None where it reads every token.
        end_token: whose output is read: the first of them (CLIP; of 2 that of the largest id), or
            the last (a classifier of BART); None where no token says what is read.
        padding: that a classifier of the last token passes over, -1 if it takes the very last.
        start_token: the decoder reads the input behind it unless it has an input (BART).
        sentence_pooling: what makes the embedding of a text of its final stream, in the words of
            sentence-transformers (``mean``, ``cls``), with digests of modules behind it; None where
            nothing does. The forward leaves it to them.
        classifier: an MLP that gives the output from the mean of the final stream over tokens.
        sinusoids: fixed positions are added to the input unless the file holds positions: sines and
            cosines in neighbouring coordinates, or in halves.
        channels: of an image.
        side: of a patch, in pixels.
        tensors: shape of each tensor by canonical name, in the order of the file.
    """

    family: str
    width: int
    norm: Norm
    eps: float
    stacks: tuple[Stack, ...]
    inputs: Literal["tokens", "patches", "vectors", "audio"] = "tokens"
    vocab: int | None = None
    tied: bool = False
    headless: bool = False
    embedding_scale: float = 1.0
    head_scale: float = 1.0
    final_softcap: float | None = None
    dropped_token: int | None = None
    position_offset: int = 0
    pooler: str | None = None
    mlm: Activation | None = None
    pooling: Pooling | None = None
    end_token: int | None = None
    padding: int | None = None
    start_token: int | None = None
    sentence_pooling: str | None = None
    classifier: Mlp | None = None
    sinusoids: Literal["neighbours", "halves"] | None = None
    channels: int = 0
    side: int = 0
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def blocks(self) -> dict[str, Block]:
        """Every block by name: ``0``, ``encoder.3``."""
        return {f"{s.prefix}{i}": block for s in self.stacks for i, block in enumerate(s.blocks)}

    def settings(self) -> dict[str, object]:
        """Whatever decides the function beside the tensors, by name; of a block by its own.

        Scales are left out: they act as factors of weights.
        """
        left_out = (
            "family", "width", "stacks", "inputs", "vocab", "tied", "headless", "tensors",
            "embedding_scale", "head_scale",
        )  # fmt: skip
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        out |= {f"{stack.prefix}repeats": stack.repeats for stack in self.stacks}
        return out | {name: block.without_scales() for name, block in self.blocks.items()}

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that canonical name."""
        return name in self.tensors

    def of_stack(self, stack: Stack, name: str) -> str | None:
        """Name of a tensor before the first block of a stack, its own or one that all share."""
        return next((n for n in (stack.prefix + name, name) if n in self.tensors), None)

    @property
    def input_size(self) -> int | None:
        """Number of tokens it knows, or of numbers in an input vector; None for images."""
        if self.inputs == "vectors" or self.side == 1:
            return self.tensors["patch"][0] if self.has("patch") else self.width
        return self.vocab

    @property
    def orders(self) -> frozenset[Order]:
        """Orders of norms and sublayers in the blocks."""
        return frozenset(block.order for block in self.blocks.values())

    @property
    def _embedding_norms(self) -> list[bool]:
        return [self.of_stack(stack, "embed_norm.g") is not None for stack in self.stacks]

    @property
    def memory_norm(self) -> tuple[str, ...]:
        """Gain and bias of the norm after an encoder, which every block of a decoder reads."""
        norms = (f"{stack.last_norm}.{p}" for stack in self.stacks[:-1] for p in "gb")
        return tuple(name for name in norms if name in self.tensors)

    def moves(self, name: str) -> bool:
        """Whether a tensor moves with the stream: not with that of audio, whose basis stays."""
        audio = name.startswith("encoder.") or name.endswith(("cross.W_K", "cross.W_V"))
        return not (self.inputs == "audio" and audio)

    @property
    def positions(self) -> tuple[str, ...]:
        """Tables of positions that are added to other tables: not those of audio."""
        own = "encoder.position" if self.inputs == "audio" else ""
        return tuple(n for n in POSITIONS if n in self.tensors and n != own)

    @property
    def added(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tables that are added to each other, the positions of each stack apart (or the last one).

        A vector may move from one of the first to all of the second.
        """
        positions = self.positions
        others = tuple(n for n in ("token", "type") if n in self.tensors)
        return (others, positions) if positions else (others[:-1], others[-1:])

    @property
    def norms_in_residual(self) -> bool:
        """Whether the residual carries the output of a norm, with its gain."""
        return not self.orders <= {"pre", "parallel"} or any(self._embedding_norms)

    @property
    def hides_mean(self) -> bool:
        """Whether LayerNorms read all that blocks write, so that its mean has no effect."""
        after = all(
            stack.final_norm or all(block.order == "post" for block in stack.blocks)
            for stack in self.stacks
        )
        return self.norm == "layer" and after

    @property
    def hides_mean_of_embeddings(self) -> bool:
        """Whether the mean of the embeddings cannot affect the output.

        A post-norm block reads it as it is, unless embeddings have a norm of their own.
        """
        raw = "post" in self.orders and not all(self._embedding_norms)
        return self.hides_mean and not raw

    @property
    def streams(self) -> tuple[tuple[str, ...], ...]:
        """Names of the tensors that read or write each stream on which a group may act.

        With residuals there is one stream, beside that of audio. Without, each sublayer writes one
        of its own; the first, to which fixed positions are added, is none of these.
        """
        if "chain" not in self.orders:
            names = (n for n in (*self.tensors, "head") if not n.startswith(KEPT))
            return (tuple(filter(self.moves, names)),)
        found: list[tuple[str, ...]] = []
        depth = len(self.stacks[0].blocks)
        for i in range(depth):
            readers = [f"{i + 1}.W_{p}" for p in "QKV"] if i + 1 < depth else ["classifier.W_A"]
            found += [(f"{i}.W_O", f"{i}.W_A"), (f"{i}.W_B", f"{i}.b_B", *readers)]
        return tuple(found)

    @property
    def fixed_stream(self) -> bool:
        """Whether the basis of the stream is taken as it is.

        Vectors or positions that no tensor holds are added to it.
        """
        return self.inputs == "vectors" or (self.sinusoids is not None and not self.positions)

    @property
    def stream_group(self) -> StreamGroup:
        """The largest group that acts on the stream once its gains are folded into readers.

        Where the stream is fixed, or the output, there is none. A norm that stands in the residual
        (post-norm, sandwich, after the embedding) or a tied final norm keeps its gain, and only
        permutations respect that; RMS norm takes a sign for each coordinate, LayerNorm one for all
        of them.
        """
        if "chain" in self.orders:
            return "orthogonal fixing ones"
        if self.fixed_stream or self.headless:
            return "none"
        free = not self.tied and not self.norms_in_residual and self.mlm is None
        if self.norm == "rms":
            return "orthogonal" if free else "signed permutation"
        return "orthogonal fixing ones" if free else "permutation and sign"


def axes_of(name: str, rank: int | None = None) -> tuple[str, ...]:
    """The axes of a canonical tensor; raises `KeyError` for an unknown name.

    ``extra.pooler.W`` reads the final stream into an axis of its own, named ``pooler``. The number
    of axes, ``rank``, tells gains of queries and keys under a norm over all heads from others.
    """
    if name.startswith(EXTRA):
        axis, _, part = name.removeprefix(EXTRA).rpartition(".")
        return ("D", axis) if part == "W" else (axis.removesuffix("_norm"),)
    if name in END_AXES:
        return END_AXES[name]
    parts = name.split(".")
    if parts[0] in ("encoder", "decoder"):
        parts = parts[1:]
    if parts[0].isdigit() or parts[0].startswith("{"):
        if parts[1] == "expert":
            parts = parts[2:]
        short = ".".join(parts[1:])
        return ALL_HEADS_AXES[short] if rank == 2 and short in ALL_HEADS_AXES else BLOCK_AXES[short]
    return END_AXES[".".join(parts)]
