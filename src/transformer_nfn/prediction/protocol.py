"""How a predictor is trained: the paper's protocol, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformer_nfn.prediction.records import RunError

OWN: Mapping[str, dict[str, Any]] = {"whole_network": {"epochs": 30, "batch": 32, "lr": 2e-3}}
"""Where a model is not trained as the paper trains."""


@dataclass(frozen=True)
class Protocol:
    """Batch 16, Adam at 1e-3 after ten epochs of warm-up, cosine to 1e-5, binary cross-entropy.

    Attributes:
        epochs: how many.
        batch: networks a step; a last incomplete batch is used too.
        lr: the highest learning rate.
        final_lr: the last one.
        warmup: epochs of linear warm-up, shortened to a fifth of the training if that is less.
    """

    epochs: int = 50
    batch: int = 16
    lr: float = 1e-3
    final_lr: float = 1e-5
    warmup: int = 10

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1:
            raise RunError(
                f"epochs and batch must be positive, found {self.epochs} and {self.batch}"
            )

        if not 0 < self.lr < math.inf:
            raise RunError(f"the learning rate must be a number above 0, found {self.lr}")

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """The learning rate of one step, counted from 0."""
        warm = min(self.warmup, max(1, self.epochs // 5)) * steps_per_epoch
        total = self.epochs * steps_per_epoch
        if step < warm:
            return self.lr * (step + 1) / warm
        done = (step - warm) / max(1, total - warm)
        return self.final_lr + 0.5 * (self.lr - self.final_lr) * (1 + math.cos(math.pi * done))

    @staticmethod
    def of(
        model: str, epochs: int | None = None, batch: int | None = None, lr: float | None = None
    ) -> Protocol:
        """The paper's for its models, that of the model itself for ours; or as given."""
        given = {"epochs": epochs, "batch": batch, "lr": lr}
        own = OWN.get(model, {})
        return Protocol(**(own | {k: v for k, v in given.items() if v is not None}))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)
