"""The paper's grid of 16,000 configurations, and reproducible samples of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from transformer_nfn.known_tasks import SEED_KINDS
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.training.randomness import keys, permutation, run_seed, shared_seed

OPTIMIZERS = ("sgd", "sgdm", "adam", "rmsprop")
_PLAIN_RATES = (1e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2, 7e-2)
_ADAPTIVE_RATES = (3e-4, 5e-4, 1e-3, 3e-3, 5e-3, 1e-2, 3e-2, 5e-2)
LEARNING_RATES = {
    "sgd": _PLAIN_RATES,
    "sgdm": _PLAIN_RATES,
    "adam": _ADAPTIVE_RATES,
    "rmsprop": _ADAPTIVE_RATES,
}
INIT_STDS = {
    "sgd": (0.1, 0.15, 0.2, 0.25, 0.3),
    "sgdm": (0.1, 0.15, 0.2, 0.25, 0.3),
    "adam": (0.1, 0.2, 0.3, 0.4, 0.5),
    "rmsprop": (0.1, 0.2, 0.3, 0.4, 0.5),
}
L2S = (1e-8, 1e-7, 1e-6, 1e-4, 1e-2)
DROPOUTS = (0.0, 0.05, 0.1, 0.15, 0.2)
TRAIN_FRACTIONS = (1.0, 0.9, 0.8, 0.7)
GRID_SIZE = 16_000


@dataclass(frozen=True)
class Config:
    """One run: its stable id in the grid, and everything its result depends on.

    Attributes:
        seeds: ``each`` if every run has its own seed, ``one`` if all runs of the zoo share it;
            their initial weights are then the same numbers times ``init_std``.

    >>> config = sample(1)[0]
    >>> config.optimizer, config.to_json()["seeds"]
    ('sgd', 'each')
    """

    run: str
    optimizer: str
    learning_rate: float
    l2: float
    init_std: float
    dropout: float
    train_fraction: float
    seed: int
    seeds: str = "each"

    def to_json(self) -> dict[str, Any]:
        """The run as plain JSON values."""
        return asdict(self)


def grid(seed: int = 0, seeds: str = "each") -> list[Config]:
    """All 16,000 configurations in a fixed order; run ids ``00000`` to ``15999``.

    Args:
        seed: of the build.
        seeds: ``each`` gives every run its own seed; ``one`` gives all runs the same, as the
            authors do.

    >>> len(grid()), grid()[-1].run, grid()[-1].optimizer
    (16000, '15999', 'rmsprop')
    """
    if seeds not in SEED_KINDS:
        raise ZooError(f"seeds must be {' or '.join(SEED_KINDS)}, found '{seeds}'")
    return list(_grid(seed, seeds))


@functools.cache
def _grid(seed: int, seeds: str) -> tuple[Config, ...]:
    # Cached, because 16,000 objects take a tenth of a second.
    shared = shared_seed(seed)
    return tuple(
        Config(f"{i:05d}", *point, shared if seeds == "one" else run_seed(seed, i), seeds)
        for i, point in enumerate(_points())
    )


def _points() -> Iterator[tuple[str, float, float, float, float, float]]:
    for name in OPTIMIZERS:
        rates, stds = LEARNING_RATES[name], INIT_STDS[name]
        for rate, std, l2, dropout, fraction in product(
            rates, stds, L2S, DROPOUTS, TRAIN_FRACTIONS
        ):
            yield name, rate, l2, std, dropout, fraction


def sample(runs: int, seed: int = 0, seeds: str = "each") -> list[Config]:
    """A random sample of the grid, with the four optimisers equally often (to within one).

    The sample does not depend on ``seeds`` (see `grid`), and a smaller one is part of a larger.

    >>> [config.optimizer for config in sample(4)]
    ['sgd', 'sgdm', 'adam', 'rmsprop']
    """
    if not 1 <= runs <= GRID_SIZE:
        raise ZooError(f"runs must lie between 1 and {GRID_SIZE:,}, found {runs}")
    every = grid(seed, seeds)
    each = GRID_SIZE // len(OPTIMIZERS)
    key = keys(torch.tensor([seed] * len(OPTIMIZERS)), 17, torch.arange(len(OPTIMIZERS)))
    orders = permutation(key, each).tolist()
    chosen = [every[each * (i % 4) + orders[i % 4][i // 4]] for i in range(runs)]
    return sorted(chosen, key=lambda config: config.run)
