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
from collections.abc import Iterator, Sequence
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
# Coefficients that leave a network and its moments as they are.
HOLD = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
WARM_UP = 0.1
FINAL_RATE = 1e-5


def rules(configs: Sequence[Config], device: torch.device | str = "cpu") -> Tensor:
    """``float64 [networks, 6]``: β₁, γ, β₂, whether √v counts, ε, λ."""
    for config in configs:
        if config.optimizer not in OPTIMIZERS:
            raise ZooError(
                f"run {config.run}: unknown optimizer '{config.optimizer}', "
                f"expected one of {', '.join(OPTIMIZERS)}"
            )
    rows = [(*_RULES[config.optimizer], config.l2) for config in configs]
    return torch.tensor(rows, dtype=torch.float64, device=device)


def coefficients(rule: Tensor, rate: Tensor, step: Tensor) -> Tensor:
    """``float32 [networks, …, 7]``: β₁, γ, β₂, α, ε, λ, η at each network's own step (from 1).

    ``rule`` ``[…, 6]``, ``rate`` and ``step`` broadcast against each other.
    """
    b1, c, b2, adaptive, eps, l2 = rule.unbind(-1)
    # RMSprop and the plain rules have no bias correction; Adam is the one with γ < 1.
    biased = c < 1
    alpha = torch.where(biased, (1 - b2**step).rsqrt(), adaptive)
    eta = torch.where(biased, rate / (1 - b1**step), rate)
    columns = torch.broadcast_tensors(b1, c, b2, alpha, eps, l2, eta)
    return torch.stack(columns, dim=-1).to(torch.float32)


def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor, coef: Tensor) -> None:
    """Changes parameters ``p`` and moments ``m``, ``v`` in place, all ``[networks, weights]``."""
    b1, c, b2, alpha, eps, l2, eta = coef.unsqueeze(-1).unbind(1)
    g = g + l2 * p
    m.copy_(b1 * m + c * g)
    v.copy_(b2 * v + (1 - b2) * g * g)
    p.sub_(eta * m / (alpha * v.sqrt() + eps))


def learning_rate(base: Tensor, epoch: int, epochs: int) -> Tensor:
    """The rate in an epoch (from 0): linear over the first tenth, then cosine to 1e-5."""
    warm = max(1, round(epochs * WARM_UP))
    if epoch < warm:
        return base * (epoch + 1) / warm
    angle = math.pi * (epoch - warm) / max(1, epochs - warm)
    return FINAL_RATE + (base - FINAL_RATE) * (1 + math.cos(angle)) / 2


def dropout(
    key: Tensor, threshold: Tensor, scale: Tensor, stride: int
) -> Drop:
    """Dropout with a probability per network, from counter-based words.

    Args:
        key: ``int32 [networks, sites, 2]``.
        threshold: ``int32 [networks]``, see `randomness.dropout_threshold`.
        scale: ``[networks]``, 1/(1 − p).
        stride: rows a sample takes in the numbering of rows, at least its tokens.
    """

    def apply(x: Tensor, site: int) -> Tensor:
        B, T, D = x.shape[1:]
        rows = torch.arange(B, device=x.device)[:, None] * stride
        rows = rows + torch.arange(T, device=x.device)
        keep = keep_mask(key[:, site], threshold, rows, D)
        return x * (keep * scale[:, None, None, None]).to(x.dtype)

    return apply


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


@dataclass(frozen=True)
class Epoch:
    """All that one epoch draws and decides beforehand, run by run.

    Attributes:
        order: ``int64 [runs, samples]``, which sample is seen when; short rows padded.
        steps: ``int64 [runs]`` on the CPU, batches each run has; none has more than the first.
        crop: ``int32 [runs, steps, 2]``, keys of the augmentation.
        drop: ``int32 [runs, steps, sites, 2]``, keys of dropout.
        coef: ``float32 [runs, steps, 7]``, see `optimise.coefficients`; a run whose epoch is
            over has those that change nothing.
    """

    order: Tensor
    steps: Tensor
    crop: Tensor
    drop: Tensor
    coef: Tensor


class Runner(Protocol):
    """What the trainer drives: the weights of many networks, trained and tested in one go each."""

    @property
    def weights(self) -> Tensor:
        """``[networks, weights]``, changed in place."""
        ...

    def epoch(self, epoch: Epoch) -> tuple[Tensor, Tensor]:
        """Trains one epoch; of each network the sum of its steps' mean losses, and its hits."""
        ...

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Summed loss and hits of each network on a split."""
        ...


class StepRunner:
    """A `Runner` over anything that does one step: `steps.TorchStepper`, the native code."""

    def __init__(self, task: Task, stepper: Stepper, batch: int) -> None:
        self.task, self.stepper, self.batch = task, stepper, batch

    @property
    def weights(self) -> Tensor:
        """``[networks, weights]``, changed in place."""
        return self.stepper.weights

    def epoch(self, epoch: Epoch) -> tuple[Tensor, Tensor]:
        """Every step takes the runs whose epoch still goes on, which are the first few."""
        runs, size = len(epoch.order), self.batch
        device = epoch.order.device
        total, hits = torch.zeros(runs, device=device), torch.zeros(runs, device=device)
        active = epoch.steps[:, None] > torch.arange(int(epoch.steps.max()))
        active = active.to(device)
        for step in range(active.shape[1]):
            now = runs if self.stepper.whole else int((epoch.steps > step).sum())
            index = epoch.order[:now, step * size : (step + 1) * size]
            batch = self.task.batch("train", index, epoch.crop[:now, step])
            drop, coef = epoch.drop[:now, step], epoch.coef[:now, step]
            loss, hit = self.stepper.step(batch, drop, coef)
            hits[:now] += hit * active[:now, step]
            total[:now] += loss * active[:now, step]
        return total, hits

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Batches that all networks share, in the order of the split."""
        n, device = self.task.sizes[split], weights.device
        loss = torch.zeros(len(weights), device=device)
        hits = torch.zeros(len(weights), device=device)
        for at in range(0, n, self.batch):
            index = torch.arange(at, min(at + self.batch, n), device=device)
            a, b = self.stepper.evaluate(weights, self.task.batch(split, index[None]))
            loss, hits = loss + a, hits + b
        return loss, hits
