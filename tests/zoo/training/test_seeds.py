"""One seed for all runs, or one each: what runs then share, on every path, and who says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from transformer_nfn.zoo import Config, Recipe, Settings, StoreError, Zoo, build, sample, train
from transformer_nfn.zoo.store.folder import Checksums
from transformer_nfn.zoo.training.grid import GRID_SIZE, grid
from transformer_nfn.zoo.training.randomness import dropout_threshold, keep_mask
from transformer_nfn.zoo.training.steps import Epoch, Runner
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import _Training, initial_weights

from ..conftest import SMALL, random_images
from .test_kernels import interpreted
from .test_training import STEP_PATHS

STDS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)


def two_runs(seeds: str, **changes: object) -> list[Config]:
    """Two runs of the grid whose settings are equal but for ``changes``, and for their seeds."""
    first, second = sample(2, seed=1, seeds=seeds)
    plain = dict(optimizer="adam", learning_rate=1e-3, l2=1e-6, init_std=0.2)
    plain |= dict(dropout=0.1, train_fraction=0.8) | changes
    return [replace(config, **plain) for config in (first, second)]  # type: ignore[arg-type]


class Spy:
    """A runner that remembers what it was given."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.epochs = runner, []
        self.weights = runner.weights

    def epoch(self, epoch: Epoch) -> tuple[Tensor, Tensor]:
        self.epochs.append(epoch)
        return self.runner.epoch(epoch)


def epochs_of(task: Task, runs: list[Config], path: str, epochs: int = 2) -> list[Epoch]:
    """What a training of ``runs`` hands to the runner of ``path``, epoch by epoch."""
    n = task.sizes["train"]
    counts = [int(n * config.train_fraction + 1e-9) for config in runs]
    recipe = Recipe(epochs, batch=16)
    training = _Training(task, runs, counts, recipe, "cpu", path, torch.float32)
    spy = Spy(training.runner)
    training.runner = spy  # type: ignore[assignment]
    for epoch in range(epochs):
        training._epoch(epoch)
    return spy.epochs


def same(both: Tensor) -> bool:
    return torch.equal(both[0], both[1])


def test_one_seed_for_all_runs_of_the_grid() -> None:
    shared, own = grid(4, "one"), grid(4, "each")
    assert len({config.seed for config in shared}) == 1
    assert len({config.seed for config in own}) == GRID_SIZE
    assert shared[0].seed not in {config.seed for config in own}
    assert shared[0].seed != grid(5, "one")[0].seed
    assert own == grid(4)


@pytest.mark.parametrize("runs", [3, 40])
def test_both_kinds_choose_the_same_runs(runs: int) -> None:
    one, each = sample(runs, 7, "one"), sample(runs, 7, "each")
    assert [config.run for config in one] == [config.run for config in each]
    assert [replace(c, seed=0, seeds="each") for c in one] == [replace(c, seed=0) for c in each]


def test_shared_initial_weights_are_equal_up_to_the_ratio_of_their_std(any_task: Task) -> None:
    """Also for the widest std, where a cut at ±2 meets four deviations."""
    for seed in range(4):
        (config,) = sample(1, seed, "one")
        starts = [initial_weights(any_task.arch, replace(config, init_std=std)) for std in STDS]
        for std, start in zip(STDS, starts, strict=True):
            expected = starts[0] * (std / STDS[0])
            torch.testing.assert_close(start, expected, rtol=1e-6, atol=0)
            assert start.abs().max() < 2
            matrices = start[start != 0]
            assert matrices.std() / std == pytest.approx(1, abs=0.03)


def test_a_seed_each_gives_other_initial_weights() -> None:
    arch = random_images(8, 2, 16).arch
    first, second = two_runs("each")
    start, other = initial_weights(arch, first), initial_weights(arch, second)
    biases = (start == 0) & (other == 0)
    assert not (start == other)[~biases].any()


def test_initial_weights_of_zoos_that_people_have_do_not_change() -> None:
    """With a seed each, numbers are drawn as they were before runs could share one."""
    arch = random_images(8, 2, 16).arch
    config = replace(sample(1)[0], init_std=0.5)
    draw = torch.Generator().manual_seed(config.seed)
    expected = torch.zeros(1, arch.num_weights)
    for name, view in arch.views(expected).items():
        if ".W" in name:
            torch.nn.init.trunc_normal_(view, std=0.5, generator=draw)
    assert torch.equal(initial_weights(arch, config), expected[0])


@pytest.mark.parametrize("path", STEP_PATHS)
def test_runs_of_one_seed_share_subset_order_crops_and_dropout_bits(path: str) -> None:
    task = random_images(28, 4, n=60)
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


def test_of_two_fractions_of_one_seed_the_smaller_is_part_of_the_larger() -> None:
    task = random_images(8, 2, 16)
    first, second = two_runs("one")
    (epoch,) = epochs_of(task, [replace(first, train_fraction=1.0), second], "torch", 1)
    smaller = int(task.sizes["train"] * 0.8 + 1e-9)
    assert set(epoch.order[1, :smaller].tolist()) < set(epoch.order[0].tolist())


@pytest.mark.parametrize("path", STEP_PATHS)
def test_equal_runs_of_one_seed_train_to_equal_weights(path: str) -> None:
    task = random_images(28, 4, n=60)
    for seeds, shared in (("one", True), ("each", False)):
        trained = train(task, two_runs(seeds), Recipe(2, batch=16), path=path)
        a, b = ([i for i, r in enumerate(trained.rows) if r["run"] == run]
                for run in sorted({row["run"] for row in trained.rows}))  # fmt: skip
        assert torch.equal(trained.weights[a], trained.weights[b]) is shared
        assert {row["seeds"] for row in trained.rows} == {seeds}


def test_equal_runs_of_one_seed_train_to_equal_weights_in_the_kernels() -> None:
    found = interpreted("seeds")
    assert found.pop("moved") == [True, True, True]
    # Beside the other run of the shared seed, and beside a run with a seed of its own.
    for what, (shared, own) in found.items():
        assert (shared, own) == (True, False), what


@pytest.fixture(scope="module")
def shared_zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Like `small_zoo`, with one seed for all; tests must not change it."""
    settings = replace(SMALL, runs=8, epochs=1, seeds="one")
    return build(tmp_path_factory.mktemp("zoo") / "shared", settings, workers=1)


def test_a_zoo_says_which_kind_it_is(small_zoo: Zoo, shared_zoo: Zoo) -> None:
    assert (small_zoo.seeds, shared_zoo.seeds) == ("each", "one")
    assert shared_zoo.about["seeds"] == "one"
    assert len(np.unique(shared_zoo.table["seed"])) == 1
    assert len(np.unique(small_zoo.table["seed"])) == 12
    runs = {config.run for config in sample(8, SMALL.seed)}
    assert set(shared_zoo.table["run"]) == runs


def test_a_build_of_the_other_kind_is_refused(small_zoo: Zoo, shared_zoo: Zoo) -> None:
    with pytest.raises(StoreError, match="holds another zoo: seeds each, asked for one"):
        build(small_zoo.path, replace(SMALL, seeds="one"))
    settings = replace(SMALL, runs=8, epochs=1)
    with pytest.raises(StoreError, match="holds another zoo: seeds one, asked for each"):
        build(shared_zoo.path, settings)
    build(shared_zoo.path, replace(settings, seeds="one"))


def test_zoos_from_before_there_was_a_choice_have_a_seed_each(tmp_path: Path) -> None:
    settings = Settings("digits", runs=2, epochs=1, batch=256)
    path = build(tmp_path / "zoo", settings, workers=1).path
    about = json.loads((path / "zoo.json").read_text())
    del about["seeds"]
    Checksums(path).replace("zoo.json", json.dumps(about).encode())
    assert Zoo.open(path).seeds == "each"
    build(path, settings)
    with pytest.raises(StoreError, match="seeds each, asked for one"):
        build(path, replace(settings, seeds="one"))
