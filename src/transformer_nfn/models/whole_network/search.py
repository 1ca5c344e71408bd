"""Search for probe inputs that accurate networks agree on.

Probes that start as noise stay noise: training a predictor on some thousand networks moves them too
little. Optimised for inputs that many accurate networks assign to one class, they become images of
the task's classes in seconds, from weights and accuracies alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from transformer_nfn.models.batch import Batch
from transformer_nfn.models.cuda_graphs import GraphSteps, set_rate
from transformer_nfn.models.predictor import LearningSet

STEPS, MAX_STEPS = 480, 1440
STEPS_PER_EPOCH = 60
"""A training of a few epochs searches briefly, and so does one on a few networks."""
NETWORKS_PER_STEP = 8
"""With many networks the search takes one step per so many of them."""
PER_GROUP, MIN_PER_GROUP = 8, 2
"""Networks that a group of probes queries per step: few, so that some agree, not all."""
NETWORKS_PER_QUERY = 350
"""Training networks for each network that a group queries per step."""
POWER = 6
"""Networks are drawn by this power of their accuracy."""
RATE = 0.01
WRITERS = 8
"""Language models that write the texts of a group of probes."""


def search_steps(epochs: int, networks: int = STEPS) -> int:
    """Number of search steps before a training of so many epochs and networks."""
    many = min(MAX_STEPS, networks // NETWORKS_PER_STEP)
    return min(max(STEPS, many), STEPS_PER_EPOCH * epochs, networks)


def networks_per_group(networks: int) -> int:
    """Number of networks that each group of probes queries per step."""
    return max(MIN_PER_GROUP, min(PER_GROUP, networks // NETWORKS_PER_QUERY))


def find_probes(
    module: Any,
    datasets: Sequence[LearningSet],
    seed: int,
    *,
    steps: int = STEPS,
    per_group: int = PER_GROUP,
) -> None:
    """Optimise the module's probes such that networks answer with the probes' labels.

    Networks are drawn by a high power of their skill, from ``seed`` alone. Each step queries
    networks of one size; every group of probes draws its own networks.

    Args:
        module: has ``probes`` and ``outputs(network, inputs)``; without probes nothing happens.
        datasets: networks to query, one data set per size.
        seed: of the draws.
        steps: of Adam.
        per_group: networks that a group queries per step.
    """
    if module.probes is None or steps < 1:
        return
    device = datasets[0].accuracy.device
    on_gpu = device.type == "cuda"
    start = torch.tensor(RATE, device=device) if on_gpu else RATE
    optimiser = torch.optim.Adam(module.probes.parameters(), start, capturable=on_gpu)
    groups = module.probes.groups
    draws = _draws([data.skills for data in datasets], steps, seed, groups, per_group)
    draws = [(size, rows.to(device)) for size, rows in draws]

    def step(size: int, rows: Tensor) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        inputs, labels = module.probes().chunk(groups), module.probes.labels.chunk(groups)
        loss = torch.zeros((), device=device)
        for picks, probes, label in zip(rows, inputs, labels, strict=True):
            batch = datasets[size].network[picks]
            logits = module.outputs(batch, probes).logits.flatten(0, 1)
            loss = loss + cross_entropy(logits, label.repeat(len(picks)))
        loss.backward()
        optimiser.step()
        return loss.detach()

    run = GraphSteps(optimiser) if on_gpu else None
    for number, (size, rows) in enumerate(draws):
        set_rate(optimiser, RATE * 0.5 * (1 + math.cos(math.pi * number / steps)))
        update = partial(step, size)
        update(rows) if run is None else run(update, rows, of=size)


@torch.no_grad()
def sampled_texts(
    answers: Callable[[Batch, Tensor], Tensor],
    probes: Any,
    data: LearningSet,
    seed: int,
) -> Tensor:
    """Texts ``[count, length]`` that networks, drawn by their skill, sample token by token.

    Args:
        answers: logits ``[networks, texts, length, tokens]`` of networks on texts in one-hot form.
        probes: the `TokenProbes` that the texts are for.
        data: causal language models; each writes as many.
        seed: of the draws.
    """
    device, groups = probes.mix.device, probes.groups
    count, length, tokens = probes.mix.shape
    writers = min(WRITERS, len(data), count // groups)
    ((_, drawn),) = _draws([data.skills], 1, seed, groups, writers)
    generator = torch.Generator().manual_seed(seed)

    def sampled(batch: Batch, text: Tensor, place: int) -> Tensor:
        inputs = one_hot(text, tokens).float().to(device)
        logits = answers(batch, inputs)[0, :, place]
        return torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator).squeeze(1)

    texts = []
    for row in drawn.flatten().tolist():
        batch = data.network[row : row + 1]
        text = torch.randint(tokens, (-(-count // drawn.numel()), length), generator=generator)
        text[:, 0] = sampled(batch, text, 0)
        for place in range(length - 1):
            text[:, place + 1] = sampled(batch, text, place)
        texts.append(text)
    return torch.cat(texts)[:count].to(device)


def _draws(
    skills: Sequence[tuple[Tensor, Tensor]], steps: int, seed: int, groups: int, per_group: int
) -> list[tuple[int, Tensor]]:
    """For each step the size it queries, and which of its networks, ``[groups, networks]``."""
    generator = torch.Generator().manual_seed(seed)
    best = max(float(skill.max()) for pair in skills for skill in pair)
    weights = [[(skill / max(best, 1e-6)) ** POWER + 1e-3 for skill in pair] for pair in skills]
    totals = torch.stack([pair[0].sum() for pair in weights])
    # A separate generator, so that the draws of a single size do not depend on it.
    turns = torch.multinomial(
        totals, steps, replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    draws = []
    for size in turns.tolist():
        pair = weights[size]
        count = min(per_group, len(pair[0]))
        rows = [
            torch.multinomial(pair[group % 2], count, generator=generator)
            for group in range(groups)
        ]
        draws.append((size, torch.stack(rows)))
    return draws
