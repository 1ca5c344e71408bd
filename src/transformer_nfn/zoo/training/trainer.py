"""Training of many runs at once, each by its own configuration and schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from transformer_nfn.io.json_fields import Fields
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store.folder import check_recipe
from transformer_nfn.zoo.training import randomness
from transformer_nfn.zoo.training.backends import choose_runner
from transformer_nfn.zoo.training.grid import Config
from transformer_nfn.zoo.training.steps import (
    HOLD,
    Epoch,
    Runner,
    coefficients,
    learning_rate,
    rules,
)
from transformer_nfn.zoo.training.tasks import Split, Task

Report = Callable[[int], None]
"""Called with the number of networks that finished an epoch."""
# Truncation of initial weights that runs share, in standard deviations: the ±2 of
# `trunc_normal_` for the largest std of the grid, 0.5.
SHARED_CUT = 4.0
PERCENTS = (50, 75, 100)
"""Of the epochs, when checkpoints are stored."""


@dataclass(frozen=True)
class Recipe:
    """Training parameters that all runs of a zoo share.

    Attributes:
        select: the split on which ``best`` is chosen, ``held`` or (as the authors) ``test``.
        percents: when checkpoints are stored, in percent of the epochs; of one only that is tested
            and stored, and no best epoch.
        until: end of training, in percent of the epochs of the learning rate schedule.

    >>> Recipe(epochs=10, until=75).checkpoint_epochs()
    {5: 50, 8: 75}
    """

    epochs: int
    batch: int = 128
    precision: str = "float32"
    select: str = "held"
    percents: tuple[int, ...] = PERCENTS
    until: int = 100

    def __post_init__(self) -> None:
        check_recipe(Fields(self.to_json(), "the recipe", ZooError))

    @property
    def chooses(self) -> bool:
        """Whether the best epoch of each run is chosen and stored."""
        return len(self.percents) > 1

    @property
    def epochs_trained(self) -> int:
        """Number of epochs up to ``until``."""
        return self._epoch_at(self.until)

    def _epoch_at(self, percent: int) -> int:
        return max(1, -(-self.epochs * percent // 100))

    def checkpoint_epochs(self) -> dict[int, int]:
        """Epochs (from 1) of checkpoints with their percent; the latest, if several coincide."""
        return {self._epoch_at(p): p for p in self.percents if p <= self.until}

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"percents": list(self.percents)}


@dataclass
class Trained:
    """Result of `train`.

    Attributes:
        rows: index rows, one per checkpoint or crashed run.
        weights: ``[checkpoints, weights]`` of the rows that are not crashed, in order.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class _Snapshot:
    """Weights of all runs after an epoch, with accuracies and the score that selects the best."""

    epoch: Tensor
    weights: Tensor
    train_accuracy: Tensor
    score: Tensor
    test: tuple[Tensor, Tensor] | None = None

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is known of each run without its test."""
        return self.epoch, self.weights, self.train_accuracy, self.score

    def cpu(self) -> _Snapshot:
        """A copy in main memory."""
        test = None if self.test is None else (self.test[0].cpu(), self.test[1].cpu())
        epoch, weights, train_accuracy, score = (x.cpu() for x in self.trained)
        return _Snapshot(epoch, weights, train_accuracy, score, test)


def initial_weights(sizes: NetworkSizes, config: Config) -> Tensor:
    """Truncated-normal matrices with the configured std, zero biases: ``[num_weights]``.

    If all runs share a seed, these are the same numbers times the std.
    """
    generator = torch.Generator().manual_seed(config.seed)
    flat = torch.zeros(1, sizes.num_weights)
    for name, view in sizes.views(flat).items():
        if ".W" not in name:
            continue
        if config.seeds == "one":
            # Truncated at ±2 for every std, PyTorch would redraw a few numbers for the largest std
            # only, and all later tensors would differ.
            nn.init.trunc_normal_(view, a=-SHARED_CUT, b=SHARED_CUT, generator=generator)
            view *= config.init_std
        else:
            nn.init.trunc_normal_(view, std=config.init_std, generator=generator)
    return flat[0]


def train(
    task: Task,
    configs: Sequence[Config],
    recipe: Recipe,
    *,
    device: str = "cpu",
    path: str = "auto",
    report: Report | None = None,
    stored: torch.dtype = torch.float32,
) -> Trained:
    """Train all runs at once and return their checkpoints.

    The result of a run does not depend on the others.

    Args:
        path: the code that computes a step, see `backends.describe_path`.
        report: called after every epoch.
        stored: type of stored weights; checkpoints are rounded to it before they are tested.

    >>> from transformer_nfn.zoo import load_task, sample
    >>> trained = train(load_task("digits", samples=32), sample(1), Recipe(epochs=1, batch=16))
    >>> [row["best"] for row in trained.rows], trained.weights.shape
    ([False, True], torch.Size([2, 18122]))
    """
    data = task.to(device)
    n = task.num_samples["train"]
    counts = {c.run: int(n * c.train_fraction + 1e-9) for c in configs}
    for config in configs:
        if counts[config.run] < recipe.batch:
            raise ZooError(
                f"run {config.run} has {counts[config.run]} training samples, fewer than one "
                f"batch of {recipe.batch}"
            )
    # Runs with more steps per epoch come first: the active runs are always the first few.
    runs = sorted(configs, key=lambda c: -counts[c.run])
    training = Training(data, runs, [counts[c.run] for c in runs], recipe, device, path, stored)
    return training.run(report)


class Training:
    """Many runs in training; ``counts`` are their numbers of samples, non-increasing."""

    def __init__(
        self,
        task: Task,
        runs: Sequence[Config],
        counts: list[int],
        recipe: Recipe,
        device: str,
        path: str,
        stored: torch.dtype,
    ) -> None:
        self.stored = stored
        self.task, self.runs, self.counts, self.recipe = task, runs, counts, recipe
        self.device = torch.device(device)
        self.steps = torch.tensor([count // recipe.batch for count in counts])
        self.seeds = torch.tensor([c.seed for c in runs], device=self.device)
        self.rates = torch.tensor([c.learning_rate for c in runs], dtype=torch.float64)
        self.rules = rules(runs)
        p = torch.tensor([c.dropout for c in runs])
        weights = torch.stack([initial_weights(task.sizes, c) for c in runs]).to(self.device)
        threshold = randomness.dropout_threshold(p).to(self.device)
        self.runner: Runner = choose_runner(
            path, task, weights, threshold, recipe.precision, recipe.batch
        )
        self.crashed_at = torch.zeros(len(runs), dtype=torch.int64, device=self.device)
        self.subset = self._subsets()

    def _subsets(self) -> list[Tensor | None]:
        """The samples each run trains on; None for the first rows."""
        if not self.task.random_subset:
            return [None] * len(self.runs)
        key = randomness.keys(self.seeds, randomness.SUBSET, 0)
        n = self.task.num_samples["train"]
        return [
            randomness.permutation(k, n)[:count].sort().values
            for k, count in zip(key, self.counts, strict=True)
        ]

    def run(self, report: Report | None) -> Trained:
        """Train all epochs, evaluating and storing checkpoints."""
        keep = self.recipe.checkpoint_epochs()
        snapshots: list[tuple[int, _Snapshot]] = []
        best: _Snapshot | None = None
        best_loss = torch.full((len(self.runs),), float("inf"), device=self.device)
        for epoch in range(self.recipe.epochs_trained):
            train_accuracy = self.train_epoch(epoch)
            if report:
                report(len(self.runs))
            if not (self.recipe.chooses or epoch + 1 in keep):
                continue
            weights = self.runner.weights.to(self.stored).float()
            now = _Snapshot(
                torch.full((len(self.runs),), epoch + 1, device=self.device),
                weights,
                train_accuracy,
                torch.full((len(self.runs),), float("nan"), device=self.device),
            )
            if self.recipe.select == "test" or epoch + 1 in keep:
                now.test = self.evaluate(weights, "test")
            if self.recipe.select == "held":
                loss, now.score = self.evaluate(weights, "held")
            else:
                assert now.test is not None
                loss, now.score = now.test
            if self.recipe.chooses:
                best = _better(best, now, loss, best_loss)
            if epoch + 1 in keep:
                now.weights = now.weights.clone()
                snapshots.append((keep[epoch + 1], now))
        if best is not None:
            best.test = self.evaluate(best.weights, "test")
        return self._collect(snapshots, best)

    def train_epoch(self, epoch: int) -> Tensor:
        """Train one epoch; the running training accuracy of each run."""
        step_of = torch.arange(int(self.steps.max()))
        clock = (self.steps[:, None] * epoch + step_of).to(self.device)
        rate = learning_rate(self.rates, epoch, self.recipe.epochs)
        coef = coefficients(self.rules[:, None], rate[:, None], clock.cpu() + 1).to(self.device)
        seeds = self.seeds[:, None]
        crop = randomness.keys(seeds, randomness.CROP, clock)
        # The site of a dropout is part of its time, so that no two use the same bits.
        site = torch.arange(self.task.sizes.dropout_sites, device=self.device)
        time = clock[..., None] * len(site) + site
        drop = randomness.keys(seeds[..., None], randomness.DROPOUT, time)
        active = (self.steps[:, None] > step_of).to(self.device)
        coef[~active] = torch.tensor(HOLD, device=self.device)
        order = self._order(epoch)
        total, hits = self.runner.epoch(Epoch(order, self.steps, crop, drop, coef))
        self._mark_crashed(total, epoch)
        return hits / (self.steps * self.recipe.batch).to(self.device)

    def _order(self, epoch: int) -> Tensor:
        """Order of the samples of each run, ``int64 [runs, samples]``, short rows padded."""
        key = randomness.keys(self.seeds, randomness.ORDER, epoch)
        out = torch.zeros(len(self.runs), max(self.counts), dtype=torch.int64, device=self.device)
        # Runs with equally many samples are drawn together.
        at = 0
        while at < len(self.runs):
            count = self.counts[at]
            stop = at + self.counts.count(count)
            order = randomness.permutation(key[at:stop], count)
            out[at:stop, :count] = order
            for row in range(at, stop):
                subset = self.subset[row]
                if subset is not None:
                    out[row, :count] = subset[order[row - at]]
            at = stop
        return out

    def _mark_crashed(self, loss: Tensor, epoch: int) -> None:
        """Record runs whose loss or weights are not finite, and zero their weights."""
        weights = self.runner.weights
        bad = ~(loss.isfinite() & weights.sum(1).isfinite()) & (self.crashed_at == 0)
        self.crashed_at[bad] = epoch + 1
        weights[self.crashed_at > 0] = 0.0

    def evaluate(self, weights: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Mean loss and accuracy of each run on a split."""
        n = max(self.task.num_samples[split], 1)
        loss, hits = self.runner.evaluate(weights, split)
        return loss / n, hits / n

    def _collect(self, snapshots: list[tuple[int, _Snapshot]], best: _Snapshot | None) -> Trained:
        out, weights = Trained(), []
        held = self.recipe.select == "held"
        # In main memory, because reading single numbers from a GPU waits at each.
        checkpoints = [(percent, False, s.cpu()) for percent, s in snapshots]
        if best is not None:
            checkpoints.append((0, True, best.cpu()))
        crashed_at = self.crashed_at.tolist()
        finite = torch.stack([s.weights.isfinite().all(1) for _, _, s in checkpoints]).all(0)
        for i in sorted(range(len(self.runs)), key=lambda i: self.runs[i].run):
            base = self.runs[i].to_json() | {"crashed": False}
            crash = crashed_at[i]
            if crash or not finite[i]:
                crash = crash or self.recipe.epochs_trained
                out.rows.append(base | {"crashed": True, "epoch": crash, "best": False})
                continue
            for percent, is_best, s in checkpoints:
                assert s.test is not None
                out.rows.append(
                    base
                    | {
                        "epoch": int(s.epoch[i]),
                        "percent": percent,
                        "best": is_best,
                        "train_accuracy": float(s.train_accuracy[i]),
                        "held_accuracy": float(s.score[i]) if held else float("nan"),
                        "test_loss": float(s.test[0][i]),
                        "test_accuracy": float(s.test[1][i]),
                    }
                )
                weights.append(s.weights[i])
        empty = torch.empty(0, self.task.sizes.num_weights)
        out.weights = torch.stack(weights) if weights else empty
        return out


def _better(
    best: _Snapshot | None,
    now: _Snapshot,
    loss: Tensor,
    best_loss: Tensor,
) -> _Snapshot:
    """Update the best epoch of each run: higher score, then lower loss."""
    loss = loss.nan_to_num(float("inf"))
    if best is None:
        best_loss.copy_(loss)
        return deepcopy(now)
    won = (now.score > best.score) | ((now.score == best.score) & (loss < best_loss))
    for held, new in zip(best.trained, now.trained, strict=True):
        held[won] = new[won]
    best_loss[won] = loss[won]
    return best
