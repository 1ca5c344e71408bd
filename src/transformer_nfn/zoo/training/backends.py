"""The native C step, and the choice of the code that computes a step."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.known_tasks import HEADS, HIDDEN, WIDTH
from transformer_nfn.native_code import CompiledSizes, load_for
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.kernels import nvrtc
from transformer_nfn.zoo.training.steps import (
    Epoch,
    Runner,
    TorchRunner,
    evaluate_batches,
)
from transformer_nfn.zoo.training.tasks import Batch, Split, Task

NATIVE = Path(__file__).parent / "native"
PAPER_SIZES = CompiledSizes()
FUSED_WIDTHS = (16, 32, 48, 64)
PATHS = ("auto", "native", "torch", "compiled", "fused", "on-chip")
SAMPLES_AT_ONCE = 1024
"""Training samples of a network whose inputs are in memory together."""
NO_NVRTC = "NVRTC, which compiles the on-chip kernels, is not installed"
NO_MEMORY = "the native step could not allocate its scratch memory"


@functools.cache
def library(sizes: CompiledSizes = PAPER_SIZES) -> tuple[ctypes.CDLL | None, str]:
    """The C step compiled for these sizes, or None and the reason."""
    return load_for(sizes, [NATIVE / "step.c", NATIVE / "pass.h"], "step", _declare)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    i, pointer = ctypes.c_int, ctypes.c_void_p
    lib.tnfn_train.argtypes = [
        *[i] * 5, *[pointer] * 4, i, pointer, ctypes.c_int32, ctypes.c_float, *[pointer] * 7
    ]  # fmt: skip
    lib.tnfn_train.restype = i
    lib.tnfn_evaluate.argtypes = [*[i] * 5, *[pointer] * 6]
    lib.tnfn_evaluate.restype = i
    return lib


def why_not(sizes: NetworkSizes | None, device: str, precision: str = "float32") -> str:
    """Why the native step cannot be used; empty if it can."""
    if "cuda" in device:
        return "the native step is for the CPU"
    if precision != "float32":
        return f"the native step computes in float32, not {precision}"
    if sizes is None:
        return library()[1]
    if sizes.d_model % 4 or sizes.d_ff % 4:
        return (
            f"the native step is for widths that are multiples of 4, not {sizes.d_model} and "
            f"{sizes.d_ff} neurons"
        )
    if sizes.classes > 16:
        return f"the native step is for at most 16 classes, not {sizes.classes}"
    return _library(sizes)[1]


def _library(sizes: NetworkSizes) -> tuple[ctypes.CDLL | None, str]:
    return library(CompiledSizes(sizes.d_model, sizes.heads, sizes.d_ff, sizes.blocks))


class NativeRunner:
    """A `steps.Runner` in C: every network makes many steps before the next one's turn.

    Args:
        task: with its data on the CPU.
        weights: initial weights ``[networks, weights]``.
        threshold: ``int32 [networks]``, see `randomness.dropout_threshold`.
        batch: samples per step.

    Attributes:
        weights: ``[networks, weights]``, updated in place.
        first, second: moments, ``[networks, weights]``.
    """

    def __init__(self, task: Task, weights: Tensor, threshold: Tensor, batch: int) -> None:
        sizes = task.sizes
        problem = why_not(sizes, str(weights.device))
        if problem or (lib := _library(sizes)[0]) is None:
            raise ZooError(problem)
        self.task, self.sizes, self.lib, self.batch = task, sizes, lib, batch
        self.weights = weights.contiguous()
        self.first = torch.zeros_like(self.weights)
        self.second = torch.zeros_like(self.weights)
        self.gradient = torch.empty_like(self.weights[0])
        self.threshold = threshold.tolist()
        self.scale = (65536 / (65536 - threshold.to(torch.float32))).tolist()
        self.positions = sizes.positions()

    def epoch(self, epoch: Epoch) -> tuple[Tensor, Tensor]:
        """Train one epoch; the sum of the steps' mean losses and the hits of each network."""
        total = torch.zeros(len(self.weights))
        hits = torch.zeros(len(self.weights))
        at_once = max(1, SAMPLES_AT_ONCE // self.batch)
        for network, steps in enumerate(epoch.steps.tolist()):
            order = epoch.order[network, : steps * self.batch].view(steps, self.batch)
            for start in range(0, steps, at_once):
                part = slice(start, min(start + at_once, steps))
                batches = self.task.batch("train", order[part], epoch.crop[network, part])
                drop, coef = epoch.drop[network, part], epoch.coef[network, part]
                loss, hit = self._train(network, batches, drop, coef)
                total[network] += loss.sum() / self.batch
                hits[network] += hit.sum()
        return total, hits

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on a split."""
        return evaluate_batches(self.task, split, self.batch, weights, self._evaluate)

    def _train(
        self, network: int, batches: Batch, keys: Tensor, coef: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Train a network on one batch after another; summed loss and hits of each."""
        inputs, labels = batches.inputs.contiguous(), batches.labels.contiguous()
        keys, coef = keys.contiguous(), coef.contiguous()
        steps, B, T, _ = inputs.shape
        loss, hits = torch.empty(steps), torch.empty(steps, dtype=torch.int64)
        weights, first, second = (x[network] for x in (self.weights, self.first, self.second))
        failed = self.lib.tnfn_train(
            steps, B, T, self.sizes.patch, self.sizes.classes,
            *map(_at, (inputs, labels, batches.lengths, self.positions)), self.sizes.tokens,
            _at(keys), self.threshold[network], self.scale[network], _at(coef),
            *map(_at, (weights, self.gradient, first, second, loss, hits)),
        )  # fmt: skip
        if failed:
            raise MemoryError(NO_MEMORY)
        return loss, hits

    def _evaluate(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on one shared batch."""
        if weights.dtype != torch.float32:
            raise ZooError(f"the native step reads float32 weights, found {weights.dtype}")
        weights, inputs = weights.contiguous(), batch.inputs.contiguous()
        labels = batch.labels.contiguous()
        networks, (_, B, T, _) = len(weights), inputs.shape
        loss, hits = torch.empty(networks), torch.empty(networks, dtype=torch.int64)
        failed = self.lib.tnfn_evaluate(
            networks, B, T, self.sizes.patch, self.sizes.classes,
            *map(_at, (inputs, labels, self.positions, weights, loss, hits)),
        )  # fmt: skip
        if failed:
            raise MemoryError(NO_MEMORY)
        return loss, hits


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def describe_path(
    path: str, device: str, sizes: NetworkSizes | None = None, precision: str = "float32"
) -> tuple[str, str]:
    """The code that computes a step, and a note for the user.

    ``auto`` is ``fused`` on CUDA if Triton is installed and products are in bf16 or tf32, else
    ``compiled``; on an H100 or H200 it is ``on-chip`` for the paper's networks on images in bf16.
    On the CPU it is ``native`` if there is a C compiler, else ``torch``, several times slower.

    >>> describe_path("torch", "cpu")
    ('torch', 'steps by plain PyTorch on cpu')
    """
    if path not in PATHS:
        raise ZooError(f"path must be one of {', '.join(PATHS)}, found '{path}'")
    reason = why_not(sizes, device, precision) if path in ("auto", "native") else ""
    unfused = why_not_fused(sizes, device, precision)
    off_chip = unfused or why_not_on_chip(sizes, device, precision)
    problems = {"native": reason, "fused": unfused, "on-chip": off_chip}
    if problem := problems.get(path):
        raise ZooError(f"path {path} is not possible: {problem}")
    if path == "auto":
        if "cuda" in device:
            path, reason = ("compiled", unfused) if unfused else ("fused", "")
            if not off_chip:
                path = "on-chip"
            elif off_chip == NO_NVRTC:
                reason = off_chip
            if importlib.util.find_spec("triton") is None:
                path = "torch"
        else:
            path = "torch" if reason else "native"
    words = {
        "native": "steps by the compiled C code",
        "torch": "steps by plain PyTorch",
        "compiled": "steps by torch.compile",
        "fused": "steps by the fused kernels",
        "on-chip": "steps by the on-chip kernels",
    }[path]
    because = f" ({reason}; builds are slower so)" if reason else ""
    return path, f"{words} on {device}{because}"


def why_not_fused(sizes: NetworkSizes | None, device: str, precision: str) -> str:
    """Why the fused kernels cannot be used; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if "cuda" not in device:
        return "the fused kernels are for CUDA"
    if precision == "float32":
        return "the fused kernels multiply in bf16 or tf32, not float32 (see --precision)"
    if sizes is not None:
        if sizes.d_model not in FUSED_WIDTHS or sizes.heads > 8 or sizes.d_ff > 128:
            return (
                "the fused kernels are for widths 16, 32, 48 and 64 with at most 8 heads and 128 "
                f"neurons, not for {sizes.group}, {sizes.d_ff} neurons"
            )
        if sizes.classes > 64 or sizes.patch > 64:
            return "the fused kernels are for at most 64 classes and 64 pixels a patch"
    return ""


def why_not_on_chip(sizes: NetworkSizes | None, device: str, precision: str) -> str:
    """Why the on-chip kernels cannot replace the fused ones; empty if they can."""
    if precision != "bf16":
        return f"the on-chip kernels multiply in bf16, not {precision}"
    if sizes is not None:
        if not 1 <= sizes.patch <= 16 or sizes.tokens > 49:
            return "the on-chip kernels are for images of at most 49 patches of 16 pixels"
        if (sizes.d_model, sizes.heads, sizes.d_ff) != (WIDTH, HEADS, HIDDEN) or sizes.blocks > 3:
            return (
                f"the on-chip kernels are for width {WIDTH}, {HEADS} heads, {HIDDEN} neurons and "
                f"at most 3 blocks, not for {sizes.group}, {sizes.d_ff} neurons"
            )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return "the on-chip kernels are for GPUs of compute capability 9.0, the H100 and H200"
    return NO_NVRTC if nvrtc.library() is None else ""


def choose_runner(
    path: str, task: Task, weights: Tensor, threshold: Tensor, precision: str, batch: int
) -> Runner:
    """The runner of the path that `describe_path` returns."""
    path, _ = describe_path(path, str(weights.device), task.sizes, precision)
    if path == "fused":
        from transformer_nfn.zoo.training.kernels.runner import FusedRunner

        return FusedRunner(task, weights, threshold, precision, batch)
    if path == "on-chip":
        from transformer_nfn.zoo.training.kernels.on_chip import OnChipPass
        from transformer_nfn.zoo.training.kernels.runner import FusedRunner

        return FusedRunner(task, weights, threshold, precision, batch, OnChipPass)
    if path == "native":
        return NativeRunner(task, weights, threshold, batch)
    return TorchRunner(
        task, weights, threshold, batch, precision=precision, compiled=path == "compiled"
    )
