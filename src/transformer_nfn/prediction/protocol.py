"""Training protocol of the paper and its authors' code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformer_nfn.models.predictor import find
from transformer_nfn.prediction.runs import RunError

SOMETIMES = ("updates", "patience", "clip")
"""Fields that records hold only where they are not 0."""
THRESHOLD = 1e-4
"""Share by which τ must rise to count as higher."""


@dataclass(frozen=True)
class Protocol:
    """Batch 16, Adam at 1e-3 after ten epochs of warm-up, cosine to 1e-5, binary cross-entropy.

    Attributes:
        epochs: number of epochs.
        batch: networks per step; the last batch of an epoch may be smaller.
        lr: the highest learning rate.
        final_lr: the last learning rate.
        warmup: epochs of linear warm-up, at most a fifth of the training.
        updates: in an epoch; 0 for one pass over the networks.
        patience: epochs without a higher validation τ before rates are halved, in place of the
            cosine; 0 for the cosine.
        clip: largest norm of the gradient; 0 for any.
    """

    epochs: int = 50
    batch: int = 16
    lr: float = 1e-3
    final_lr: float = 1e-5
    warmup: int = 10
    updates: int = 0
    patience: int = 0
    clip: float = 0.0

    def __post_init__(self) -> None:
        least = {"epochs": 1, "batch": 1, "warmup": 0, "updates": 0, "patience": 0}
        for name, smallest in least.items():
            if type(value := getattr(self, name)) is not int or value < smallest:
                raise RunError(f"{name} expected a whole number from {smallest}, found {value!r}")
        for name in ("lr", "final_lr", "clip"):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (name == "lr" and not value):
                kind = "above 0" if name == "lr" else "from 0"
                raise RunError(f"{name} expected a number {kind}, found {value!r}")

    @property
    def alone(self) -> bool:
        """Whether an update of one seed depends on its own gradient or τ as a whole."""
        return bool(self.patience or self.clip)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Learning rate of one step, counted from 0, before any halving."""
        warm = min(self.warmup, max(1, self.epochs // 5)) * steps_per_epoch
        total = self.epochs * steps_per_epoch
        if step < warm:
            return self.lr * (step + 1) / warm
        if self.patience:
            return self.lr
        done = (step - warm) / max(1, total - warm)
        return self.final_lr + 0.5 * (self.lr - self.final_lr) * (1 + math.cos(math.pi * done))

    @staticmethod
    def of(
        model: str,
        epochs: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        *,
        zoo: Mapping[str, Any] | None = None,
    ) -> Protocol:
        """The default protocol of a model, with the given values replaced.

        Args:
            model: name of a predictor.
            epochs: passes over the networks, also in place of a number of updates.
            batch: networks per step.
            lr: the highest learning rate.
            zoo: from `describe_zoo`, where the model has other defaults for networks on images.
        """
        given = {"epochs": epochs, "batch": batch, "lr": lr}
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        if epochs is not None:
            changes["updates"] = 0
        cls, zoo = find(model), zoo or {}
        sizes = [zoo.get("architecture", {}), *zoo.get("architectures", {}).values()]
        images = any(each.get("patch") for each in sizes)
        own = {**cls.protocol, **(cls.image_protocol if images else {})}
        if unknown := {*own} - {*(known := Protocol.__dataclass_fields__)}:
            raise RunError(
                f"'{model}': 'protocol' expected some of {', '.join(known)}, found {min(unknown)!r}"
            )
        try:
            default = Protocol(**own)
        except (RunError, TypeError) as error:
            raise RunError(f"'{model}': 'protocol': {error}") from error
        return replace(default, **changes)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; what only some models have is left out where it is 0."""
        return {k: v for k, v in asdict(self).items() if v or k not in SOMETIMES}


@dataclass
class Plateau:
    """Halving of learning rates, as by PyTorch's ``ReduceLROnPlateau``.

    >>> plateau = Plateau(patience=1)
    >>> [plateau.after(tau) for tau in (0.5, 0.4, 0.3, 0.6)]
    [1.0, 1.0, 0.5, 0.5]

    Attributes:
        patience: values in a row that may be no higher than the best; 0 never halves.
        best: highest τ.
        waited: values since then, or since the last halving.
        factor: of learning rates.
    """

    patience: int
    best: float = -2.0
    waited: int = 0
    factor: float = 1.0

    def after(self, tau: float) -> float:
        """Take the τ of an epoch; returns the factor from then on."""
        if tau > self.best * (1 + THRESHOLD):
            self.best, self.waited = tau, 0
        else:
            self.waited += 1
        if self.patience and self.waited > self.patience:
            self.factor, self.waited = self.factor / 2, 0
        return self.factor
