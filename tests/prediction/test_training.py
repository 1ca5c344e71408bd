"""Training: seeds together or alone, killed or not, captured or not, the result is the same."""

import itertools
import json

import numpy as np
import pytest
import torch
from made_networks import (
    ABOUT,
    check_killed_and_resumed,
    experiment,
    parts,
)
from scipy.stats import kendalltau

from transformer_nfn.models import TransformerNFN
from transformer_nfn.models.cuda_graphs import no_update
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import RunError, RunRecord, read_predictions
from transformer_nfn.prediction.training import STATE_FILE, Execution, SeedTrainer, train_seeds

SHORT = Protocol(epochs=4)


def builder(data, **options):
    return predictor_builder("transformer_nfn", data.train, {"channels": [2], **options})


def trainer(data, seeds=(0, 1), **options):
    return SeedTrainer(builder(data), data, SHORT, list(seeds), **{"together": True, **options})


def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    data = parts()
    check_killed_and_resumed(builder(data), data, SHORT, tmp_path, epoch=3)
    assert (tmp_path / STATE_FILE).is_file()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(x["epoch"], x["seed"]) for x in lines] == [(e, s) for e in range(1, 5) for s in (0, 1)]
    with pytest.raises(RunError, match="is of another training"):
        train_seeds(builder(data), data, SHORT, [0, 1], Execution(tmp_path, "y"))


@pytest.mark.parametrize("model", ["transformer_nfn", "mlp", "statnn"])
def test_seeds_together_are_seeds_alone(model):
    data = parts()
    build = predictor_builder(model, data.train, {})
    together = train_seeds(build, data, SHORT, [3, 4])
    for i, seed in enumerate((3, 4)):
        alone = train_seeds(build, data, SHORT, [seed])
        left = together.modules[i].predict(data.test.network)
        right = alone.modules[0].predict(data.test.network)
        assert together.best_epoch[i] == alone.best_epoch[0]
        assert torch.allclose(left, right, atol=1e-4)


def test_one_seed_is_plain_pytorch():
    """The loop against one written out with torch.optim.Adam and nothing else."""
    data, seed = parts(), 5
    build = builder(data)
    trained = train_seeds(build, data, Protocol(epochs=2), [seed])
    torch.manual_seed(seed)
    module = build()
    optimiser = torch.optim.Adam(module.parameters())
    steps, states = 3, []
    for epoch in range(2):
        order = torch.randperm(
            40, generator=torch.Generator().manual_seed((seed + 1) * 1_000_003 + epoch)
        )
        for step in range(steps):
            index = order[16 * step : 16 * (step + 1)]
            batch = data.train.take(index)
            for group in optimiser.param_groups:
                group["lr"] = Protocol(epochs=2).learning_rate(epoch * steps + step, steps)
            optimiser.zero_grad()
            logits = module.logits(batch.network)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.accuracy)
            loss.backward()
            optimiser.step()
        states.append({k: v.clone() for k, v in module.state_dict().items()})
    expected = states[trained.best_epoch[0] - 1]
    for name, value in trained.modules[0].state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-5), name


def test_learning_rate_warms_up_and_falls():
    rates = [Protocol().learning_rate(step, 10) for step in range(500)]
    assert rates[0] == pytest.approx(1e-5)
    assert max(rates) == pytest.approx(1e-3)
    assert rates.index(max(rates)) in (99, 100)
    assert rates[-1] == pytest.approx(1e-5, rel=0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[100:]))


def test_a_run_folder_is_complete_and_read_again(tmp_path):
    data, run = parts(), experiment("transformer_nfn", (0, 1))
    record = train_run(ABOUT, data, run, tmp_path / "run")
    assert RunRecord.read(tmp_path / "run") == record
    assert {"tau", "tau_se", "r2", "mae", "coverage", "radius"} <= set(record.summary)
    assert record.selection["train"] == 40
    found = read_predictions(tmp_path / "run")
    test = (found["split"] == "test") & (found["seed"] == 1)
    predictor = TransformerNFN.load(tmp_path / "run" / "seed-1")
    again = predictor.predict(data.test.network).numpy()
    assert np.allclose(again, found["predicted"][test], atol=1e-6)
    assert (found["low"] <= found["predicted"]).all()
    mean = (found["predicted"][found["split"] == "test"]).reshape(2, -1).mean(0)
    expected = kendalltau(data.test.accuracy.numpy(), mean).statistic
    assert record.summary["tau_together"] == pytest.approx(expected)
    assert not (tmp_path / "run" / STATE_FILE).exists()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert train_run(ABOUT, data, run, tmp_path / "run") == record
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    with pytest.raises(RunError, match="holds another run"):
        train_run(ABOUT, data, experiment("mlp"), tmp_path / "run")


# What CUDA graphs rely on, as far as a CPU shows it.


def numbers(held):
    """Everything that training changes."""
    state = {k: v.detach().clone() for k, v in held.state.items()}
    for i, entry in enumerate(held.optimisers[0].state.values()):
        state |= {f"adam.{i}.{k}": v.clone() for k, v in entry.items()}
    return state


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("epochs_before", [0, 1])
def test_warm_up_steps_leave_no_trace(epochs_before):
    data = parts()
    plain, warmed = trainer(data), trainer(data)
    for held in (plain, warmed):
        for _ in range(epochs_before):
            held.train_epoch()
    tensors, before = dict(warmed.state), numbers(warmed)
    plan = warmed.epoch_plan()
    with no_update(warmed.optimisers[0]):
        warmed.run_steps(*plan)
        assert not same(numbers(warmed), before)
    assert all(warmed.state[k] is v for k, v in tensors.items())
    failing = warmed.epoch_plan()[0]
    failing[1].picks.fill_(40)

    def fail():
        with no_update(warmed.optimisers[0]):
            warmed.run_steps(failing, plan[1])

    with pytest.raises(IndexError):
        fail()
    assert [plain.train_epoch(), plain.train_epoch()] == [warmed.train_epoch() for _ in range(2)]
    assert same(numbers(plain), numbers(warmed))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 0.0), (torch.float32, 2e-5)])
def test_a_learning_rate_in_a_tensor_is_that_learning_rate(dtype, tolerance, together, tmp_path):
    data = parts()
    build = predictor_builder("transformer_nfn", data.train, {})
    plain, held = (SeedTrainer(build, data, SHORT, [0, 1], together=together) for _ in range(2))
    held.hold_rates(dtype)
    for each in (plain, held):
        each.train_epoch()
        each.save(tmp_path / "state", "x")
        # After loading the rate is read from the same tensor.
        each.load(tmp_path / "state", "x")
        each.train_epoch()
    theirs = numbers(plain)
    for name, value in numbers(held).items():
        assert torch.allclose(value, theirs[name], rtol=0, atol=tolerance), name


def test_an_epoch_has_the_learning_rates_of_the_protocol():
    held, steps = trainer(parts()), 3
    for epoch in range(SHORT.epochs):
        expected = [[SHORT.learning_rate(epoch * steps + i, steps)] for i in range(steps)]
        assert held.epoch_rates() == expected
        assert held.epoch_plan()[1] == expected
        held.train_epoch()
    held.hold_rates(torch.float32)
    held.epoch = 0
    _, rates = held.epoch_plan()
    assert torch.equal(rates, torch.tensor([[SHORT.learning_rate(i, steps)] for i in range(3)]))


def test_every_network_comes_once_per_epoch_in_an_order_of_the_seed():
    data = parts()
    orders, again = (
        torch.cat([batch.picks for batch in trainer(data, seeds).epoch_plan()[0]], 1)
        for seeds in ((0, 1), (1, 2))
    )
    assert torch.equal(orders.sort(1).values, torch.arange(40).expand(2, 40))
    assert torch.equal(orders[1], again[0])
    assert not torch.equal(orders[0], orders[1])


def test_a_state_of_another_layout_is_rejected(tmp_path):
    data = parts()
    trainer(data, [0]).save(tmp_path / "state", "x")
    with pytest.raises(RunError, match="lays out its parameters otherwise"):
        trainer(data, [0, 1]).load(tmp_path / "state", "x")
