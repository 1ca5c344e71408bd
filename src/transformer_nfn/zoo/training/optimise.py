"""One update rule that is SGD, momentum, Adam or RMSprop, chosen by each network's numbers.

With g ← g + λp (coupled L2):  m ← β₁m + γg,  v ← β₂v + (1 − β₂)g²,  p ← p − η·m / (α√v + ε).

|          | β₁  | γ   | β₂    | α         | ε    | η        |
|----------|-----|-----|-------|-----------|------|----------|
| sgd      | 0   | 1   | 0     | 0         | 1    | lr       |
| sgdm     | 0.9 | 1   | 0     | 0         | 1    | lr       |
| adam     | 0.9 | 0.1 | 0.999 | 1/√(1−β₂ᵗ)| 1e-8 | lr/(1−β₁ᵗ) |
| rmsprop  | 0   | 1   | 0.99  | 1         | 1e-8 | lr       |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.training.grid import OPTIMIZERS, Config

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
