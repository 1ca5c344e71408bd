"""The native C step, and the choice of the code that computes a step on this machine."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.known_tasks import BLOCKS, HEADS, HIDDEN, WIDTH
from transformer_nfn.native_code import CompiledSizes, load_for
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.steps import Runner, Stepper, StepRunner, TorchStepper
from transformer_nfn.zoo.training.tasks import Batch, Task

SOURCES = ("step.c", "pass.h")


@functools.cache
def library(
    width: int = WIDTH, heads: int = HEADS, neurons: int = HIDDEN, blocks: int = BLOCKS
) -> tuple[ctypes.CDLL | None, str]:
    """The step compiled for networks of these sizes, or None and why there is none."""
    here = Path(__file__).parent / "native"
    sizes = CompiledSizes(width, heads, neurons, blocks)
    return load_for(sizes, [here / name for name in SOURCES], "step", _declare)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    i, long, pointer = ctypes.c_int, ctypes.c_long, ctypes.c_void_p
    lib.tnfn_pass.argtypes = [
        i, i, i, i, i, pointer, pointer, pointer, pointer, i, pointer,
        pointer, i, pointer, pointer, pointer, pointer, pointer,
    ]
    lib.tnfn_pass.restype = i
    lib.tnfn_update.argtypes = [i, long, pointer, pointer, pointer, pointer, pointer]
    lib.tnfn_update.restype = None
    return lib


def why_not(arch: NetworkSizes | None, device: str, precision: str = "float32") -> str:
    """Why the native step cannot be taken here; nothing if it can."""
    if "cuda" in device:
        return "the native step is for the CPU"
    if precision != "float32":
        return f"the native step computes in float32, not {precision}"
    if arch is None:
        return library()[1]
    if arch.d_model % 4 or arch.d_ff % 4:
        return (
            f"the native step is for widths that are multiples of 4, not {arch.d_model} and "
            f"{arch.d_ff} neurons"
        )
    if arch.classes > 16:
        return f"the native step is for at most 16 classes, not {arch.classes}"
    return _library(arch)[1]


def _library(arch: NetworkSizes) -> tuple[ctypes.CDLL | None, str]:
    return library(arch.d_model, arch.heads, arch.d_ff, arch.blocks)


class NativeStepper:
    """A `steps.Stepper` over the C code; see `steps.TorchStepper` for the arguments."""

    whole = False

    def __init__(self, arch: NetworkSizes, weights: Tensor, threshold: Tensor) -> None:
        problem = why_not(arch, str(weights.device))
        if problem or (lib := _library(arch)[0]) is None:
            raise ZooError(problem)
        self.arch, self.lib = arch, lib
        self.weights = weights.contiguous()
        self.first = torch.zeros_like(weights)
        self.second = torch.zeros_like(weights)
        self.grad = torch.zeros_like(weights)
        self.threshold = threshold.contiguous()
        self.scale = 65536 / (65536 - threshold.to(torch.float32))
        self.positions = arch.positions()

    def step(self, batch: Batch, keys: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """Trains the first ``len(coef)`` networks on one batch; loss and hits of each."""
        M, B = batch.labels.shape
        loss, hits = self._pass(self.weights[:M], batch, keys, self.grad)
        coef = coef.contiguous()
        self.lib.tnfn_update(
            M, self.arch.num_weights, *map(_at, (self.weights, self.grad)),
            *map(_at, (self.first, self.second, coef)),
        )
        return loss / B, hits

    def evaluate(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on one batch that all share."""
        return self._pass(weights.contiguous(), batch, None, None)

    def _pass(
        self, weights: Tensor, batch: Batch, keys: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        M = len(weights)
        if weights.dtype != torch.float32:
            raise ZooError(f"the native step reads float32 weights, found {weights.dtype}")
        inputs, labels = batch.inputs.contiguous(), batch.labels.contiguous()
        lengths = None if batch.lengths is None else batch.lengths.contiguous()
        keys = None if keys is None else keys.contiguous()
        loss = torch.empty(M)
        hits = torch.empty(M, dtype=torch.int64)
        B, T = inputs.shape[1:3]
        failed = self.lib.tnfn_pass(
            M, B, T, self.arch.patch, self.arch.classes, _at(weights), _at(grad), _at(inputs),
            _at(labels), int(len(inputs) == 1 and grad is None), _at(lengths),
            _at(self.positions), self.arch.tokens, _at(keys), _at(self.threshold),
            _at(self.scale), _at(loss), _at(hits),
        )
        if failed:
            raise MemoryError("the native step could not get its scratch memory")
        return loss, hits


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


PATHS = ("auto", "native", "torch", "compiled", "fused")


def describe_path(
    path: str, device: str, arch: NetworkSizes | None = None, precision: str = "float32"
) -> tuple[str, str]:
    """The path that will be taken, and a sentence for the user.

    ``auto`` is ``fused`` on CUDA where Triton is installed and products may be in bf16 or
    tf32, else ``compiled``; ``native`` on the CPU where there is a C compiler; else ``torch``,
    several times slower; the sentence says why.
    """
    if path not in PATHS:
        raise ZooError(f"path must be one of {', '.join(PATHS)}, found '{path}'")
    reason = why_not(arch, device, precision) if path in ("auto", "native") else ""
    if path == "native" and reason:
        raise ZooError(f"path native was asked for, but {reason}")
    unfused = why_not_fused(arch, device, precision)
    if path == "fused" and unfused:
        raise ZooError(f"path fused was asked for, but {unfused}")
    if path == "auto":
        if "cuda" in device:
            path, reason = ("compiled", unfused) if unfused else ("fused", "")
            if importlib.util.find_spec("triton") is None:
                path = "torch"
        else:
            path = "torch" if reason else "native"
    words = {
        "native": "steps by the compiled C code",
        "torch": "steps by plain PyTorch",
        "compiled": "steps by torch.compile",
        "fused": "steps by the fused kernels",
    }[path]
    because = f" ({reason}; builds are slower so)" if reason else ""
    return path, f"{words} on {device}{because}"


def why_not_fused(arch: NetworkSizes | None, device: str, precision: str) -> str:
    """Why the fused kernels cannot be taken here; nothing if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if "cuda" not in device:
        return "the fused kernels are for CUDA"
    if precision == "float32":
        return "the fused kernels multiply in bf16 or tf32, not float32 (see --precision)"
    if arch is not None:
        if (arch.d_model, arch.heads, arch.d_ff) != (32, 2, 64):
            return f"the fused kernels are for width 32 and 2 heads, not for {arch.kind}"
        if precision == "tf32" and not arch.patch:
            return "the fused kernels multiply texts in bf16, not tf32"
        if arch.classes > 64 or arch.patch > 64:
            return "the fused kernels are for at most 64 classes and 64 pixels a patch"
    return ""


def choose_runner(
    path: str, task: Task, weights: Tensor, threshold: Tensor, precision: str, batch: int
) -> Runner:
    """The runner of the path that `describe_path` names."""
    arch = task.arch
    path, _ = describe_path(path, str(weights.device), arch, precision)
    if path == "fused":
        from transformer_nfn.zoo.training.kernels.runner import FusedRunner

        return FusedRunner(task, weights, threshold, precision, batch)
    stepper: Stepper
    if path == "native":
        stepper = NativeStepper(arch, weights, threshold)
    else:
        stepper = TorchStepper(
            arch, weights, threshold, precision=precision, compiled=path == "compiled"
        )
    return StepRunner(task, stepper, batch)
