"""One training step and one evaluation of many networks, in plain PyTorch on any device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_nfn.functional import zoo_logits
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.dropout import dropout
from transformer_nfn.zoo.training.optimise import update
from transformer_nfn.zoo.training.tasks import Batch

# Fused attention launches one block of threads a sample and takes at most 65,535.
NETWORKS_AT_ONCE = 256


class Stepper(Protocol):
    """What the trainer drives: the weights of many networks and how they move.

    ``weights``, ``first`` and ``second`` (the optimiser's moments) are ``[networks, weights]``.
    """

    weights: Tensor
    # Whether every step must be given all networks (compiled code is made for one shape).
    whole: bool

    def step(self, batch: Batch, keys: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """Trains the first ``len(coef)`` networks on one batch; loss and hits of each."""
        ...

    def evaluate(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on one batch that all share."""
        ...


def losses(
    arch: NetworkSizes,
    dtype: torch.dtype,
    w: Tensor,
    inputs: Tensor,
    labels: Tensor,
    lengths: Tensor | None,
    keys: Tensor,
    threshold: Tensor,
    scale: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean loss and hits of each network on its own batch, with dropout."""
    # A flat row's length is no multiple of 16 bytes, and tensor cores want such strides.
    weights = {name: view.to(dtype).contiguous() for name, view in arch.views(w).items()}
    logits = zoo_logits(
        weights,
        inputs.to(dtype),
        positions.to(dtype),
        heads=arch.heads,
        lengths=lengths,
        drop=dropout(keys, threshold, scale, arch.tokens),
    ).float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    hits = (logits.argmax(-1) == labels).sum(-1)
    return loss.view_as(labels).mean(-1), hits


@functools.lru_cache(maxsize=1)
def _compiled(arch: NetworkSizes) -> tuple[Any, Any]:
    # Once per kind of network: PyTorch stops compiling a function that it had to compile too
    # often, and a mixed zoo has more kinds than that. What was compiled for the last is dropped.
    torch.compiler.reset()
    return torch.compile(losses, dynamic=False), torch.compile(update, dynamic=False)


class TorchStepper:
    """The reference: autograd over the batched forward; compiled on CUDA.

    Args:
        weights: initial weights ``[networks, weights]``.
        threshold: ``int32 [networks]``, see `randomness.dropout_threshold`.
        precision: ``float32``, ``tf32`` or ``bf16`` for the products; master weights and
            moments stay float32.
        compiled: whether to fuse with `torch.compile`.
    """

    def __init__(
        self,
        arch: NetworkSizes,
        weights: Tensor,
        threshold: Tensor,
        *,
        precision: str = "float32",
        compiled: bool = False,
    ) -> None:
        self.arch = arch
        self.weights = weights
        self.first = torch.zeros_like(weights)
        self.second = torch.zeros_like(weights)
        self.threshold = threshold
        self.scale = 65536 / (65536 - threshold.to(torch.float32))
        self.positions = arch.positions(weights.device)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.tf32 = precision != "float32"
        self.whole = compiled
        ways: tuple[Any, Any] = _compiled(arch) if compiled else (losses, update)
        self._loss, self._update = ways

    def step(self, batch: Batch, keys: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """Trains the first ``len(coef)`` networks on one batch; loss and hits of each."""
        self._tensor_cores(self.tf32)
        losses, hits = [], []
        for at in range(0, len(coef), NETWORKS_AT_ONCE):
            part = slice(at, min(at + NETWORKS_AT_ONCE, len(coef)))
            w = self.weights[part].detach().requires_grad_()
            lengths = None if batch.lengths is None else batch.lengths[part]
            with self._products():
                loss, hit = self._loss(
                    self.arch, self.dtype, w, batch.inputs[part], batch.labels[part], lengths,
                    keys[part], self.threshold[part], self.scale[part], self.positions,
                )
                (grad,) = torch.autograd.grad(loss.sum(), w)
            with torch.no_grad():
                self._update(
                    self.weights[part], grad, self.first[part], self.second[part], coef[part]
                )
            losses.append(loss.detach())
            hits.append(hit)
        return torch.cat(losses), torch.cat(hits)

    def _tensor_cores(self, on: bool) -> None:
        if self.weights.is_cuda:
            torch.set_float32_matmul_precision("high" if on else "highest")

    @contextmanager
    def _products(self) -> Iterator[None]:
        # On CPUs without bf16 instructions oneDNN refuses some shapes with a warning each time.
        if self.dtype == torch.float32 or self.weights.is_cuda:
            yield
            return
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.backends.mkldnn.enabled = before

    @torch.no_grad()
    def evaluate(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on one batch that all share, in float32."""
        self._tensor_cores(False)
        losses, hits = [], []
        for w in weights.split(NETWORKS_AT_ONCE):
            logits = zoo_logits(
                self.arch.views(w),
                batch.inputs,
                self.positions,
                heads=self.arch.heads,
                lengths=batch.lengths,
            )
            labels = batch.labels.expand(len(w), -1)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            losses.append(loss.view_as(labels).sum(-1))
            hits.append((logits.argmax(-1) == labels).sum(-1))
        return torch.cat(losses), torch.cat(hits)
