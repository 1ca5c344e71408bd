"""Many runs at once equal runs one at a time, trained as modules with torch.optim."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from literal_network import literal_logits
from transformer_nfn import native_code
from transformer_nfn.zoo import Config, Recipe, ZooError, sample, train
from transformer_nfn.zoo.module import SmallTransformer, from_state_dict, to_state_dict
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training import backends
from transformer_nfn.zoo.training.backends import (
    choose_runner,
    describe_path,
    library,
)
from transformer_nfn.zoo.training.randomness import CROP, DROPOUT, dropout_threshold, keys
from transformer_nfn.zoo.training.steps import (
    HOLD,
    Epoch,
    coefficients,
    dropout,
    learning_rate,
    rules,
)
from transformer_nfn.zoo.training.tasks import Batch, Task
from transformer_nfn.zoo.training.trainer import Training, initial_weights

from .conftest import random_images

# Without a C compiler there is no native path.
STEP_PATHS = ["torch", "native"] if library()[0] else ["torch"]


def mixed_runs(dropout: float = 0.0) -> list[Config]:
    rows = [("sgd", 0.05), ("sgdm", 0.03), ("adam", 1e-3), ("rmsprop", 1e-3)]
    return [
        Config(f"{i}", name, lr, (1e-2, 1e-4)[i % 2], 0.2 + 0.05 * i, dropout, 1.0, 100 + i)
        for i, (name, lr) in enumerate(rows)
    ]


def runs_clear_of_kinks(task: Task, index: torch.Tensor) -> list[Config]:
    """Mixed runs with no neuron within rounding of ReLU's kink on the samples ``index``.

    There a gradient jumps, and two correct programs may differ.
    """
    runs = mixed_runs()
    batch = task.batch("train", index)
    for attempt in range(50):
        runs = [replace(c, seed=1000 * attempt + i) for i, c in enumerate(runs)]
        neurons: list[torch.Tensor] = []
        positions = task.sizes.positions().double()
        for i, c in enumerate(runs):
            (module,) = modules(task.sizes, initial_weights(task.sizes, c)[None])
            inputs = plain_inputs(task, batch, i).double()
            state = module.double().state_dict()
            literal_logits(state, inputs, positions, task.sizes.heads, neurons)
        if min(float(x.abs().min()) for x in neurons) > 1e-6:
            return runs
    raise AssertionError("no seed keeps clear of the kinks")


def torch_optimizer(network: torch.nn.Module, c: Config) -> torch.optim.Optimizer:
    p, lr, wd = network.parameters(), c.learning_rate, c.l2
    if c.optimizer == "adam":
        return torch.optim.Adam(p, lr, weight_decay=wd)
    if c.optimizer == "rmsprop":
        return torch.optim.RMSprop(p, lr, weight_decay=wd)
    return torch.optim.SGD(p, lr, 0.9 if c.optimizer == "sgdm" else 0.0, weight_decay=wd)


def epochs_of(task: Task, runs: list[Config], path: str, epochs: int = 2) -> list[Epoch]:
    """What a training of ``runs`` gives to the runner of ``path``, epoch by epoch."""
    counts = [int(task.num_samples["train"] * c.train_fraction + 1e-9) for c in runs]
    recipe = Recipe(epochs, batch=16)
    training = Training(task, runs, counts, recipe, "cpu", path, torch.float32)
    given: list[Epoch] = []
    train_epoch = training.runner.epoch
    training.runner.epoch = lambda epoch: given.append(epoch) or train_epoch(epoch)  # type: ignore
    for epoch in range(epochs):
        training.train_epoch(epoch)
    return given


def plain_inputs(task: Task, batch: Batch, network: int) -> torch.Tensor:
    """The inputs of one network as `SmallTransformer` takes them."""
    inputs = task.module_inputs(batch.inputs[network])
    return inputs if batch.lengths is None else inputs[:, : int(batch.lengths[network])]


def modules(sizes: NetworkSizes, flat: torch.Tensor) -> list[SmallTransformer]:
    out = []
    for i in range(len(flat)):
        module = SmallTransformer(sizes)
        named = sizes.to_named(flat[i : i + 1])
        module.load_state_dict(to_state_dict(sizes, {k: w[0] for k, w in named.items()}))
        out.append(module)
    return out


def as_row(sizes: NetworkSizes, module: SmallTransformer) -> torch.Tensor:
    named = from_state_dict(sizes, module.state_dict())
    return sizes.from_named({k: w[None] for k, w in named.items()})[0]


def one_step(
    task: Task, index: torch.Tensor, drop: torch.Tensor, coef: torch.Tensor
) -> tuple[Batch, Epoch]:
    """The samples ``index`` ``[networks, batch]``, and an epoch of one step on them."""
    count = len(index)
    crop = keys(torch.arange(count), CROP, 0)
    steps = torch.ones(count, dtype=torch.int64)
    epoch = Epoch(index, steps, crop[:, None], drop[:, None], coef[:, None])
    return task.batch("train", index, crop), epoch


@pytest.mark.parametrize("path", STEP_PATHS)
def test_steps_of_mixed_runs_equal_torch_optim(any_task: Task, path: str) -> None:
    first = torch.randint(0, 100, (4, 24), generator=torch.Generator().manual_seed(0))
    sizes, configs = any_task.sizes, runs_clear_of_kinks(any_task, first)
    flat = torch.stack([initial_weights(sizes, c) for c in configs])
    alone = modules(sizes, flat)
    no_dropout = torch.zeros(4, dtype=torch.int32)
    runner = choose_runner(path, any_task, flat.clone(), no_dropout, "float32", 24)
    optimizers = [torch_optimizer(m, c) for m, c in zip(alone, configs, strict=True)]
    rates = torch.tensor([c.learning_rate for c in configs], dtype=torch.float64)
    no_keys = torch.zeros(4, 5, 2, dtype=torch.int32)
    for step in range(3):
        index = torch.randint(0, 100, (4, 24), generator=torch.Generator().manual_seed(step))
        coef = coefficients(rules(configs), rates, torch.full((4,), step + 1))
        batch, epoch = one_step(any_task, index, no_keys, coef)
        loss, hits = runner.epoch(epoch)
        for i, (module, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            optimizer.zero_grad()
            logits = module(plain_inputs(any_task, batch, i))
            expected = F.cross_entropy(logits, batch.labels[i])
            expected.backward()
            optimizer.step()
            assert loss[i].item() == pytest.approx(expected.item(), abs=1e-4)
            assert hits[i] == (logits.argmax(-1) == batch.labels[i]).sum()
            if step == 0:
                # The adaptive rules divide a gradient by its size, so a gradient as small as
                # rounding gives a large step: weights are compared where it is larger.
                gap = (runner.weights[i] - as_row(sizes, module)).abs()
                grads = {k: p.grad for k, p in module.named_parameters()}
                state = module.state_dict() | grads
                g = sizes.from_named(
                    {k: w[None] for k, w in from_state_dict(sizes, state).items()}
                )[0]
                whole = g + configs[i].l2 * flat[i]
                adaptive = configs[i].optimizer in ("adam", "rmsprop")
                counted = whole.abs() > 1e-4 if adaptive else whole.isfinite()
                assert counted.float().mean() > 0.5
                assert gap[counted].max() < 1e-5
    assert torch.isfinite(runner.weights).all()


@pytest.mark.parametrize("path", STEP_PATHS)
def test_an_epoch_is_its_steps_in_turn(
    any_task: Task, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "SAMPLES_AT_ONCE", 48)  # of two of the three steps
    configs, threshold = mixed_runs(), dropout_threshold(torch.full((4,), 0.1))
    flat = torch.stack([initial_weights(any_task.sizes, c) for c in configs])
    order = torch.randint(0, 100, (4, 72), generator=torch.Generator().manual_seed(1))
    steps, clock = torch.tensor([3, 3, 2, 1]), torch.arange(3)
    ids = torch.arange(4)
    site = torch.arange(any_task.sizes.dropout_sites)
    drop = keys(ids[:, None, None], DROPOUT, clock[:, None] * len(site) + site)
    crop = keys(ids[:, None], CROP, clock)
    rates = torch.full((4, 1), 1e-3, dtype=torch.float64)
    coef = coefficients(rules(configs)[:, None], rates, clock + 1)
    coef[steps[:, None] <= clock] = torch.tensor(HOLD)
    whole, single = (
        choose_runner(path, any_task, flat.clone(), threshold, "float32", 24) for _ in range(2)
    )
    whole.epoch(Epoch(order, steps, crop, drop, coef))
    for i in range(3):
        now, one = slice(i, i + 1), (steps > i).long()
        batch = order[:, 24 * i : 24 * (i + 1)]
        single.epoch(Epoch(batch, one, crop[:, now], drop[:, now], coef[:, now]))
    torch.testing.assert_close(whole.weights, single.weights, rtol=0, atol=1e-6)
    assert ((whole.weights - flat).abs().amax(1) > 1e-5).all()


@pytest.mark.parametrize("path", STEP_PATHS)
def test_a_run_does_not_depend_on_its_neighbours(path: str) -> None:
    task = random_images()
    runs = [replace(c, dropout=0.1) for c in sample(9, seed=1)]
    recipe = Recipe(epochs=2, batch=32)
    together = train(task, runs, recipe, path=path)
    for run in (runs[0], runs[5]):
        alone = train(task, [run], recipe, path=path)
        rows = [i for i, row in enumerate(together.rows) if row["run"] == run.run]
        torch.testing.assert_close(together.weights[rows], alone.weights, rtol=0, atol=1e-5)


def test_training_learns_and_best_is_the_best_on_held_out_data() -> None:
    task = random_images()
    good = [Config("a", "adam", 3e-3, 1e-8, 0.2, 0.0, 1.0, 7)]
    rows = train(task, good, Recipe(12, 16)).rows
    last = next(r for r in rows if r["percent"] == 100)
    best = next(r for r in rows if r["best"])
    assert last["test_accuracy"] > 0.4
    assert best["held_accuracy"] >= max(r["held_accuracy"] for r in rows)
    assert [r["epoch"] for r in rows if not r["best"]] == [6, 9, 12]


def test_training_that_ends_early_gives_the_checkpoints_of_the_whole() -> None:
    task, runs = random_images(), sample(4)
    whole, early = (train(task, runs, Recipe(4, 32, until=u)) for u in (100, 75))
    assert [r["epoch"] for r in early.rows if not r["best"]] == [2, 3] * 4
    kept = [i for i, r in enumerate(whole.rows) if not r["best"] and r["percent"] <= 75]
    also = [i for i, r in enumerate(early.rows) if not r["best"]]
    assert torch.equal(whole.weights[kept], early.weights[also])
    assert [whole.rows[i] for i in kept] == [early.rows[i] for i in also]
    assert all(r["epoch"] <= 3 for r in early.rows)


def test_the_authors_best_is_chosen_on_the_test_set() -> None:
    task = random_images()
    rows = train(task, sample(4), Recipe(4, 32, select="test")).rows
    for run in {r["run"] for r in rows}:
        mine = [r for r in rows if r["run"] == run]
        best = next(r for r in mine if r["best"])
        assert best["test_accuracy"] >= max(r["test_accuracy"] for r in mine)
        assert all(math.isnan(r["held_accuracy"]) for r in mine)


def test_crashed_runs_are_recorded_and_leave_no_weights() -> None:
    task = random_images()
    runs = [*mixed_runs()[:2], Config("boom", "sgd", 1e30, 0.0, 0.5, 0.0, 1.0, 1)]
    trained = train(task, runs, Recipe(2, 32))
    crashed = [r for r in trained.rows if r["crashed"]]
    assert [r["run"] for r in crashed] == ["boom"]
    assert crashed[0]["epoch"] == 1
    assert len(trained.weights) == len(trained.rows) - 1
    assert trained.weights.isfinite().all()


def test_train_fractions_take_random_images_but_the_first_texts(news: Task) -> None:
    half = [replace(mixed_runs()[0], train_fraction=0.7)]
    for task, first in ((random_images(), False), (news, True)):
        count = int(task.num_samples["train"] * 0.7 + 1e-9)
        (epoch,) = epochs_of(task, half, "torch", 1)
        seen = epoch.order[0].sort().values
        assert len(set(seen.tolist())) == count
        assert (seen.tolist() == list(range(count))) is first


def test_the_schedule_warms_up_and_falls_as_a_cosine() -> None:
    base = torch.tensor([0.1], dtype=torch.float64)
    rates = [learning_rate(base, e, 100).item() for e in range(100)]
    torch.testing.assert_close(torch.tensor(rates[:10]), torch.arange(1, 11) * 0.01)
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90, eta_min=1e-5)
    for e in range(10, 100):
        assert rates[e] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        cosine.step()


def test_invalid_recipes_are_rejected() -> None:
    for name, value in (("epochs", 0), ("batch", 0), ("precision", "fp8")):
        with pytest.raises(ZooError, match=name):
            Recipe(**{"epochs": 1, name: value})  # type: ignore[arg-type]
    with pytest.raises(ZooError, match="fewer than one batch"):
        train(random_images(), mixed_runs(), Recipe(1, batch=1000))


def test_pixels_are_normalised_and_cropping_moves_training_images_only() -> None:
    task = random_images()
    batch = task.batch("test", torch.tensor([[3]]))
    raw = task.images["test"][3].float() / 16
    torch.testing.assert_close(task.module_inputs(batch.inputs[0])[0, 0], (raw - 0.5) / 0.5)
    task = random_images(28, 4, 255)
    index = torch.arange(8)[None]
    key = keys(torch.tensor([3]), 3, 0)
    plain, moved = task.batch("train", index), task.batch("train", index, key)
    assert not torch.equal(plain.inputs, moved.inputs)
    whole = task.module_inputs(plain.inputs[0])
    padded = F.pad(whole, (2, 2, 2, 2), value=-1.0)
    for i, image in enumerate(task.module_inputs(moved.inputs[0])):
        shifts = [
            (dy, dx)
            for dy in range(5)
            for dx in range(5)
            if torch.equal(padded[i, :, dy : dy + 28, dx : dx + 28], image)
        ]
        assert len(shifts) == 1


def test_without_a_compiler_steps_are_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "find_compiler", lambda: None)
    library.cache_clear()
    try:
        path, note = describe_path("auto", "cpu")
        assert path == "torch"
        assert "no C compiler was found" in note
        assert "slower" in note
        assert len(train(random_images(n=60), sample(2), Recipe(1, 16)).rows) == 4
        with pytest.raises(ZooError, match="no C compiler"):
            describe_path("native", "cpu")
    finally:
        library.cache_clear()


def test_the_error_of_a_compiler_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no licence >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path / "cache"))
    library.cache_clear()
    try:
        path, note = describe_path("auto", "cpu")
        assert path == "torch"
        assert "no licence" in note
        assert not list((tmp_path / "cache").rglob("*.so"))
    finally:
        monkeypatch.undo()
        library.cache_clear()


def test_a_library_cut_short_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading one that was would end the process by a signal."""
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path))
    compiler = native_code.find_compiler()
    if compiler is None:
        return
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }")
    made, problem = native_code.build(compiler, [source], "seven")
    assert made is not None, problem
    whole = made.read_bytes()
    for damaged in (whole[:5000], b"", whole[:-1] + b"x"):
        made.write_bytes(damaged)
        assert native_code.build(compiler, [source], "seven") == (made, "")
        assert [path.read_bytes() for path in made.parent.iterdir()] == [whole]
    library, problem = native_code.load([source], "seven", lambda lib: lib)
    assert library is not None, problem
    assert library.seven() == 7


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's compiler
def test_compiled_steps_equal_plain_ones() -> None:
    """The path of CUDA, compiled for the CPU: mixed train fractions, held networks."""
    runs = [c for c in sample(24) if c.optimizer in ("sgd", "sgdm")][:6]
    assert len({c.train_fraction for c in runs}) > 1
    plain, compiled = (
        train(random_images(), runs, Recipe(2, 32), path=path) for path in ("torch", "compiled")
    )
    torch.testing.assert_close(plain.weights, compiled.weights, rtol=0, atol=1e-4)


def test_dropout_has_the_probability_of_each_network() -> None:
    p = torch.tensor([0.0, 0.05, 0.2])
    threshold = dropout_threshold(p)
    key = keys(torch.tensor([[1], [2], [3]]), 4, torch.arange(5))
    scale = 65536 / (65536 - threshold.float())
    out = dropout(key, threshold, scale, 49)(torch.ones(3, 64, 49, 32), 0)
    dropped = (out == 0).float().mean((1, 2, 3))
    assert dropped[0] == 0
    assert torch.allclose(dropped, p, atol=0.005)
    assert torch.allclose(out.mean((1, 2, 3)), torch.ones(3), atol=0.01)


def test_dropout_sites_and_halves_are_independent() -> None:
    key = keys(torch.tensor([[9]]), 4, torch.arange(5))
    threshold = torch.tensor([32768], dtype=torch.int32)
    drop = dropout(key, threshold, torch.tensor([2.0]), 49)
    masks = [(drop(torch.ones(1, 64, 49, 32), site) > 0).float().flatten() for site in (0, 1)]
    halves = masks[0].view(-1, 2, 16)
    for a, b in ((masks[0], masks[1]), (halves[:, 0].flatten(), halves[:, 1].flatten())):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.02
