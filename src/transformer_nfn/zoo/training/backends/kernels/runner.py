"""Epochs of many networks by the fused kernels, whole steps captured as one CUDA graph."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.zoo.training.backends.kernels.arguments import Clock, Progress
from transformer_nfn.zoo.training.backends.kernels.launch import Pass
from transformer_nfn.zoo.training.epochs import Epoch
from transformer_nfn.zoo.training.tasks import Split, Task
from transformer_nfn.zoo.training.tasks.text import TextTask

# A step no epoch has.
OVER = 2**30


class FusedRunner:
    """An `epochs.Runner`; see `steps.TorchStepper` for the arguments.

    Args:
        precision: ``bf16`` or ``tf32`` for products in training (``float32`` for tests).
            What chooses the best epoch is evaluated in tf32, the test split as exactly as
            float32, so that recorded numbers are those of the stored weights.
    """

    def __init__(
        self, task: Task, weights: Tensor, threshold: Tensor, precision: str, batch: int
    ) -> None:
        self.task, self.batch = task, batch
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
        """Trains one epoch; of each network the sum of its steps' mean losses, and its hits."""
        self._set(self._clock(epoch))
        assert self.clock is not None
        self.progress.loss.zero_()
        self.progress.hits.zero_()
        steps = int(epoch.steps.max())
        if self.weights.is_cuda:
            self._capture()
        self.clock.step.zero_()
        self._pass().draw(self.clock, self.threshold)
        # The graph holds two steps; one beyond the end changes nothing.
        for _ in range(-(-steps // 2)):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._two_steps()
        return self.progress.loss.clone(), self.progress.hits.clone()

    def _clock(self, epoch: Epoch) -> Clock:
        device, steps = self.weights.device, int(epoch.steps.max())
        order = epoch.order[:, : steps * self.batch].to(torch.int32).contiguous()
        return Clock(
            torch.zeros(1, dtype=torch.int32, device=device),
            epoch.steps.to(device=device, dtype=torch.int32),
            order,
            self._lengths(order, "train"),
            epoch.crop.contiguous(),
            epoch.drop.contiguous(),
            epoch.coef.contiguous(),
        )

    def _lengths(self, order: Tensor, split: Split) -> Tensor:
        """Tokens a sample in each batch: text is padded to the longest of its batch."""
        runs, steps = len(order), order.shape[1] // self.batch
        if not isinstance(self.task, TextTask):
            full = torch.full((runs, steps), self.task.arch.tokens, dtype=torch.int32)
            return full.to(order.device)
        counts = self.task.counts[split][order.long()].view(runs, steps, self.batch)
        return counts.amax(2).clamp(min=1).to(torch.int32)

    def _set(self, clock: Clock) -> None:
        """Puts an epoch's numbers where the captured kernels read them."""
        if self.clock is None or self.clock.order.shape != clock.order.shape:
            self.clock, self.graph = clock, None
            return
        for captured, new in zip(self.clock, clock, strict=True):
            captured.copy_(new)

    def _longest(self, split: Split) -> int:
        if isinstance(self.task, TextTask):
            return max(1, int(self.task.counts[split].max()))
        return self.task.arch.tokens

    def _capture(self) -> None:
        if self.graph is not None:
            return
        assert self.clock is not None
        # With the clock past the end every kernel is compiled and changes nothing.
        self.clock.step.fill_(OVER)
        self._two_steps()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(priority=-1)):
            self._two_steps()

    def _pass(self) -> Pass:
        if self.buffers is None:
            self.buffers = Pass(
                self.task, len(self.weights), self.batch, dtype=self.dtype,
                products=self.products, longest=self._longest("train"), train=True,
            )  # fmt: skip
        return self.buffers

    def _two_steps(self) -> None:
        """Two steps of every network, after which `Pass.bits` lies where it lay."""
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
        """Where the next step's masks are drawn: on a GPU in what this step leaves idle."""
        if self.side is None:
            return nullcontext()
        self.side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.side)

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on a split."""
        products = self.products
        if split == "test" and products == "tf32":
            products = "tf32x3"
        n, device = self.task.sizes[split], weights.device
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
        )
        for step in range(steps):
            clock = clock._replace(step=torch.full_like(clock.step, step))
            one.forward(weights, clock, split, self.scale, limit=n)
            loss += one.outcome.loss.sum(0)
            hits += one.outcome.hits.sum(0)
        return loss, hits
