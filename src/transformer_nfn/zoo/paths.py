"""By which code a step is computed on this machine, and why."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from transformer_nfn.zoo.architecture import Architecture
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.native.stepper import NativeStepper, why_not
from transformer_nfn.zoo.steps import Stepper, TorchStepper

PATHS = ("auto", "native", "torch", "compiled")


def describe_path(
    path: str, device: str, arch: Architecture | None = None, precision: str = "float32"
) -> tuple[str, str]:
    """The path that will be taken, and a sentence for the user.

    ``auto`` is ``compiled`` on CUDA where Triton is installed, ``native`` on the CPU where
    there is a C compiler, else ``torch``, several times slower; the sentence says why.
    """
    if path not in PATHS:
        raise ZooError(f"path must be one of {', '.join(PATHS)}, found '{path}'")
    reason = why_not(arch, device, precision) if path in ("auto", "native") else ""
    if path == "native" and reason:
        raise ZooError(f"path native was asked for, but {reason}")
    if path == "auto":
        if "cuda" in device:
            there = importlib.util.find_spec("triton") is not None
            path, reason = ("compiled", "") if there else ("torch", "triton is not installed")
        else:
            path = "torch" if reason else "native"
    words = {
        "native": "steps by the compiled C code",
        "torch": "steps by plain PyTorch",
        "compiled": "steps by torch.compile",
    }[path]
    because = f" ({reason}; builds are slower so)" if reason else ""
    return path, f"{words} on {device}{because}"


def choose_stepper(
    path: str, arch: Architecture, weights: Tensor, threshold: Tensor, precision: str
) -> Stepper:
    """The stepper of the path that `describe_path` names."""
    path, _ = describe_path(path, str(weights.device), arch, precision)
    if path == "native":
        return NativeStepper(arch, weights, threshold)
    return TorchStepper(
        arch, weights, threshold, precision=precision, compiled=path == "compiled"
    )
