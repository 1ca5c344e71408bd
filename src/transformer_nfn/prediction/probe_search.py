"""What does a digit look like, if networks are all one has? Inputs that good ones agree on.

Probes that start as noise stay noise: a predictor of some thousand networks moves them too
little. Asked instead for inputs that many accurate networks put into one class, they become what
the task is about in seconds, from weights and accuracies alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from transformer_nfn.models import map_network
from transformer_nfn.prediction.dataset import Dataset
from transformer_nfn.prediction.graph_step import GraphSteps

STEPS, MOST_STEPS = 480, 1440
STEPS_AN_EPOCH = 60
"""In a training of a few epochs the search is short too; so it is of a few networks."""
NETWORKS_A_STEP = 8
"""Of many networks the search takes a step for so many of them."""
ASKED, FEWEST_ASKED = 8, 2
"""Networks a group asks in a step: few, so that a probe is what some agree on, not all."""
NETWORKS_ASKED = 350
"""So many networks to learn from for each that a group asks: of few fewer, which is faster."""
POWER = 6
"""Networks are drawn by this power of their accuracy."""
RATE = 0.01


def search_steps(epochs: int, networks: int = STEPS) -> int:
    """How many steps the search takes before a training of so many epochs and networks."""
    many = min(MOST_STEPS, networks // NETWORKS_A_STEP)
    return min(max(STEPS, many), STEPS_AN_EPOCH * epochs, networks)


def group_asks(networks: int) -> int:
    """How many networks each group of probes asks in a step, of so many to learn from."""
    return max(FEWEST_ASKED, min(ASKED, networks // NETWORKS_ASKED))


def find_probes(
    module: Any,
    kinds: Sequence[Dataset],
    seed: int,
    *,
    steps: int = STEPS,
    asked: int = ASKED,
) -> None:
    """Moves the module's probes to where networks answer with the probes' labels.

    Networks are drawn by a high power of their accuracy, from ``seed`` alone; each step asks
    networks of one kind, drawn by the sum of these powers. Every group of probes asks networks of
    its own.

    Args:
        module: has ``probes`` and ``ask(network, inputs)``; without probes nothing happens.
        kinds: networks to ask, a data set for each kind.
        seed: of the draws.
        steps: of Adam.
        asked: networks that a group asks in a step.
    """
    if module.probes is None or steps < 1:
        return
    device = kinds[0].accuracy.device
    on_gpu = device.type == "cuda"
    rate = torch.tensor(RATE, device=device) if on_gpu else RATE
    optimiser = torch.optim.Adam(module.probes.parameters(), rate, capturable=on_gpu)
    groups = module.probes.groups
    draws = _draws([data.accuracy.cpu() for data in kinds], steps, seed, groups, asked)
    draws = [(kind, rows.to(device)) for kind, rows in draws]

    def step(kind: int, rows: Tensor) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        inputs, labels = module.probes().chunk(groups), module.probes.labels.chunk(groups)
        loss = torch.zeros((), device=device)
        for own, probes, wanted in zip(rows, inputs, labels, strict=True):
            network = map_network(kinds[kind].network, lambda w, own=own: w[own])
            found = module.outputs(network, probes).logits.flatten(0, 1)
            loss = loss + cross_entropy(found, wanted.repeat(len(own)))
        loss.backward()
        optimiser.step()
        return loss.detach()

    run = GraphSteps(optimiser) if on_gpu else None
    for number, (kind, rows) in enumerate(draws):
        falling = RATE * 0.5 * (1 + math.cos(math.pi * number / steps))
        for group in optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(falling)
            else:
                group["lr"] = falling
        ask = partial(step, kind)
        ask(rows) if run is None else run(ask, rows, of=kind)


def _draws(
    accuracies: Sequence[Tensor], steps: int, seed: int, groups: int, asked: int
) -> list[tuple[int, Tensor]]:
    """For each step the kind it asks, and which of its networks, ``[groups, networks]``."""
    generator = torch.Generator().manual_seed(seed)
    best = max(float(accuracy.max()) for accuracy in accuracies)
    chances = [(accuracy / max(best, 1e-6)) ** POWER + 1e-3 for accuracy in accuracies]
    shares = torch.stack([chance.sum() for chance in chances])
    # From a source of their own, so that one kind alone is asked as ever.
    turns = torch.multinomial(
        shares, steps, replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    drawn = []
    for kind in turns.tolist():
        count = min(asked, len(chances[kind]))
        rows = [torch.multinomial(chances[kind], count, generator=generator) for _ in range(groups)]
        drawn.append((kind, torch.stack(rows)))
    return drawn
