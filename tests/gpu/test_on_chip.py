"""On an H100 or H200: the on-chip kernels beside PyTorch, and that equal seeds give equal bits."""

import pytest
import torch
from kernel_cases import bright_images, compare, moved_apart, sized, slow_runs

from transformer_nfn.zoo import Recipe, SizeGroup, load_task, sample
from transformer_nfn.zoo.training.backends import choose_runner, describe_path
from transformer_nfn.zoo.training.kernels.on_chip import OnChipPass
from transformer_nfn.zoo.training.tasks import ImageTask
from transformer_nfn.zoo.training.trainer import initial_weights, train

pytestmark = pytest.mark.gpu


def no_worse(task: ImageTask, batch: int, noise: float) -> None:
    """Loss and gradients have at most 1.2 times the error of autocast, the same in two runs."""
    found, again = (
        compare(
            task, networks=64, batch=batch, precision="bf16", device="cuda", noise=noise,
            kind=OnChipPass,
        )
        for _ in range(2)
    )  # fmt: skip
    errors = found.errors(task)
    worst = {k: (round(a, 5), round(b, 5)) for k, (a, b) in errors.items() if a > 1.2 * b}
    assert not worst, worst
    assert torch.equal(found.fused[1], again.fused[1])


@pytest.mark.parametrize(("batch", "noise"), [(128, 0.1), (128, 0.0), (100, 0.1)])
def test_no_less_exact_than_pytorch(batch: int, noise: float) -> None:
    no_worse(bright_images(28, 4, 2), batch, noise)


@pytest.mark.parametrize("size", ["w32-h2-d1", "w32-h2-d3"])
def test_other_depths(size: str) -> None:
    no_worse(sized(bright_images(28, 4, 2), SizeGroup.from_name(size)), 128, 0.1)


def test_small_images() -> None:
    task = load_task("digits", None)
    assert isinstance(task, ImageTask)
    no_worse(task, 128, 0.1)


def test_they_are_the_default_of_the_papers_networks() -> None:
    task = bright_images(28, 4, 2).to("cuda")
    assert describe_path("auto", "cuda", task.sizes, "bf16")[0] == "on-chip"
    weights = torch.stack([initial_weights(task.sizes, c) for c in sample(2)]).cuda()
    threshold = torch.zeros(2, dtype=torch.int32, device="cuda")
    runner = choose_runner("auto", task, weights, threshold, "bf16", 32)
    assert runner.kind is OnChipPass  # type: ignore[attr-defined]


# Of 720 samples in batches of 100, train fractions from 1 to 0.7 make 7 to 5 steps.
RECIPE = Recipe(epochs=2, batch=100, precision="bf16")


def test_a_training_is_that_of_the_plain_path() -> None:
    task, runs = bright_images(28, 4, 2, n=800), slow_runs(8)
    assert len({c.train_fraction for c in runs}) > 1
    plain = train(task, runs, Recipe(epochs=2, batch=100), device="cuda", path="torch")
    start = torch.stack([initial_weights(task.sizes, c) for c in runs])
    last = [i for i, row in enumerate(plain.rows) if row["percent"] == 100]
    for path in ("auto", "fused"):
        ours = train(task, runs, RECIPE, device="cuda", path=path)
        # Rounding to bf16 changes about 1 %.
        assert max(moved_apart(start, ours.weights[last], plain.weights[last])) < 0.1, path


def test_equal_seeds_give_equal_bits() -> None:
    task, runs = bright_images(28, 4, 2, n=800), sample(8)
    first, again = (train(task, runs, RECIPE, device="cuda") for _ in range(2))
    assert torch.equal(first.weights, again.weights)


def test_a_run_does_not_notice_its_neighbours() -> None:
    task, runs = bright_images(28, 4, 2, n=800), sample(8)
    short = min(runs, key=lambda c: c.train_fraction)
    together = train(task, runs, RECIPE, device="cuda")
    alone = train(task, [short], RECIPE, device="cuda")
    rows = [i for i, row in enumerate(together.rows) if row["run"] == short.run]
    assert torch.equal(together.weights[rows], alone.weights)
