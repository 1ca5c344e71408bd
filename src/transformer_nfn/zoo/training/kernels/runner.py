"""The kernels of one pass in order, and epochs captured as CUDA graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.zoo.training.kernels.arguments import (
    CHUNK,
    UPDATE_TILE,
    Activations,
    Clock,
    Constants,
    Dropout,
    Gradients,
    Options,
    Outcome,
    Progress,
    Samples,
    Sizes,
    launch_options,
    layout,
    padded,
)
from transformer_nfn.zoo.training.kernels.backward import (
    attention_backward,
    mlp_gradients,
    projections_backward,
    rows_backward,
)
from transformer_nfn.zoo.training.kernels.forward import (
    attention_forward,
    block_forward,
    embed,
    rows_forward,
)
from transformer_nfn.zoo.training.kernels.head import classify, spread, update
from transformer_nfn.zoo.training.kernels.shared import dropout_bits
from transformer_nfn.zoo.training.kernels.texts import (
    text_attention_backward,
    text_attention_forward,
)
from transformer_nfn.zoo.training.steps import Epoch
from transformer_nfn.zoo.training.tasks import ImageTask, Split, Task, TextTask


class Pass:
    """The kernels of one pass of ``networks`` networks over batches of ``batch`` samples.

    Args:
        task: with its data on the device.
        dtype: of activations and operands of products, bfloat16 or float32.
        products: precision of float32 products: ``tf32``, ``tf32x3`` (three of them, as exact
            as float32) or ``ieee``.
        longest: maximum tokens of a sample.
        train: whether to allocate gradients.

    Attributes:
        chunk: samples per program, whose weight gradients are summed on the chip.
    """

    chunk = CHUNK

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
        network, D = task.sizes, task.sizes.d_model
        self.task, self.network = task, network
        self.texts = isinstance(task, TextTask)
        self.networks, self.batch, self.rows = networks, batch, batch * longest
        self.chunks = -(-batch // self.chunk)
        self.device = next(iter(task.labels.values())).device
        self.positions = network.positions(self.device)
        self.constants = Constants(
            layout(network), D=D, DD=padded(D), DDD=padded(3 * D), F=network.d_ff,
            FF=padded(network.d_ff), H=network.heads, J=network.d_head, JJ=padded(network.d_head),
            C=network.classes, CC=padded(network.classes), P=network.patch,
            PP=padded(network.patch), T=network.tokens, TT=padded(network.tokens),
            sites=network.dropout_sites, words=-(-D // 32),
            stats=network.heads * (1 if network.patch else 2) + 3, S=self.chunk,
            padding=task.padding if isinstance(task, ImageTask) else 0,
            train=train, products=products,
        )  # fmt: skip
        self.options = launch_options(self.constants, wide=dtype == torch.float32)

        self.outcome = Outcome(
            self._empty(networks, batch, D),
            self._empty(self.chunks, networks).zero_(),
            self._empty(self.chunks, networks).zero_(),
        )
        words = (networks, network.dropout_sites, self.constants.words, self.rows)
        self.bits, self.next_bits = (
            self._empty(*(words if train else (1,)), dtype=torch.int32) for _ in range(2)
        )
        nothing = self._empty(1)
        self.gradients = Gradients(nothing, nothing, nothing, nothing, nothing)
        if train:
            self.gradients = self.gradients._replace(
                pooled=self._empty(networks, batch, D),
                weights=self._empty(self.chunks, networks, network.num_weights),
            )
        self._allocate(dtype)

    def _empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=self.device)

    def _allocate(self, dtype: torch.dtype) -> None:
        """Allocate what one kernel writes and another reads."""
        network, D, train = self.network, self.network.d_model, self.constants.train

        def rows(width: int, *, kept: bool = True) -> Tensor:
            size = (self.networks, self.rows, width) if kept else (1,)
            return self._empty(*size, dtype=dtype)

        def block(*, last: bool) -> Activations:
            """Buffers of a block, or of the output of the ``last`` one."""
            inside = train and not last
            stats = (self.networks, self.rows, self.constants.stats) if inside else (1,)
            return Activations(
                z=rows(D, kept=train), qkv=rows(3 * D, kept=not last),
                a=rows(D, kept=inside or (self.texts and not last)), y=rows(D, kept=inside),
                stats=self._empty(*stats),
            )  # fmt: skip

        self.activations = [block(last=i == network.blocks) for i in range(network.blocks + 1)]
        self.patches = rows(padded(network.patch), kept=train and network.patch > 0)
        self.gradients = self.gradients._replace(
            x=rows(D, kept=train), a=rows(D, kept=train), qkv=rows(3 * D, kept=train)
        )

    def _samples(self, split: Split) -> Samples:
        """The data of a split."""
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
            samples=0 if shared else clock.order.shape[1], tokens=self.network.tokens,
        )  # fmt: skip

    def _heads(self, options: Options) -> tuple[int, int]:
        """Programs of an attention kernel: heads, and parts of a batch."""
        samples = options.get("SAMPLES", self.chunk)
        return self.network.heads * self.networks, -(-self.batch // samples)

    def forward(
        self, weights: Tensor, clock: Clock, split: Split, scale: Tensor, limit: int = 2**30
    ) -> None:
        """Compute each chunk's loss and hits."""
        grid = (self.networks, self.chunks)
        const, sizes, samples = self.constants, self._sizes(clock), self._samples(split)
        dropout = Dropout(self.bits, scale)
        embed[grid](
            self.activations[0], self.patches, weights, dropout, clock, samples, sizes, const,
            **self.options.other.embed,
        )  # fmt: skip
        rest = self.options.other.rows_forward if const.train or self.texts else None
        attention = text_attention_forward if self.texts else attention_forward
        options = self.options.forward
        for i, (acts, next_acts) in enumerate(pairwise(self.activations)):
            if rest is None:
                block_forward[grid](
                    acts, next_acts, self.outcome.pooled, weights, dropout, clock, sizes, const,
                    BLOCK=i, **options,
                )  # fmt: skip
                continue
            attention[self._heads(options)](acts, clock, sizes, const, **options)
            rows_forward[grid](
                acts, next_acts, self.outcome.pooled, weights, dropout, clock, sizes, const,
                BLOCK=i, **rest,
            )  # fmt: skip
        classify[grid](
            self.outcome, self.gradients, weights, clock, samples, sizes, limit, const,
            **self.options.other.classify,
        )  # fmt: skip

    def draw(self, clock: Clock, threshold: Tensor, *, ahead: bool = False) -> None:
        """Draw the dropout masks of the step, or those of the next into `next_bits`."""
        bits, tile = self.next_bits if ahead else self.bits, 256
        grid = (self.networks, self.network.dropout_sites, -(-self.rows // tile))
        dropout_bits[grid](
            bits, threshold, clock, self._sizes(clock), self.constants, AHEAD=int(ahead), N=tile,
            num_warps=4,
        )  # fmt: skip

    def backward(self, weights: Tensor, clock: Clock, scale: Tensor) -> None:
        """Gradient of the weights, from the gradient of the mean token that `forward` stored."""
        grid = (self.networks, self.chunks)
        const, sizes, grads = self.constants, self._sizes(clock), self.gradients
        dropout, options = Dropout(self.bits, scale), self.options.other
        attention = text_attention_backward if self.texts else attention_backward
        spread[grid](*self.activations[-2:], grads, dropout, clock, sizes, const, **options.spread)
        for i in reversed(range(self.network.blocks)):
            acts = self.activations[i]
            rows_backward[grid](
                acts, grads, weights, dropout, clock, sizes, const, BLOCK=i, **options.rows
            )
            if options.mlp is not None:
                parts = -(-self.network.d_ff // options.mlp["NEURONS"])
                mlp_gradients[(parts * self.networks, self.chunks)](
                    acts, grads, weights, clock, sizes, const, BLOCK=i, **options.mlp
                )
            attention[self._heads(self.options.attention)](
                acts, grads, clock, sizes, const, **self.options.attention
            )
            projections_backward[grid](
                acts, grads, self.patches, weights, dropout, clock, sizes, const, BLOCK=i,
                **options.projections,
            )  # fmt: skip

    def update(self, weights: Tensor, progress: Progress, clock: Clock) -> None:
        """Update weights and moments by the gradient; add the step's loss and hits."""
        count = self.network.num_weights
        update[(self.networks, -(-count // UPDATE_TILE))](
            weights, progress, self.gradients, self.outcome, clock, self._sizes(clock),
            self.constants, CHUNKS=self.chunks, N=UPDATE_TILE,
        )  # fmt: skip


# Past the last step of any epoch.
OVER = 2**30


class FusedRunner:
    """A `steps.Runner` that replays captured steps; see `steps.TorchRunner` for the arguments.

    Args:
        precision: ``bf16`` or ``tf32`` for products in training (``float32`` for tests). The
            held-out split is evaluated in tf32, the test split as exactly as float32.
        kind: the kernels that train.
    """

    def __init__(
        self, task: Task, weights: Tensor, threshold: Tensor, precision: str, batch: int,
        kind: type[Pass] = Pass,
    ) -> None:  # fmt: skip
        self.task, self.batch, self.kind = task, batch, kind
        self.weights = weights.contiguous()
        self.progress = Progress(
            torch.zeros_like(self.weights),
            torch.zeros_like(self.weights),
            torch.zeros(len(weights), device=weights.device),
            torch.zeros(len(weights), device=weights.device),
        )
        self.threshold = threshold.contiguous()
        self.scale = 65536 / (65536 - threshold.to(torch.float32))
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.products = "ieee" if precision == "float32" else "tf32"
        self.clock: Clock | None = None
        self.buffers: Pass | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.side = torch.cuda.Stream() if weights.is_cuda else None

    def epoch(self, epoch: Epoch) -> tuple[Tensor, Tensor]:
        """Train one epoch; the sum of the steps' mean losses and the hits of each network."""
        self._set(self._clock(epoch))
        assert self.clock is not None
        self.progress.loss.zero_()
        self.progress.hits.zero_()
        steps = int(epoch.steps.max())
        if self.weights.is_cuda:
            self._capture()
        self.clock.step.zero_()
        self._pass().draw(self.clock, self.threshold)
        # The graph has two steps; a step past the end changes nothing.
        for _ in range(-(-steps // 2)):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._two_steps()
        return self.progress.loss.clone(), self.progress.hits.clone()

    def _clock(self, epoch: Epoch) -> Clock:
        device, steps = self.weights.device, int(epoch.steps.max())
        order = epoch.order[:, : steps * self.batch].to(torch.int32).contiguous()
        lengths = self._lengths(order, "train")
        return Clock(
            torch.zeros(1, dtype=torch.int32, device=device),
            epoch.steps.to(device=device, dtype=torch.int32),
            order,
            lengths,
            lengths.argsort(stable=True, dim=0, descending=True).T.to(torch.int32).contiguous(),
            epoch.crop.contiguous(),
            epoch.drop.contiguous(),
            epoch.coef.contiguous(),
        )

    def _lengths(self, order: Tensor, split: Split) -> Tensor:
        """Tokens per sample of each batch: text is padded to the longest of its batch."""
        runs, steps = len(order), order.shape[1] // self.batch
        if not isinstance(self.task, TextTask):
            full = torch.full((runs, steps), self.task.sizes.tokens, dtype=torch.int32)
            return full.to(order.device)
        counts = self.task.counts[split][order.long()].view(runs, steps, self.batch)
        return counts.amax(2).clamp(min=1).to(torch.int32)

    def _set(self, clock: Clock) -> None:
        """Copy the data of an epoch to where the captured kernels read them."""
        if self.clock is None or self.clock.order.shape != clock.order.shape:
            self.clock, self.graph = clock, None
            return
        for captured, new in zip(self.clock, clock, strict=True):
            captured.copy_(new)

    def _longest(self, split: Split) -> int:
        if isinstance(self.task, TextTask):
            return max(1, int(self.task.counts[split].max()))
        return self.task.sizes.tokens

    def _capture(self) -> None:
        if self.graph is not None:
            return
        assert self.clock is not None
        # With the clock past the end, every kernel is compiled but changes nothing.
        self.clock.step.fill_(OVER)
        self._two_steps()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(priority=-1)):
            self._two_steps()

    def _pass(self) -> Pass:
        if self.buffers is None:
            self.buffers = self.kind(
                self.task, len(self.weights), self.batch, dtype=self.dtype,
                products=self.products, longest=self._longest("train"), train=True,
            )  # fmt: skip
        return self.buffers

    def _two_steps(self) -> None:
        """Two steps of every network, after which `Pass.bits` is the same buffer again."""
        assert self.clock is not None
        one, clock = self._pass(), self.clock
        for _ in range(2):
            with self._beside():
                one.draw(clock, self.threshold, ahead=True)
            one.forward(self.weights, clock, "train", self.scale)
            one.backward(self.weights, clock, self.scale)
            one.update(self.weights, self.progress, clock)
            if self.side is not None:
                torch.cuda.current_stream().wait_stream(self.side)
            one.bits, one.next_bits = one.next_bits, one.bits
            clock.step.add_(1)

    def _beside(self) -> AbstractContextManager[Any]:
        """Stream that draws the next step's masks: on a GPU beside this step."""
        if self.side is None:
            return nullcontext()
        self.side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.side)

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on a split."""
        products = self.products
        if split == "test" and products == "tf32":
            products = "tf32x3"
        n, device = self.task.num_samples[split], weights.device
        steps = -(-n // self.batch)
        index = torch.arange(steps * self.batch, device=device).clamp(max=max(n - 1, 0))
        order = index.to(torch.int32)[None]
        weights = weights.contiguous()
        loss = torch.zeros(len(weights), device=device)
        hits = torch.zeros_like(loss)
        one = Pass(
            self.task, len(weights), self.batch, dtype=torch.float32, train=False,
            products=products, longest=self._longest(split),
        )  # fmt: skip
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        clock = Clock(
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.full((len(weights),), steps, dtype=torch.int32, device=device),
            order,
            self._lengths(order, split).expand(len(weights), -1).contiguous(),
            nothing,
            nothing,
            nothing,
            nothing,
        )
        for step in range(steps):
            clock = clock._replace(step=torch.full_like(clock.step, step))
            one.forward(weights, clock, split, self.scale, limit=n)
            loss += one.outcome.loss.sum(0)
            hits += one.outcome.hits.sum(0)
        return loss, hits
