"""The trainer's step by the compiled C code: the same numbers, without leaving the cache."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.backends.native.compile import library
from transformer_nfn.zoo.training.tasks import Batch


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
