"""Which kernels run in one pass of many networks, in what order and with what buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.zoo.architecture import Architecture
from transformer_nfn.zoo.network import sites
from transformer_nfn.zoo.training.backends.kernels.block_backward import (
    attention_backward,
    projections_backward,
    rows_backward,
)
from transformer_nfn.zoo.training.backends.kernels.block_forward import block_forward, embed
from transformer_nfn.zoo.training.backends.kernels.dropout import dropout_bits
from transformer_nfn.zoo.training.backends.kernels.head import classify, spread
from transformer_nfn.zoo.training.backends.kernels.inputs import IMAGES, MEMORY, WORDS
from transformer_nfn.zoo.training.backends.kernels.optimiser import update
from transformer_nfn.zoo.training.backends.kernels.shared import STATS
from transformer_nfn.zoo.training.backends.kernels.tuning import (
    ATTENTION,
    CHUNK,
    EMBED,
    FORWARD,
    PROJECTIONS,
    ROW,
    ROW_TILE,
    SPLIT_FORWARD,
    SPREAD,
    UPDATE_TILE,
    WIDE_ATTENTION,
    WIDE_FORWARD,
    padded,
    tiles,
)
from transformer_nfn.zoo.training.tasks.images import ImageTask
from transformer_nfn.zoo.training.tasks.task import Split, Task
from transformer_nfn.zoo.training.tasks.text import TextTask


def offsets(arch: Architecture) -> dict[str, int]:
    """Where each tensor of `Architecture.layout` begins in a flat row."""
    out, at = {}, 0
    for name, shape in arch.layout.items():
        out[name] = at
        at += math.prod(shape)
    return out


@dataclass(frozen=True)
class Clock:
    """What says which batch is next, on the device, so that a captured pass can be repeated.

    Attributes:
        step: ``int32 [1]``, the batch now.
        steps: ``int32 [networks]``, how many each network has in this epoch.
        order: ``int32 [networks, samples]``, which sample is where (a row for all if one).
        lengths: ``int32 [networks, steps]``, tokens a sample in each batch.
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


class Pass:
    """The kernels over ``networks`` networks and batches of ``batch`` samples.

    Args:
        task: with its data on the device.
        dtype: of activations and of what products multiply: bfloat16 or float32.
        products: how float32 products are done: ``tf32``, ``tf32x3`` (three of them, as exact
            as float32) or ``ieee``.
        longest: tokens a sample has at most.
        train: whether gradients are kept room for.
    """

    def __init__(
        self,
        task: Task,
        networks: int,
        batch: int,
        *,
        dtype: torch.dtype,
        products: str,
        longest: int,
        train: bool,
    ) -> None:
        self.task, self.arch = task, task.arch
        self.networks, self.batch, self.longest = networks, batch, longest
        self.products, self.train = products, train
        self.wide = dtype == torch.float32
        self.tiles = tiles(longest, isinstance(task, ImageTask))
        self.device = next(iter(task.labels.values())).device  # type: ignore[attr-defined]
        self.chunks = -(-batch // CHUNK)
        self.at = offsets(task.arch)
        self.positions = task.arch.positions(self.device)
        self.rows = batch * longest
        D = task.arch.d_model
        shape = (networks, self.rows, D)

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=self.device)

        count, nothing, none = task.arch.blocks, empty(1, dtype=dtype), empty(1)
        self.pooled = empty(networks, batch, D)
        self.loss = empty(self.chunks, networks).zero_()
        self.hits = empty(self.chunks, networks).zero_()
        self.a = self.y = [nothing] * count
        self.z = [nothing] * (count + 1)
        self.stats, self.patches = [none] * count, nothing
        wide = (networks, self.rows, 3 * D)
        self.qkv = [empty(*wide, dtype=dtype) for _ in range(count)]
        if train:
            self.a, self.y = ([empty(*shape, dtype=dtype) for _ in range(count)] for _ in range(2))
            # What LayerNorm gives before each block and after the last.
            self.z = [empty(*shape, dtype=dtype) for _ in range(count + 1)]
            self.stats = [empty(networks, self.rows, STATS.value) for _ in range(count)]
            self.da, self.dx = (empty(*shape, dtype=dtype) for _ in range(2))
            self.dqkv = empty(*wide, dtype=dtype)
            if task.arch.patch:
                wide = (networks, self.rows, padded(task.arch.patch))
                self.patches = empty(*wide, dtype=dtype)
            self.dpooled = empty(networks, batch, D)
            self.grad = empty(self.chunks, networks, task.arch.num_weights)
            words = (networks, sites(task.arch), self.rows)
            self.bits, self.next_bits = (empty(*words, dtype=torch.int32) for _ in range(2))
        else:
            self.dpooled = self.grad = none
            self.bits = self.next_bits = empty(1, dtype=torch.int32)

    def _samples(self, split: Split) -> tuple[list[Tensor], list[Any], dict[str, Any]]:
        """What the first block needs to make its input: tensors, numbers, constants."""
        task, arch = self.task, self.arch
        if isinstance(task, ImageTask):
            images = task.images[split]
            return (
                [images, task.pattern, self.positions],
                [images.shape[2], float(task.white)],
                {
                    "EW": self.at["embedding.W"],
                    "EB": self.at["embedding.b"],
                    "P": arch.patch,
                    "PP": padded(arch.patch),
                    "PADDING": task.padding,
                    "SOURCE": IMAGES.value,
                },
            )
        assert isinstance(task, TextTask)
        tokens = task.tokens[split]
        constants = {"EW": 0, "EB": 0, "P": 0, "PP": 16, "PADDING": 0, "SOURCE": WORDS.value}
        return [tokens, task.vectors, self.positions], [tokens.shape[1], 1.0], constants

    def _block(self, i: int) -> dict[str, Any]:
        """Where the weights of a block lie."""
        names = {"OUT": "W_O", "A": "W_A", "BA": "b_A", "BW": "W_B", "BB": "b_B"}
        return {short: self.at[f"blocks.{i}.{name}"] for short, name in names.items()}

    def forward(
        self, weights: Tensor, clock: Clock, split: Split, scale: Tensor, limit: int = 2**30
    ) -> None:
        """Embeds, runs the blocks, and leaves each chunk's loss and hits."""
        arch, at = self.arch, self.at
        grid = (self.networks, self.chunks)
        common = {"W": arch.num_weights, "S": CHUNK, "D": arch.d_model}
        steps = clock.lengths.shape[1]
        (samples, pattern, positions), sizes, source = self._samples(split)
        embed[grid](
            self.z[0], self.qkv[0], self.stats[0], self.patches, weights, self.bits, clock.step,
            clock.steps, clock.lengths, scale, clock.order, samples, pattern, pattern,
            positions, clock.crop, self.batch, self.rows, steps, _stride(clock.order), *sizes,
            QKV=at["blocks.0.W_QKV"], SITES=sites(arch), R=ROW_TILE, TRAIN=self.train,
            PREC=self.products, **source, **EMBED, **common,
        )  # fmt: skip
        options = WIDE_FORWARD if self.wide else FORWARD
        if self.products == "tf32x3":
            options = SPLIT_FORWARD
        for i in range(arch.blocks):
            following = min(i + 1, arch.blocks - 1)
            for height, shorter in self.tiles:
                block_forward[grid](
                    self.qkv[i], self.a[i], self.y[i], self.stats[i], self.qkv[following],
                    self.stats[following], self.z[i + 1], self.pooled, weights, self.bits,
                    clock.step, clock.steps, clock.lengths, scale, self.batch, self.rows, steps,
                    NEXT=at[f"blocks.{following}.W_QKV"], SITE=1 + 2 * i, SITES=sites(arch),
                    T=height, SHORTER=shorter, FF=arch.d_ff, LAST=i + 1 == arch.blocks,
                    TRAIN=self.train, PREC=self.products, **self._block(i),
                    **options[height], **common,
                )  # fmt: skip
        labels = self.task.labels[split]  # type: ignore[attr-defined]
        classify[grid](
            self.pooled, self.dpooled, clock.order, labels, weights, self.grad, self.loss,
            self.hits, clock.step, clock.steps, clock.lengths, self.batch,
            _stride(clock.order), steps, self.networks, limit, W1=at["classifier.W_1"],
            B1=at["classifier.b_1"], W2=at["classifier.W_2"], B2=at["classifier.b_2"],
            C=arch.classes, CP=padded(arch.classes),
            TRAIN=self.train, num_warps=2, **common,
        )  # fmt: skip

    def draw(self, clock: Clock, threshold: Tensor, *, ahead: bool = False) -> None:
        """Draws dropout's masks of the step, or those of the next into `next_bits`."""
        tile = 256
        grid = (self.networks, sites(self.arch), -(-self.rows // tile))
        dropout_bits[grid](
            self.next_bits if ahead else self.bits, clock.step, clock.steps, clock.lengths,
            clock.drop, threshold, self.batch, self.rows, self.arch.tokens,
            clock.lengths.shape[1], AHEAD=int(ahead), SITES=sites(self.arch),
            D=self.arch.d_model, N=tile, num_warps=4,
        )  # fmt: skip

    def backward(self, weights: Tensor, clock: Clock, split: Split, scale: Tensor) -> None:
        """From the gradient of the mean token that `forward` left to ``grad``, a row a chunk."""
        arch = self.arch
        grid = (self.networks, self.chunks)
        steps = clock.lengths.shape[1]
        _, _, source = self._samples(split)
        common = {"W": arch.num_weights, "SITES": sites(arch), "S": CHUNK, "D": arch.d_model}
        spread[grid](
            self.z[-1], self.dpooled, self.dx, self.stats[-1], self.grad, self.bits, clock.step,
            clock.steps, clock.lengths, scale, self.batch, self.rows, steps, self.networks,
            BB=self.at[f"blocks.{arch.blocks - 1}.b_B"], SITE=2 * arch.blocks, R=ROW_TILE,
            PREC=self.products, **SPREAD, **common,
        )  # fmt: skip
        attention = WIDE_ATTENTION if self.wide else ATTENTION
        for i in reversed(range(arch.blocks)):
            where = self._block(i)
            rows_backward[grid](
                self.a[i], self.y[i], self.dx, self.da, self.stats[i], weights, self.grad,
                self.bits, clock.step, clock.steps, clock.lengths, scale, self.batch, self.rows,
                steps, self.networks, 0, SITE=1 + 2 * i, R=ROW_TILE, FF=arch.d_ff,
                PREC=self.products, **{k: where[k] for k in ("OUT", "A", "BA", "BW")}, **ROW,
                **common,
            )  # fmt: skip
            for height, shorter in self.tiles:
                attention_backward[(2 * self.networks, self.chunks)](
                    self.qkv[i], self.a[i], self.da, self.stats[i], self.dqkv, clock.step,
                    clock.steps, clock.lengths, self.batch, self.rows, steps, S=CHUNK,
                    T=height, SHORTER=shorter, D=arch.d_model, PREC=self.products,
                    **attention[height],
                )  # fmt: skip
            given = source
            if i > 0:
                last_bias = self.at[f"blocks.{i - 1}.b_B"]
                given = source | {"SOURCE": MEMORY.value, "EB": last_bias}
            projections_backward[grid](
                self.z[i], self.dqkv, self.stats[i], self.dx, weights, self.grad, self.bits,
                clock.step, clock.steps, clock.lengths, scale, self.patches, self.batch,
                self.rows, steps, self.networks, 0, QKV=self.at[f"blocks.{i}.W_QKV"],
                SITE=2 * i, R=ROW_TILE, PREC=self.products,
                **{k: given[k] for k in ("EW", "EB", "P", "PP", "SOURCE")}, **PROJECTIONS,
                **common,
            )  # fmt: skip

    def update(
        self,
        weights: Tensor,
        first: Tensor,
        second: Tensor,
        clock: Clock,
        total: Tensor,
        right: Tensor,
    ) -> None:
        """Moves weights and moments by ``grad``; adds the step's loss and hits to the epoch's."""
        count = self.arch.num_weights
        update[(self.networks, -(-count // UPDATE_TILE))](
            weights, self.grad, first, second, clock.coef, self.loss, self.hits, total, right,
            clock.step, clock.steps, self.batch, clock.lengths.shape[1], self.networks,
            CHUNKS=self.chunks, W=count, N=UPDATE_TILE,
        )  # fmt: skip


def _stride(order: Tensor) -> int:
    """From one network's row to the next; nothing where all share one."""
    return 0 if order.shape[0] == 1 else order.shape[1]
