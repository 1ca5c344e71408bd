"""By which code a step is computed on this machine, and why."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.backends.native.stepper import NativeStepper, why_not
from transformer_nfn.zoo.training.epochs import Runner, StepRunner
from transformer_nfn.zoo.training.steps import Stepper, TorchStepper
from transformer_nfn.zoo.training.tasks import Task

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
        from transformer_nfn.zoo.training.backends.kernels.runner import FusedRunner

        return FusedRunner(task, weights, threshold, precision, batch)
    stepper: Stepper
    if path == "native":
        stepper = NativeStepper(arch, weights, threshold)
    else:
        stepper = TorchStepper(
            arch, weights, threshold, precision=precision, compiled=path == "compiled"
        )
    return StepRunner(task, stepper, batch)
