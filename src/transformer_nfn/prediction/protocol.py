"""Training protocol of the paper and its authors' code."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformer_nfn.models.predictor import find
from transformer_nfn.prediction.runs import RunError


@dataclass(frozen=True)
class Protocol:
    """Batch 16, Adam at 1e-3 after ten epochs of warm-up, cosine to 1e-5, binary cross-entropy.

    Attributes:
        epochs: number of epochs.
        batch: networks per step; the last batch of an epoch may be smaller.
        lr: the highest learning rate.
        final_lr: the last learning rate.
        warmup: epochs of linear warm-up, at most a fifth of the training.
    """

    epochs: int = 50
    batch: int = 16
    lr: float = 1e-3
    final_lr: float = 1e-5
    warmup: int = 10

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 1), ("warmup", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise RunError(f"{name} expected a whole number from {least}, found {value!r}")
        for name in ("lr", "final_lr"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise RunError(f"{name} expected a number above 0, found {value!r}")

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Learning rate of one step, counted from 0."""
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
        """The default protocol of a model, with the given values replaced."""
        given = {"epochs": epochs, "batch": batch, "lr": lr}
        changes = {name: value for name, value in given.items() if value is not None}
        own = find(model).protocol
        if unknown := {*own} - {*(known := Protocol.__dataclass_fields__)}:
            raise RunError(
                f"'{model}': 'protocol' expected some of {', '.join(known)}, found {min(unknown)!r}"
            )
        try:
            default = Protocol(**own)
        except (RunError, TypeError) as error:
            raise RunError(f"'{model}': 'protocol': {error}") from error
        return replace(default, **changes)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)
