"""Forward and backward in CUDA C++ that keep a sample's activations on the chip.

They replace those of `runner.Pass` for the paper's networks on images; dropout masks, classifier
and update are its Triton kernels. docs/on-chip.md derives the schedule.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from transformer_nfn.zoo.training.kernels import nvrtc
from transformer_nfn.zoo.training.kernels.arguments import Clock
from transformer_nfn.zoo.training.kernels.head import classify
from transformer_nfn.zoo.training.kernels.runner import Pass
from transformer_nfn.zoo.training.tasks import ImageTask, Split

SOURCE = Path(__file__).with_suffix(".cu")
HEADER = Path(__file__).with_suffix(".cuh")
THREADS = {"forward": 512, "backward_first": 384, "backward_middle": 384, "backward_last": 384}
# Nearly all that a block of threads can have (227 KB); there is one on a multiprocessor.
SHARED_BYTES = 230400


class Step(ctypes.Structure):
    """Argument of every kernel, as in on_chip.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "weights", "step", "steps", "order", "crop", "bits", "scale", "images", "table",
            "positions", "dpooled", "kept", "between", "stats", "pooled", "gradients",
        )),
        *((name, ctypes.c_int) for name in (
            "batch", "networks", "max_steps", "samples", "wide", "block",
        )),
        ("white", ctypes.c_float),
    )  # fmt: skip


class Kernels(Protocol):
    """Compiled kernels."""

    def launch(self, name: str, grid: tuple[int, int], argument: Step) -> None:
        """Launch a kernel."""
        ...


@functools.cache
def kernels(defines: tuple[str, ...]) -> Kernels:
    """The kernels for these sizes, compiled for the current device."""
    major, minor = torch.cuda.get_device_capability()
    source = HEADER.read_text() + SOURCE.read_text()
    binary = nvrtc.compiled(source, defines, f"sm_{major}{minor}a")
    return nvrtc.Module(binary, SHARED_BYTES, THREADS)


class OnChipPass(Pass):
    """A `Pass` for training whose forward and backward are the kernels of on_chip.cu.

    Attributes:
        chunk: samples whose weight gradient a block of threads sums; the classifier's kernel has
            as many, and would spill registers with 128.
    """

    chunk = 64

    def _allocate(self, dtype: torch.dtype) -> None:
        """Allocate what one kernel writes and another reads; compile the kernels."""
        sizes, task = self.network, self.task
        assert isinstance(task, ImageTask)
        assert dtype == torch.bfloat16
        self.table = task.pattern.to(torch.int32).contiguous()
        rows = -(-sizes.tokens // 8) * 8
        self.kept, self.between = (
            self._empty(self.networks, self.batch, count, rows * 16, dtype=torch.int32)
            for count in (3 * sizes.blocks + 1, 1)
        )
        stats = (sizes.heads + 2) * sizes.blocks + 1
        self.stats = self._empty(self.networks, self.batch, stats, -(-rows // 32) * 32)
        defines = {
            "TOKENS": sizes.tokens, "PATCH": sizes.patch, "PADDING": task.padding,
            "CLASSES": sizes.classes, "BLOCKS": sizes.blocks, "CHUNK": self.chunk,
        }  # fmt: skip
        self.kernels = self.compile(tuple(f"-D{name}={value}" for name, value in defines.items()))

    def compile(self, defines: tuple[str, ...]) -> Kernels:
        """The kernels for these sizes."""
        return kernels(defines)

    def _step(self, weights: Tensor, clock: Clock, scale: Tensor, block: int) -> Step:
        sizes, samples = self._sizes(clock), self._samples("train")
        tensors = dict(
            weights=weights, step=clock.step, steps=clock.steps, order=clock.order,
            crop=clock.crop, bits=self.bits, scale=scale, images=samples.stored,
            table=self.table, positions=samples.positions, dpooled=self.gradients.pooled,
            kept=self.kept, between=self.between, stats=self.stats, pooled=self.outcome.pooled,
            gradients=self.gradients.weights,
        )  # fmt: skip
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        return Step(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            batch=self.batch, networks=self.networks, max_steps=sizes.steps,
            samples=sizes.samples, wide=samples.wide, block=block, white=samples.white,
        )  # fmt: skip

    def launch(
        self, name: str, weights: Tensor, clock: Clock, scale: Tensor, block: int = 0
    ) -> None:
        """Launch one kernel."""
        step = self._step(weights, clock, scale, block)
        self.kernels.launch(name, (self.networks, self.chunks), step)

    def forward(
        self, weights: Tensor, clock: Clock, split: Split, scale: Tensor, limit: int = 2**30
    ) -> None:
        """Compute each chunk's loss and hits."""
        self.launch("forward", weights, clock, scale)
        classify[(self.networks, self.chunks)](
            self.outcome, self.gradients, weights, clock, self._samples(split),
            self._sizes(clock), limit, self.constants, num_warps=8,
        )  # fmt: skip

    def backward(self, weights: Tensor, clock: Clock, scale: Tensor) -> None:
        """Gradient of the weights, from the gradient of the mean token that `forward` stored."""
        last = self.network.blocks - 1
        for block in reversed(range(last + 1)):
            name = "first" if block == 0 else "last" if block == last else "middle"
            self.launch(f"backward_{name}", weights, clock, scale, block)
