"""What does a digit look like, if networks are all one has? Inputs that good ones agree on.

Probes that start as noise stay noise: a predictor of some thousand networks moves them too
little. Asked instead for inputs that many accurate networks put into one class, they become what
the task is about in seconds, from weights and accuracies alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from transformer_nfn.models import map_network
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.graph_step import GraphSteps

STEPS = 120
STEPS_AN_EPOCH = 15
"""In a training of a few epochs the search is short too."""
BATCH = 32
RATE = 0.01


def find_probes(module: Any, data: Dataset, seed: int, *, steps: int = STEPS) -> None:
    """Moves the module's probes to where networks answer with the probes' labels.

    Networks are drawn by the square of their accuracy, from ``seed`` alone.

    Args:
        module: has ``probes`` and ``answers(network)``; without probes nothing happens.
        data: networks to ask.
        seed: of the draws.
        steps: of Adam.
    """
    if module.probes is None or steps < 1:
        return
    device = data.accuracy.device
    on_gpu = device.type == "cuda"
    rate = torch.tensor(RATE, device=device) if on_gpu else RATE
    optimiser = torch.optim.Adam(module.probes.parameters(), rate, capturable=on_gpu)
    picks = _draws(data.accuracy.cpu(), steps, seed).to(device)

    def step(rows: Tensor) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        found = module.answers(map_network(data.network, lambda w: w[rows])).logits
        labels = module.probes.labels.repeat(len(rows))
        loss = cross_entropy(found.flatten(0, 1), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    run = GraphSteps(optimiser) if on_gpu else None
    for number, rows in enumerate(picks):
        falling = RATE * 0.5 * (1 + math.cos(math.pi * number / steps))
        for group in optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(falling)
            else:
                group["lr"] = falling
        step(rows) if run is None else run(step, rows)


def _draws(accuracy: Tensor, steps: int, seed: int) -> Tensor:
    """Which networks each step asks, ``[steps, batch]``."""
    generator = torch.Generator().manual_seed(seed)
    chance = accuracy.square() + 1e-3
    batch = min(BATCH, len(accuracy))
    return torch.stack(
        [torch.multinomial(chance, batch, generator=generator) for _ in range(steps)]
    )
