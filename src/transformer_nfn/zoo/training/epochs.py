"""One epoch of many networks: what it is made of, and how it is run a step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from transformer_nfn.zoo.training.steps import Stepper
from transformer_nfn.zoo.training.tasks import Split, Task


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
