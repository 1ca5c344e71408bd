"""The grid of runs, and their randomness: one seed for all runs, or one each."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from transformer_nfn.zoo import (
    Config,
    Recipe,
    grid,
    sample,
    train,
)
from transformer_nfn.zoo.training.grid import GRID_SIZE, OPTIMIZERS
from transformer_nfn.zoo.training.randomness import dropout_threshold, keep_mask
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import initial_weights

from .conftest import random_images
from .test_training import STEP_PATHS, epochs_of

STDS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)


def two_runs(seeds: str) -> list[Config]:
    """Two runs of the grid with equal configurations, except for their seeds."""
    first, second = sample(2, seed=1, seeds=seeds)
    plain = dict(optimizer="adam", learning_rate=1e-3, l2=1e-6, init_std=0.2)
    plain |= dict(dropout=0.1, train_fraction=0.8)
    return [replace(config, **plain) for config in (first, second)]  # type: ignore[arg-type]


def same(both: Tensor) -> bool:
    return torch.equal(both[0], both[1])


def test_the_grid_has_the_papers_16000_configurations() -> None:
    every = grid()
    assert len({c.run for c in every}) == len(every) == 16_000
    values = {
        (c.optimizer, c.learning_rate, c.l2, c.init_std, c.dropout, c.train_fraction) for c in every
    }
    assert len(values) == 16_000
    assert Counter(c.optimizer for c in every) == dict.fromkeys(OPTIMIZERS, 4000)
    sgdm = [c for c in every if c.optimizer == "sgdm"]
    assert {c.learning_rate for c in sgdm} == {1e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2, 7e-2}
    adam = [c for c in every if c.optimizer == "adam"]
    assert {c.init_std for c in adam} == {0.1, 0.2, 0.3, 0.4, 0.5}


def test_run_ids_are_stable() -> None:
    """Changing these breaks every existing zoo."""
    every = grid(seed=0)
    assert (every[0].run, every[15_999].run) == ("00000", "15999")
    assert every[12_345].learning_rate == 3e-4
    assert every[12_345].optimizer == "rmsprop"
    assert every[0].seed == grid(seed=0)[0].seed != grid(seed=1)[0].seed
    assert every[84].seed == 7418715323082864080
    assert len({c.seed for c in every}) == 16_000


def test_samples_are_balanced_nested_and_reproducible() -> None:
    for runs in (1, 10, 256):
        chosen = sample(runs, seed=5)
        assert chosen == sample(runs, seed=5)
        assert len({c.run for c in chosen}) == runs
        counts = Counter(c.optimizer for c in chosen).values()
        assert max(counts) - min(counts) <= 1
        assert {c.run for c in chosen} <= {c.run for c in sample(2 * runs, seed=5)}
    assert chosen != sample(runs, seed=6)


def test_one_seed_for_all_runs_of_the_grid() -> None:
    shared, own = grid(4, "one"), grid(4, "each")
    assert len({config.seed for config in shared}) == 1
    assert len({config.seed for config in own}) == GRID_SIZE
    assert shared[0].seed not in {config.seed for config in own}
    assert shared[0].seed != grid(5, "one")[0].seed
    assert own == grid(4)
    one, each = sample(40, 7, "one"), sample(40, 7, "each")
    assert [replace(c, seed=0, seeds="each") for c in one] == [replace(c, seed=0) for c in each]


def test_shared_initial_weights_are_equal_up_to_the_ratio_of_their_std(any_task: Task) -> None:
    """Also for the largest std, where the truncation at ±2 is at four deviations."""
    for seed in range(4):
        (config,) = sample(1, seed, "one")
        starts = [initial_weights(any_task.sizes, replace(config, init_std=std)) for std in STDS]
        for std, start in zip(STDS, starts, strict=True):
            expected = starts[0] * (std / STDS[0])
            torch.testing.assert_close(start, expected, rtol=1e-6, atol=0)
            assert start.abs().max() < 2
            matrices = start[start != 0]
            assert matrices.std() / std == pytest.approx(1, abs=0.03)


def test_initial_weights_of_existing_zoos_do_not_change() -> None:
    sizes = random_images().sizes
    config = replace(sample(1)[0], init_std=0.5)
    draw = torch.Generator().manual_seed(config.seed)
    expected = torch.zeros(1, sizes.num_weights)
    for name, view in sizes.views(expected).items():
        if ".W" in name:
            torch.nn.init.trunc_normal_(view, std=0.5, generator=draw)
    assert torch.equal(initial_weights(sizes, config), expected[0])


@pytest.mark.parametrize("path", STEP_PATHS)
def test_runs_of_one_seed_share_subset_order_crops_and_dropout_bits(path: str) -> None:
    task = random_images(28, 4, 255, n=60)
    for seeds, shared in (("one", True), ("each", False)):
        first, second = two_runs(seeds)
        second = replace(second, optimizer="sgd", init_std=0.3)
        found = epochs_of(task, [first, second], path)
        for epoch in found:
            assert same(epoch.order) is shared
            assert same(epoch.order.sort().values) is shared
            assert same(epoch.crop) is shared
            assert same(epoch.drop) is shared
            rows = torch.arange(8)
            threshold = dropout_threshold(torch.tensor([0.1, 0.1]))
            bits = keep_mask(epoch.drop[:, 0, 0].contiguous(), threshold, rows, 32)
            assert same(bits) is shared
            assert not bits.all()
        assert not torch.equal(found[0].order, found[1].order), "another order in every epoch"


def test_a_smaller_fraction_is_a_subset_of_a_larger() -> None:
    task = random_images()
    first, second = two_runs("one")
    (epoch,) = epochs_of(task, [replace(first, train_fraction=1.0), second], "torch", 1)
    smaller = int(task.num_samples["train"] * 0.8 + 1e-9)
    assert set(epoch.order[1, :smaller].tolist()) < set(epoch.order[0].tolist())


@pytest.mark.parametrize("path", STEP_PATHS)
def test_equal_runs_of_one_seed_train_to_equal_weights(path: str) -> None:
    task = random_images(28, 4, 255, n=60)
    for seeds, shared in (("one", True), ("each", False)):
        trained = train(task, two_runs(seeds), Recipe(2, batch=16), path=path)
        a, b = ([i for i, r in enumerate(trained.rows) if r["run"] == run]
                for run in sorted({row["run"] for row in trained.rows}))  # fmt: skip
        assert torch.equal(trained.weights[a], trained.weights[b]) is shared
        assert {row["seeds"] for row in trained.rows} == {seeds}
