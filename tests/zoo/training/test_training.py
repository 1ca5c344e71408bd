"""Many runs at once are those runs one at a time: the oracle is the module and torch.optim."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from literal_network import literal_logits
from transformer_nfn.zoo import Config, Recipe, ZooError, sample, train
from transformer_nfn.zoo.module import SmallTransformer, from_state_dict, to_state_dict
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.backends import NativeStepper, choose_runner, library
from transformer_nfn.zoo.training.randomness import dropout_threshold, keys
from transformer_nfn.zoo.training.steps import coefficients, learning_rate, rules
from transformer_nfn.zoo.training.tasks import Batch, Task
from transformer_nfn.zoo.training.trainer import initial_weights

from ..conftest import random_images

# Where no C compiler is found the native path is not there to be tested.
STEP_PATHS = ["torch", "native"] if library()[0] else ["torch"]
STEPPERS = [NativeStepper] if library()[0] else []


def mixed_runs(dropout: float = 0.0) -> list[Config]:
    rows = [("sgd", 0.05), ("sgdm", 0.03), ("adam", 1e-3), ("rmsprop", 1e-3)]
    return [
        Config(f"{i}", name, lr, (1e-2, 1e-4)[i % 2], 0.2 + 0.05 * i, dropout, 1.0, 100 + i)
        for i, (name, lr) in enumerate(rows)
    ]


def runs_clear_of_kinks(task: Task, index: torch.Tensor) -> list[Config]:
    """Mixed runs with no neuron within rounding of ReLU's kink on the samples ``index``.

    There a gradient jumps, and two correct programs may stand on different sides of it.
    """
    runs = mixed_runs()
    batch = task.batch("train", index)
    for attempt in range(50):
        runs = [replace(c, seed=1000 * attempt + i) for i, c in enumerate(runs)]
        neurons: list[torch.Tensor] = []
        positions = task.arch.positions().double()
        for i, c in enumerate(runs):
            (module,) = modules(task.arch, initial_weights(task.arch, c)[None])
            inputs = task.module_inputs(batch.inputs[i]).double()
            if batch.lengths is not None:
                inputs = inputs[:, : int(batch.lengths[i])]
            state = module.double().state_dict()
            literal_logits(state, inputs, positions, task.arch.heads, neurons)
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


def modules(arch: NetworkSizes, flat: torch.Tensor) -> list[SmallTransformer]:
    out = []
    for i in range(len(flat)):
        module = SmallTransformer(arch)
        named = arch.to_named(flat[i : i + 1])
        module.load_state_dict(to_state_dict(arch, {k: w[0] for k, w in named.items()}))
        out.append(module)
    return out


def as_row(arch: NetworkSizes, module: SmallTransformer) -> torch.Tensor:
    named = from_state_dict(arch, module.state_dict())
    return arch.from_named({k: w[None] for k, w in named.items()})[0]


@pytest.mark.parametrize("path", STEP_PATHS)
def test_steps_of_mixed_runs_equal_torch_optim(any_task: Task, path: str) -> None:
    first = torch.randint(0, 100, (4, 24), generator=torch.Generator().manual_seed(0))
    arch, configs = any_task.arch, runs_clear_of_kinks(any_task, first)
    flat = torch.stack([initial_weights(arch, c) for c in configs])
    alone = modules(arch, flat)
    no_dropout = torch.zeros(4, dtype=torch.int32)
    stepper = choose_runner(path, any_task, flat.clone(), no_dropout, "float32", 24).stepper
    optimizers = [torch_optimizer(m, c) for m, c in zip(alone, configs, strict=True)]
    rates = torch.tensor([c.learning_rate for c in configs], dtype=torch.float64)
    no_keys = torch.zeros(4, 5, 2, dtype=torch.int32)
    for step in range(3):
        index = torch.randint(0, 100, (4, 24), generator=torch.Generator().manual_seed(step))
        batch = any_task.batch("train", index)
        clock = torch.full((4,), step + 1)
        loss, hits = stepper.step(batch, no_keys, coefficients(rules(configs), rates, clock))
        for i, (module, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            inputs = any_task.module_inputs(batch.inputs[i])
            if batch.lengths is not None:
                inputs = inputs[:, : int(batch.lengths[i])]
            optimizer.zero_grad()
            logits = module(inputs)
            expected = F.cross_entropy(logits, batch.labels[i])
            expected.backward()
            optimizer.step()
            assert loss[i].item() == pytest.approx(expected.item(), abs=1e-4)
            assert hits[i] == (logits.argmax(-1) == batch.labels[i]).sum()
            if step == 0:
                # The adaptive rules divide a gradient by its own size, so where it is as
                # small as rounding, the step is not: weights are compared where it is not.
                gap = (stepper.weights[i] - as_row(arch, module)).abs()
                grads = {k: p.grad for k, p in module.named_parameters()}
                state = module.state_dict() | grads
                g = arch.from_named(
                    {k: w[None] for k, w in from_state_dict(arch, state).items()}
                )[0]
                whole = g + configs[i].l2 * flat[i]
                adaptive = configs[i].optimizer in ("adam", "rmsprop")
                counted = whole.abs() > 1e-4 if adaptive else whole.isfinite()
                assert counted.float().mean() > 0.5
                assert gap[counted].max() < 1e-5
    assert torch.isfinite(stepper.weights).all()


@pytest.mark.parametrize("stepper_class", STEPPERS)
def test_native_gradients_equal_autograd_in_float64(
    any_task: Task, stepper_class: type[NativeStepper]
) -> None:
    index = torch.randint(0, 100, (4, 19), generator=torch.Generator().manual_seed(5))
    arch, configs = any_task.arch, runs_clear_of_kinks(any_task, index)
    flat = torch.stack([initial_weights(arch, c) for c in configs])
    batch = any_task.batch("train", index)
    stepper = stepper_class(arch, flat.clone(), torch.zeros(4, dtype=torch.int32))
    still = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]] * 4)
    stepper.step(batch, torch.zeros(4, 5, 2, dtype=torch.int32), still)
    for i, module in enumerate(modules(arch, flat)):
        module.double()
        inputs = any_task.module_inputs(batch.inputs[i]).double()
        if batch.lengths is not None:
            inputs = inputs[:, : int(batch.lengths[i])]
        F.cross_entropy(module(inputs), batch.labels[i]).backward()
        grads = module.state_dict() | {k: p.grad for k, p in module.named_parameters()}
        named = from_state_dict(arch, grads)
        exact = arch.from_named({k: w[None] for k, w in named.items()})[0]
        assert (stepper.grad[i] - exact).abs().max() < 2e-5 * exact.abs().max()


def test_every_path_drops_the_same_entries(any_task: Task) -> None:
    arch, configs = any_task.arch, mixed_runs()
    flat = torch.stack([initial_weights(arch, c) for c in configs])
    threshold = dropout_threshold(torch.tensor([0.0, 0.05, 0.1, 0.2]))
    index = torch.randint(0, 100, (4, 16), generator=torch.Generator().manual_seed(6))
    batch = any_task.batch("train", index)
    key = keys(torch.arange(4)[:, None], 4, torch.arange(5))
    coef = coefficients(rules(configs), torch.full((4,), 1e-2).double(), torch.ones(4))
    losses = []
    for path in STEP_PATHS:
        stepper = choose_runner(path, any_task, flat.clone(), threshold, "float32", 16).stepper
        losses.append(stepper.step(batch, key, coef)[0])
    torch.testing.assert_close(losses[0], losses[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", STEP_PATHS)
def test_a_run_does_not_notice_its_neighbours(path: str) -> None:
    task = random_images(8, 2, 16)
    runs = [replace(c, dropout=0.1) for c in sample(9, seed=1)]
    recipe = Recipe(epochs=2, batch=32)
    together = train(task, runs, recipe, path=path)
    for run in (runs[0], runs[5]):
        alone = train(task, [run], recipe, path=path)
        rows = [i for i, row in enumerate(together.rows) if row["run"] == run.run]
        torch.testing.assert_close(together.weights[rows], alone.weights, rtol=0, atol=1e-5)


def test_equal_seeds_give_equal_weights_and_others_do_not() -> None:
    task = random_images(8, 2, 16)
    runs = sample(2, seed=1)
    a, b = (train(task, runs, Recipe(1, 32)) for _ in range(2))
    assert torch.equal(a.weights, b.weights)
    other = [replace(c, seed=c.seed + 1) for c in runs]
    assert not torch.equal(a.weights, train(task, other, Recipe(1, 32)).weights)


def test_training_learns_and_best_is_the_best_on_held_out_data() -> None:
    task = random_images(8, 2, 16)
    good = [Config("a", "adam", 3e-3, 1e-8, 0.2, 0.0, 1.0, 7)]
    rows = train(task, good, Recipe(12, 16)).rows
    last = next(r for r in rows if r["percent"] == 100)
    best = next(r for r in rows if r["best"])
    assert last["test_accuracy"] > 0.4
    assert best["held_accuracy"] >= max(r["held_accuracy"] for r in rows)
    assert [r["epoch"] for r in rows if not r["best"]] == [6, 9, 12]


def test_training_that_ends_early_gives_the_checkpoints_of_the_whole() -> None:
    task, runs = random_images(8, 2), sample(4)
    whole, early = (train(task, runs, Recipe(4, 32, until=u)) for u in (100, 75))
    assert [r["epoch"] for r in early.rows if not r["best"]] == [2, 3] * 4
    kept = [i for i, r in enumerate(whole.rows) if not r["best"] and r["percent"] <= 75]
    also = [i for i, r in enumerate(early.rows) if not r["best"]]
    assert torch.equal(whole.weights[kept], early.weights[also])
    assert [whole.rows[i] for i in kept] == [early.rows[i] for i in also]
    assert all(r["epoch"] <= 3 for r in early.rows)


def test_the_authors_best_is_chosen_on_the_test_set() -> None:
    task = random_images(8, 2, 16)
    rows = train(task, sample(4), Recipe(4, 32, select="test")).rows
    for run in {r["run"] for r in rows}:
        mine = [r for r in rows if r["run"] == run]
        best = next(r for r in mine if r["best"])
        assert best["test_accuracy"] >= max(r["test_accuracy"] for r in mine)
        assert all(math.isnan(r["held_accuracy"]) for r in mine)


def test_crashed_runs_are_recorded_and_leave_no_weights() -> None:
    task = random_images(8, 2, 16)
    runs = [*mixed_runs()[:2], Config("boom", "sgd", 1e30, 0.0, 0.5, 0.0, 1.0, 1)]
    trained = train(task, runs, Recipe(2, 32))
    crashed = [r for r in trained.rows if r["crashed"]]
    assert [r["run"] for r in crashed] == ["boom"]
    assert crashed[0]["epoch"] == 1
    assert len(trained.weights) == len(trained.rows) - 1
    assert trained.weights.isfinite().all()


def test_train_fractions_take_random_images_but_first_rows_of_text(news: Task) -> None:
    from transformer_nfn.zoo.training.trainer import _Training

    images = random_images(8, 2, 16)
    half = [replace(mixed_runs()[0], train_fraction=0.7)]
    for task, first in ((images, False), (news, True)):
        count = int(task.sizes["train"] * 0.7)
        training = _Training(task, half, [count], Recipe(1), "cpu", "torch", torch.float32)
        seen = training._order(0)[0].sort().values
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


def test_bf16_trains_too() -> None:
    task = random_images(8, 2, 16, n=60)
    exact = train(task, mixed_runs(), Recipe(1, 16), path="torch")
    rough = train(task, mixed_runs(), Recipe(1, 16, precision="bf16"), path="torch")
    assert (exact.weights - rough.weights).abs().mean() < 0.05
    assert not torch.equal(exact.weights, rough.weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch": 0}, "batch"),
        ({"precision": "fp8"}, "precision"),
        ({"select": "train"}, "selected"),
    ],
)
def test_a_bad_recipe_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ZooError, match=words):
        Recipe(**{"epochs": 1, **change})  # type: ignore[arg-type]


def test_too_few_samples_for_a_batch_are_refused() -> None:
    with pytest.raises(ZooError, match="fewer than one batch"):
        train(random_images(8, 2, 16), mixed_runs(), Recipe(1, batch=1000))


def test_cropping_moves_training_images_only() -> None:
    task = random_images(28, 4)
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


def test_batch_is_what_a_user_expects() -> None:
    task = random_images(8, 2, 16)
    batch = task.batch("test", torch.tensor([[3]]))
    assert isinstance(batch, Batch)
    raw = task.images["test"][3].float() / 16
    torch.testing.assert_close(task.module_inputs(batch.inputs[0])[0, 0], (raw - 0.5) / 0.5)


def test_the_native_step_refuses_weights_it_would_misread() -> None:
    task = random_images(8, 2, 16)
    weights = initial_weights(task.arch, mixed_runs()[0])[None]
    stepper = NativeStepper(task.arch, weights, torch.zeros(1, dtype=torch.int32))
    batch = task.batch("test", torch.arange(8)[None])
    with pytest.raises(ZooError, match=r"reads float32 weights, found torch\.float16"):
        stepper.evaluate(weights.half(), batch)
