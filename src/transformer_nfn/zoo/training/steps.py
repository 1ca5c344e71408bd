"""Training steps of many networks at once in PyTorch: update rules, dropout, one epoch.

One update rule is SGD, momentum, Adam or RMSprop, depending on each network's coefficients.
With g ← g + λp (coupled L2):  m ← β₁m + γg,  v ← β₂v + (1 − β₂)g²,  p ← p − η·m / (α√v + ε).

|          | β₁  | γ   | β₂    | α         | ε    | η        |
|----------|-----|-----|-------|-----------|------|----------|
| sgd      | 0   | 1   | 0     | 0         | 1    | lr       |
| sgdm     | 0.9 | 1   | 0     | 0         | 1    | lr       |
| adam     | 0.9 | 0.1 | 0.999 | 1/√(1−β₂ᵗ)| 1e-8 | lr/(1−β₁ᵗ) |
| rmsprop  | 0   | 1   | 0.99  | 1         | 1e-8 | lr       |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_nfn.functional import zoo_logits
from transformer_nfn.functional.zoo_network import Drop
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.grid import OPTIMIZERS, Config
from transformer_nfn.zoo.training.randomness import keep_mask
from transformer_nfn.zoo.training.tasks import Batch, Split, Task

# β₁, γ, β₂, uses √v, ε
_RULES = {
    "sgd": (0.0, 1.0, 0.0, 0.0, 1.0),
    "sgdm": (0.9, 1.0, 0.0, 0.0, 1.0),
    "adam": (0.9, 0.1, 0.999, 1.0, 1e-8),
    "rmsprop": (0.0, 1.0, 0.99, 1.0, 1e-8),
}
# Coefficients that change neither weights nor moments.
HOLD = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
WARM_UP = 0.1
FINAL_RATE = 1e-5


def rules(configs: Sequence[Config]) -> Tensor:
    """Update rules ``float64 [networks, 6]``: β₁, γ, β₂, whether √v is used, ε, λ."""
    for config in configs:
        if config.optimizer not in OPTIMIZERS:
            raise ZooError(
                f"run {config.run}: unknown optimizer '{config.optimizer}', "
                f"expected one of {', '.join(OPTIMIZERS)}"
            )
    rows = [(*_RULES[config.optimizer], config.l2) for config in configs]
    return torch.tensor(rows, dtype=torch.float64)


def coefficients(rule: Tensor, rate: Tensor, step: Tensor) -> Tensor:
    """Coefficients ``float32 [networks, …, 7]`` of `update`: β₁, γ, β₂, α, ε, λ, η.

    Args:
        rule: ``[…, 6]``, see `rules`.
        rate: learning rate.
        step: of each network, from 1; all three broadcast against each other.
    """
    b1, c, b2, adaptive, eps, l2 = rule.unbind(-1)
    # Only Adam, which has γ < 1, corrects the bias of its moments.
    biased = c < 1
    alpha = torch.where(biased, (1 - b2**step).rsqrt(), adaptive)
    eta = torch.where(biased, rate / (1 - b1**step), rate)
    columns = torch.broadcast_tensors(b1, c, b2, alpha, eps, l2, eta)
    return torch.stack(columns, dim=-1).to(torch.float32)


def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, coef: Tensor) -> None:
    """Update parameters ``p`` and moments ``m``, ``v`` in place, all ``[networks, weights]``."""
    b1, c, b2, alpha, eps, l2, eta = coef.unsqueeze(-1).unbind(1)
    g = g + l2 * p
    m.copy_(b1 * m + c * g)
    v.copy_(b2 * v + (1 - b2) * g * g)
    p.sub_(eta * m / (alpha * v.sqrt() + eps))


def learning_rate(base: Tensor, epoch: int, epochs: int) -> Tensor:
    """Learning rate in an epoch (from 0): linear warm-up over a tenth, then cosine to 1e-5.

    >>> [float(learning_rate(torch.tensor(0.1), epoch, 20)) for epoch in (0, 1)]
    [0.05000000074505806, 0.10000000149011612]
    """
    warm = max(1, round(epochs * WARM_UP))
    if epoch < warm:
        return base * (epoch + 1) / warm
    angle = math.pi * (epoch - warm) / max(1, epochs - warm)
    return FINAL_RATE + (base - FINAL_RATE) * (1 + math.cos(angle)) / 2


def dropout(key: Tensor, threshold: Tensor, scale: Tensor, stride: int) -> Drop:
    """Dropout with a probability per network, from counter-based randomness.

    Args:
        key: ``int32 [networks, sites, 2]``.
        threshold: ``int32 [networks]``, see `randomness.dropout_threshold`.
        scale: ``[networks]``, 1/(1 − p).
        stride: row numbers per sample, at least its tokens.
    """

    def apply(x: Tensor, site: int) -> Tensor:
        B, T, D = x.shape[1:]
        rows = torch.arange(B, device=x.device)[:, None] * stride
        rows = rows + torch.arange(T, device=x.device)
        keep = keep_mask(key[:, site], threshold, rows, D)
        return x * (keep * scale[:, None, None, None]).to(x.dtype)

    return apply


# Fused attention launches one block of threads per sample, at most 65,535.
NETWORKS_AT_ONCE = 256


def losses(
    sizes: NetworkSizes,
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
    """Mean loss and hits of each network on its batch, with dropout."""
    # Rows of flat weights are not multiples of 16 bytes, which tensor cores need as strides.
    weights = {name: view.to(dtype).contiguous() for name, view in sizes.views(w).items()}
    logits = zoo_logits(
        weights,
        inputs.to(dtype),
        positions.to(dtype),
        heads=sizes.heads,
        lengths=lengths,
        drop=dropout(keys, threshold, scale, sizes.tokens),
    ).float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    hits = (logits.argmax(-1) == labels).sum(-1)
    return loss.view_as(labels).mean(-1), hits


@functools.lru_cache(maxsize=1)
def _compiled(sizes: NetworkSizes) -> tuple[Any, Any]:
    # Once per network size: PyTorch limits how often it compiles a function, and a mixed zoo has
    # more sizes than that. The code for the last size is dropped.
    torch.compiler.reset()
    return torch.compile(losses, dynamic=False), torch.compile(update, dynamic=False)


@dataclass(frozen=True)
class Epoch:
    """Random keys and coefficients of one epoch, for every run.

    Attributes:
        order: ``int64 [runs, samples]``, order of the samples; short rows are padded.
        steps: ``int64 [runs]`` on the CPU, number of batches of each run, non-increasing.
        crop: ``int32 [runs, steps, 2]``, keys of the augmentation.
        drop: ``int32 [runs, steps, sites, 2]``, keys of dropout.
        coef: ``float32 [runs, steps, 7]``, see `coefficients`; `HOLD` for runs whose epoch has
            ended.
    """

    order: Tensor
    steps: Tensor
    crop: Tensor
    drop: Tensor
    coef: Tensor


class Runner(Protocol):
    """Interface of training and testing many networks an epoch at a time."""

    @property
    def weights(self) -> Tensor:
        """``[networks, weights]``, updated in place."""

    def epoch(self, epoch: Epoch) -> tuple[Tensor, Tensor]:
        """Train one epoch; the sum of the steps' mean losses and the hits of each network."""

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on a split."""


class TorchRunner:
    """A `Runner` in PyTorch: autograd over the batched forward, optionally compiled.

    Args:
        task: with its data on the device of the weights.
        weights: initial weights ``[networks, weights]``.
        threshold: ``int32 [networks]``, see `randomness.dropout_threshold`.
        batch: samples per step.
        precision: ``float32``, ``tf32`` or ``bf16`` for the products; master weights and
            moments stay float32.
        compiled: whether to use `torch.compile`; then every step gets all networks.

    Attributes:
        weights: ``[networks, weights]``, updated in place.
    """

    def __init__(
        self,
        task: Task,
        weights: Tensor,
        threshold: Tensor,
        batch: int,
        *,
        precision: str = "float32",
        compiled: bool = False,
    ) -> None:
        self.task, self.sizes, self.batch = task, task.sizes, batch
        self.weights = weights
        self.first = torch.zeros_like(weights)
        self.second = torch.zeros_like(weights)
        self.threshold = threshold
        self.scale = 65536 / (65536 - threshold.to(torch.float32))
        self.positions = self.sizes.positions(weights.device)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.tf32 = precision != "float32"
        self.compiled = compiled
        functions: tuple[Any, Any] = _compiled(self.sizes) if compiled else (losses, update)
        self._loss, self._update = functions

    def epoch(self, epoch: Epoch) -> tuple[Tensor, Tensor]:
        """Train one epoch; every step takes the runs whose epoch has not ended, the first few."""
        runs, size = len(epoch.order), self.batch
        device = epoch.order.device
        total, hits = torch.zeros(runs, device=device), torch.zeros(runs, device=device)
        active = epoch.steps[:, None] > torch.arange(int(epoch.steps.max()))
        active = active.to(device)
        for step in range(active.shape[1]):
            now = runs if self.compiled else int((epoch.steps > step).sum())
            index = epoch.order[:now, step * size : (step + 1) * size]
            batch = self.task.batch("train", index, epoch.crop[:now, step])
            loss, hit = self._step(batch, epoch.drop[:now, step], epoch.coef[:now, step])
            hits[:now] += hit * active[:now, step]
            total[:now] += loss * active[:now, step]
        return total, hits

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on a split."""
        return evaluate_batches(self.task, split, self.batch, weights, self._evaluate)

    def _step(self, batch: Batch, keys: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """Train the first ``len(coef)`` networks on one batch; loss and hits of each."""
        self._tensor_cores(self.tf32)
        total, hits = [], []
        for at in range(0, len(coef), NETWORKS_AT_ONCE):
            part = slice(at, min(at + NETWORKS_AT_ONCE, len(coef)))
            w = self.weights[part].detach().requires_grad_()
            lengths = None if batch.lengths is None else batch.lengths[part]
            with self._products():
                loss, hit = self._loss(
                    self.sizes, self.dtype, w, batch.inputs[part], batch.labels[part], lengths,
                    keys[part], self.threshold[part], self.scale[part], self.positions,
                )
                (grad,) = torch.autograd.grad(loss.sum(), w)
            with torch.no_grad():
                self._update(
                    self.weights[part], grad, self.first[part], self.second[part], coef[part]
                )
            total.append(loss.detach())
            hits.append(hit)
        return torch.cat(total), torch.cat(hits)

    def _tensor_cores(self, on: bool) -> None:
        if self.weights.is_cuda:
            torch.set_float32_matmul_precision("high" if on else "highest")

    @contextmanager
    def _products(self) -> Iterator[None]:
        # On CPUs without bf16 instructions oneDNN warns about some shapes at every call.
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
    def _evaluate(self, weights: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on one shared batch, in float32."""
        self._tensor_cores(False)
        total, hits = [], []
        for w in weights.split(NETWORKS_AT_ONCE):
            logits = zoo_logits(
                self.sizes.views(w),
                batch.inputs,
                self.positions,
                heads=self.sizes.heads,
                lengths=batch.lengths,
            )
            labels = batch.labels.expand(len(w), -1)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            total.append(loss.view_as(labels).sum(-1))
            hits.append((logits.argmax(-1) == labels).sum(-1))
        return torch.cat(total), torch.cat(hits)


def evaluate_batches(
    task: Task,
    split: Split,
    size: int,
    weights: Tensor,
    evaluate: Callable[[Tensor, Batch], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Summed loss and hits of each network on a split, from those on batches of ``size``."""
    n, device = task.num_samples[split], weights.device
    loss = torch.zeros(len(weights), device=device)
    hits = torch.zeros(len(weights), device=device)
    for at in range(0, n, size):
        index = torch.arange(at, min(at + size, n), device=device)
        a, b = evaluate(weights, task.batch(split, index[None]))
        loss, hits = loss + a, hits + b
    return loss, hits
