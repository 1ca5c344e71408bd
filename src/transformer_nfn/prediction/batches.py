"""In which order do networks come? Batches of one kind each, the same however a training is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Networks of one kind for one step.

    Attributes:
        kind: which of the data sets they are of.
        picks: which of its networks, ``[seeds, batch]``.
    """

    kind: int
    picks: Tensor


def epoch_batches(
    sizes: Sequence[int],
    counts: Sequence[int],
    batch: int,
    seeds: Sequence[int],
    epoch: int,
    device: torch.device,
) -> list[Batch]:
    """The batches of one epoch.

    A seed's networks are drawn from the seed alone. When which kind comes is drawn from the epoch
    alone, so all seeds are at the same kind in a step (which makes it one CUDA graph) and none
    depends on its company.

    Args:
        sizes: how many networks each kind has.
        counts: how many of them the epoch takes.
        batch: networks in a batch at most.
        seeds: which.
        epoch: counted from 0.
        device: where the picks are made.
    """
    by_seed = [seed_orders(sizes, counts, seed, epoch, device) for seed in seeds]
    waiting = [
        iter(torch.stack([orders[kind] for orders in by_seed]).split(batch, 1))
        for kind in range(len(sizes))
    ]
    turns = torch.tensor([kind for kind, n in enumerate(counts) for _ in range(steps(n, batch))])
    shuffled = torch.randperm(len(turns), generator=torch.Generator().manual_seed(epoch))
    return [Batch(kind, next(waiting[kind])) for kind in turns[shuffled].tolist()]


def steps(count: int, batch: int) -> int:
    """How many batches ``count`` networks make, the last perhaps incomplete."""
    return -(-count // batch)


def seed_orders(
    sizes: Sequence[int], counts: Sequence[int], seed: int, epoch: int, device: torch.device
) -> list[Tensor]:
    """Which networks one epoch of one seed takes of each kind, none again before all.

    Drawn on a GPU where they lie on one.
    """
    where = device if device.type == "cuda" else torch.device("cpu")
    source = torch.Generator(where).manual_seed((seed + 1) * 1_000_003 + epoch)
    orders = []
    for n, count in zip(sizes, counts, strict=True):
        rounds = [torch.randperm(n, generator=source, device=where) for _ in range(steps(count, n))]
        orders.append(torch.cat(rounds)[:count].to(device))
    return orders
