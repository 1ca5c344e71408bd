"""On a GPU: the fused kernels against float64, beside PyTorch in the same precision."""

from dataclasses import replace

import pytest
import torch
from kernel_cases import bright_images, compare, long_texts, sized
from scipy import stats

from transformer_nfn import spaces
from transformer_nfn.zoo import Recipe, SizeGroup, load_task, sample
from transformer_nfn.zoo.sizes import PAPER
from transformer_nfn.zoo.training.backends import choose_runner
from transformer_nfn.zoo.training.steps import TorchRunner
from transformer_nfn.zoo.training.tasks import Task
from transformer_nfn.zoo.training.trainer import Training, train

pytestmark = pytest.mark.gpu


def task_of(name: str, group: SizeGroup = PAPER) -> Task:
    if name == "texts":
        return long_texts(group=group)
    if name == "images":
        return sized(bright_images(28, 4, 2), group)
    return load_task("digits", None, group=group)


def trained(task: Task, networks: int) -> torch.Tensor:
    """Weights of runs that have learnt for two epochs."""
    runs = [replace(c, train_fraction=1.0) for c in sample(networks)]
    count = min(task.num_samples["train"], 320)
    on = task.to("cuda")
    training = Training(
        on, runs, [count] * networks, Recipe(epochs=2, batch=16), "cuda", "torch", torch.float32
    )
    for epoch in range(2):
        training.train_epoch(epoch)
    return training.runner.weights


@pytest.mark.parametrize("start", ["random", "initial", "trained"])
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("name", ["images", "digits", "texts"])
def test_no_less_exact_than_pytorch(name: str, precision: str, start: str) -> None:
    task = task_of(name)
    weights = trained(task, 64) if start == "trained" else None
    found = compare(
        task, networks=64, batch=128, precision=precision, device="cuda", weights=weights,
        noise=0.1 if start == "random" else 0.0,
    )  # fmt: skip
    no_worse(found.errors(task))


def no_worse(errors: dict[str, tuple[float, float]], most: float = 1.2) -> None:
    worst = {k: (round(a, 5), round(b, 5)) for k, (a, b) in errors.items() if a > most * b}
    assert not worst, worst


SIZES = ["w16-h1-d2", "w16-h8-d1", "w32-h4-d2", "w48-h3-d2", "w48-h2-d1", "w64-h2-d2", "w64-h8-d2"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "precision"),
    [("images", "bf16"), ("images", "tf32"), ("digits", "bf16"), ("texts", "bf16")],
)
def test_other_sizes_are_no_less_exact_than_pytorch(name: str, precision: str, size: str) -> None:
    task = task_of(name, SizeGroup.from_name(size))
    found = compare(task, networks=64, batch=128, precision=precision, device="cuda")
    # In tf32 the embedding of width 16 has 1.7 times PyTorch's error.
    no_worse(found.errors(task), 1.2 if precision == "bf16" else 2.0)


@pytest.mark.parametrize("size", SIZES)
def test_other_sizes_train_and_test_by_the_fused_path(size: str) -> None:
    task, runs = load_task("digits", None, group=SizeGroup.from_name(size)), sample(16)
    recipe = Recipe(epochs=2, batch=16, precision="bf16")
    first, again = (train(task, runs, recipe, device="cuda", path="fused") for _ in range(2))
    assert torch.equal(first.weights, again.weights)


def test_runs_by_both_paths_agree_as_two_precisions_of_one_path_do() -> None:
    task, runs = load_task("digits", None), sample(256)
    accuracy = []
    for path, precision in (("torch", "bf16"), ("fused", "bf16"), ("torch", "tf32")):
        recipe = Recipe(epochs=12, batch=16, precision=precision)
        rows = train(task, runs, recipe, device="cuda", path=path).rows
        last = {r["run"]: r["test_accuracy"] for r in rows if r.get("percent") == 100}
        accuracy.append([last.get(c.run, 0.0) for c in runs])
    plain, fused, other = accuracy
    assert stats.ks_2samp(plain, fused).pvalue > 0.05
    floor = stats.kendalltau(plain, other).statistic
    print("tau plain/fused", stats.kendalltau(plain, fused).statistic, "floor", floor)
    assert stats.kendalltau(plain, fused).statistic > min(0.9, floor - 0.02)


@pytest.mark.parametrize("size", [PAPER.name, *SIZES])
@pytest.mark.parametrize("name", ["images", "digits", "texts"])
def test_tested_networks_are_at_most_one_sample_off_plain_float32(name: str, size: str) -> None:
    task = task_of(name, SizeGroup.from_name(size)).to("cuda")
    weights = trained(task, 64)
    threshold = torch.zeros(64, dtype=torch.int32, device="cuda")
    plain = TorchRunner(task, weights, threshold, 128)
    fused = choose_runner("fused", task, weights, threshold, "bf16", 128)
    (loss, hits), (fused_loss, fused_hits) = (r.evaluate(weights, "test") for r in (plain, fused))
    assert int((hits - fused_hits).abs().max()) <= 1
    torch.testing.assert_close(fused_loss, loss, rtol=2e-5, atol=0)


def test_runs_that_share_a_seed_start_and_draw_alike() -> None:
    task = bright_images(28, 4, 2)
    alike = [replace(sample(4, seeds="one")[0], run=f"0000{i}", dropout=0.1) for i in range(2)]
    recipe = Recipe(epochs=2, batch=32, precision="bf16")
    both = train(task, alike, recipe, device="cuda", path="fused").weights
    first, second = both.unflatten(0, (2, -1))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["images", "texts"])
def test_equal_seeds_give_equal_bits(name: str) -> None:
    task, runs = task_of(name), sample(6)
    recipe = Recipe(epochs=2, batch=32, precision="bf16")
    first, again = (train(task, runs, recipe, device="cuda", path="fused") for _ in range(2))
    assert torch.equal(first.weights, again.weights)


@pytest.mark.parametrize("name", ["images", "texts"])
def test_a_run_does_not_notice_its_neighbours(name: str) -> None:
    task, runs = task_of(name), sample(9)
    recipe = Recipe(epochs=2, batch=32, precision="bf16")
    together = train(task, runs, recipe, device="cuda", path="fused")
    alone = train(task, [runs[5]], recipe, device="cuda", path="fused")
    rows = [i for i, row in enumerate(together.rows) if row["run"] == runs[5].run]
    assert torch.equal(together.weights[rows], alone.weights)


def test_the_group_acts_on_the_gpu_as_on_the_cpu() -> None:
    space = spaces.attention_block(32, 2, 16, 16, 64)
    source = torch.Generator().manual_seed(0)
    weights = {k: w.double() for k, w in space.randn(100, generator=source).items()}
    element = space.group.random(source, batch=100, max_condition=100, dtype=torch.float64)
    here = element.act(weights)
    there = element.to("cuda").act({k: w.cuda() for k, w in weights.items()})
    for name, w in here.items():
        assert there[name].is_cuda
        torch.testing.assert_close(there[name].cpu(), w, rtol=1e-9, atol=1e-9)
