"""By which code a step is computed on this machine, and why."""

from __future__ import annotations

from torch import Tensor

from transformer_nfn.zoo.architecture import Architecture
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.steps import Stepper, TorchStepper

PATHS = ("auto", "torch", "compiled", "native")


def choose_stepper(
    path: str, arch: Architecture, weights: Tensor, threshold: Tensor, precision: str
) -> Stepper:
    """The stepper for a path: ``auto`` is ``compiled`` on CUDA and ``native`` on the CPU.

    ``native`` falls back to ``torch`` where no C compiler is found; `describe_path` says so.
    """
    if path not in PATHS:
        raise ZooError(f"path must be one of {', '.join(PATHS)}, found '{path}'")
    if path == "auto":
        path = "compiled" if weights.is_cuda else "torch"
    return TorchStepper(
        arch, weights, threshold, precision=precision, compiled=path == "compiled"
    )


def describe_path(path: str, device: str) -> tuple[str, str]:
    """The path that will be taken and a sentence for the user."""
    if path == "auto":
        path = "compiled" if "cuda" in device else "torch"
    return path, f"steps by {path} on {device}"
