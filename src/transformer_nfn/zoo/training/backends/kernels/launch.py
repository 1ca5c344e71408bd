"""Which kernels run in one pass of many networks, in what order and with what buffers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from transformer_nfn.zoo.training.backends.kernels.arguments import (
    Activations,
    Clock,
    Constants,
    Dropout,
    Gradients,
    Outcome,
    Progress,
    Samples,
    Sizes,
    layout,
)
from transformer_nfn.zoo.training.backends.kernels.block_backward import (
    attention_backward,
    projections_backward,
    rows_backward,
)
from transformer_nfn.zoo.training.backends.kernels.block_forward import block_forward, embed
from transformer_nfn.zoo.training.backends.kernels.dropout import dropout_bits
from transformer_nfn.zoo.training.backends.kernels.head import classify, spread
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
        arch, D = task.arch, task.arch.d_model
        self.task, self.arch = task, arch
        self.networks, self.batch, self.rows = networks, batch, batch * longest
        self.chunks = -(-batch // CHUNK)
        self.tiles = tiles(longest, isinstance(task, ImageTask))
        self.device = next(iter(task.labels.values())).device  # type: ignore[attr-defined]
        self.positions = arch.positions(self.device)
        self.constants = Constants(
            layout(arch), D=D, FF=arch.d_ff, C=arch.classes, CC=padded(arch.classes),
            P=arch.patch, PP=padded(arch.patch), sites=arch.dropout_sites, S=CHUNK, R=ROW_TILE,
            padding=task.padding if isinstance(task, ImageTask) else 0,
            train=train, products=products,
        )  # fmt: skip
        wide = dtype == torch.float32
        self.attention_options = WIDE_ATTENTION if wide else ATTENTION
        self.forward_options = WIDE_FORWARD if wide else FORWARD
        if products == "tf32x3":
            self.forward_options = SPLIT_FORWARD

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=self.device)

        def rows(width: int, *, kept: bool = True) -> Tensor:
            size = (networks, self.rows, width) if kept else (1,)
            return empty(*size, dtype=dtype)

        def block(*, last: bool) -> Activations:
            """Room for a block, or for what is left after the ``last`` one."""
            inside = train and not last
            stats = empty(networks, self.rows, STATS.value) if inside else empty(1)
            return Activations(
                z=rows(D, kept=train), qkv=rows(3 * D, kept=not last), a=rows(D, kept=inside),
                y=rows(D, kept=inside), stats=stats,
            )  # fmt: skip

        self.activations = [block(last=i == arch.blocks) for i in range(arch.blocks + 1)]
        self.patches = rows(padded(arch.patch), kept=train and arch.patch > 0)
        self.outcome = Outcome(
            empty(networks, batch, D),
            empty(self.chunks, networks).zero_(),
            empty(self.chunks, networks).zero_(),
        )
        self.gradients = Gradients(
            pooled=empty(networks, batch, D) if train else empty(1),
            x=rows(D, kept=train), a=rows(D, kept=train), qkv=rows(3 * D, kept=train),
            weights=empty(self.chunks, networks, arch.num_weights) if train else empty(1),
        )  # fmt: skip
        words = (networks, arch.dropout_sites, self.rows) if train else (1,)
        self.bits, self.next_bits = (empty(*words, dtype=torch.int32) for _ in range(2))

    def _samples(self, split: Split) -> Samples:
        """What the samples of a split are made from."""
        task = self.task
        if isinstance(task, ImageTask):
            stored, table, white = task.images[split], task.pattern, float(task.white)
        else:
            assert isinstance(task, TextTask)
            stored, table, white = task.tokens[split], task.vectors, 1.0
        return Samples(
            stored, table, self.positions, task.labels[split], wide=stored.shape[-1], white=white
        )

    def _sizes(self, clock: Clock) -> Sizes:
        shared = clock.order.shape[0] == 1
        return Sizes(
            self.batch, self.rows, self.networks, steps=clock.lengths.shape[1],
            samples=0 if shared else clock.order.shape[1], tokens=self.arch.tokens,
        )  # fmt: skip

    def forward(
        self, weights: Tensor, clock: Clock, split: Split, scale: Tensor, limit: int = 2**30
    ) -> None:
        """Embeds, runs the blocks, and leaves each chunk's loss and hits."""
        grid = (self.networks, self.chunks)
        const, sizes, samples = self.constants, self._sizes(clock), self._samples(split)
        dropout = Dropout(self.bits, scale)
        embed[grid](
            self.activations[0], self.patches, weights, dropout, clock, samples, sizes, const,
            **EMBED,
        )  # fmt: skip
        for i, (acts, next_acts) in enumerate(pairwise(self.activations)):
            for tile in self.tiles:
                block_forward[grid](
                    acts, next_acts, self.outcome.pooled, weights, dropout, clock, sizes, const,
                    BLOCK=i, TILE=tile, **self.forward_options[tile.tokens],
                )  # fmt: skip
        classify[grid](
            self.outcome, self.gradients, weights, clock, samples, sizes, limit, const,
            num_warps=2,
        )  # fmt: skip

    def draw(self, clock: Clock, threshold: Tensor, *, ahead: bool = False) -> None:
        """Draws dropout's masks of the step, or those of the next into `next_bits`."""
        bits, tile = self.next_bits if ahead else self.bits, 256
        grid = (self.networks, self.arch.dropout_sites, -(-self.rows // tile))
        dropout_bits[grid](
            bits, threshold, clock, self._sizes(clock), self.constants, AHEAD=int(ahead), N=tile,
            num_warps=4,
        )  # fmt: skip

    def backward(self, weights: Tensor, clock: Clock, scale: Tensor) -> None:
        """From the gradient of the mean token that `forward` left to that of the weights."""
        grid = (self.networks, self.chunks)
        const, sizes, grads = self.constants, self._sizes(clock), self.gradients
        dropout = Dropout(self.bits, scale)
        spread[grid](*self.activations[-2:], grads, dropout, clock, sizes, const, **SPREAD)
        for i in reversed(range(self.arch.blocks)):
            acts = self.activations[i]
            rows_backward[grid](acts, grads, weights, dropout, clock, sizes, const, BLOCK=i, **ROW)
            for tile in self.tiles:
                attention_backward[(2 * self.networks, self.chunks)](
                    acts, grads, clock, sizes, const, TILE=tile,
                    **self.attention_options[tile.tokens],
                )  # fmt: skip
            projections_backward[grid](
                acts, grads, self.patches, weights, dropout, clock, sizes, const, BLOCK=i,
                **PROJECTIONS,
            )  # fmt: skip

    def update(self, weights: Tensor, progress: Progress, clock: Clock) -> None:
        """Moves weights and moments by the gradient; adds the step's loss and hits."""
        count = self.arch.num_weights
        update[(self.networks, -(-count // UPDATE_TILE))](
            weights, progress, self.gradients, self.outcome, clock, self._sizes(clock),
            self.constants, CHUNKS=self.chunks, N=UPDATE_TILE,
        )  # fmt: skip
