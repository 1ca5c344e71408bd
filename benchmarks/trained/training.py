"""How is a list of models trained? All of one kind together, each on its own text and order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trained.networks import LENGTH, Kind, Weights, logits, stacked
from trained.text import batches

ROWS = 4
"""Rows of a batch: small batches, since steps and not tokens carry a model away from its base."""


@dataclass(frozen=True)
class Course:
    """What a model goes through: which text, in which order, for how many steps, how fast."""

    text: str
    order: int
    steps: int
    rate: float


def train(
    kind: Kind,
    models: list[Weights],
    courses: list[Course],
    texts: dict[str, Tensor],
    told: Callable[[int, int, float], None] = lambda done, steps, loss: None,
) -> tuple[list[Weights], list[float]]:
    """Trains models of one kind side by side.

    Args:
        kind: of all of them.
        models: where each starts.
        courses: of each; all of the same number of steps and the same rate.
        texts: token ids by the name of the text.
        told: the step, how many there are and the mean loss, now and then.

    Returns:
        The trained models, and the loss of each over the last tenth.
    """
    steps, rate = courses[0].steps, courses[0].rate
    assert all((c.steps, c.rate) == (steps, rate) for c in courses)
    W = {name: w.requires_grad_() for name, w in stacked(models).items()}
    matrices = [w for w in W.values() if w.ndim == 3]
    vectors = [w for w in W.values() if w.ndim == 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
    starts = torch.stack([batches(texts[c.text], c.order, steps, ROWS, LENGTH) for c in courses])
    window = torch.arange(LENGTH + 1)
    late = torch.zeros(len(models))
    warm, tail = max(steps // 20, 1), max(steps // 10, 1)
    for step in range(steps):
        for group in optimiser.param_groups:
            decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = rate * min((step + 1) / warm, 1.0) * decay
        rows = starts[:, step, :, None] + window
        ids = torch.stack([texts[c.text][r] for c, r in zip(courses, rows, strict=True)])
        out = logits(kind, W, ids[..., :-1])
        each = F.cross_entropy(out.flatten(0, 2), ids[..., 1:].flatten(), reduction="none")
        by_model = each.reshape(len(models), -1).mean(1)
        optimiser.zero_grad()
        by_model.sum().backward()  # a sum: no model's gradient depends on how many there are
        for p in W.values():
            assert p.grad is not None
            size = torch.linalg.vector_norm(p.grad.flatten(1), dim=1).clamp_min(1.0)
            p.grad /= size.reshape(-1, *[1] * (p.ndim - 1))  # per tensor and model
        optimiser.step()
        if step >= steps - tail:
            late += by_model.detach() / tail
        if step % 50 == 49 or step == steps - 1:
            told(step + 1, steps, float(by_model.detach().mean()))
    done = [{n: w.detach()[i].clone() for n, w in W.items()} for i in range(len(models))]
    return done, late.tolist()
