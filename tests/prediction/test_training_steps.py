"""What steps captured for a GPU rest on, as far as a CPU shows it."""

import pytest
import torch
from made_networks import parts

from transformer_nfn.prediction.graph_step import no_update
from transformer_nfn.prediction.predictors import module_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.training import SeedTrainer

PROTOCOL = Protocol(epochs=4)


def trainer(data, seeds=(0, 1), **options):
    build = module_builder("transformer_nfn", data.train, {})
    return SeedTrainer(build, data, PROTOCOL, list(seeds), **{"together": True, **options})


def numbers(held):
    """Everything that training changes."""
    state = {k: v.detach().clone() for k, v in held.state.items()}
    for i, entry in enumerate(held.optimiser.state.values()):
        state |= {f"adam.{i}.{k}": v.clone() for k, v in entry.items()}
    return state


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("epochs_before", [0, 1])
def test_steps_that_warm_up_leave_no_trace(epochs_before):
    data = parts()
    plain, warmed = trainer(data), trainer(data)
    for held in (plain, warmed):
        for _ in range(epochs_before):
            held.train_epoch()
    picks, tensors = torch.arange(32).reshape(2, 16), dict(warmed.state)
    before = numbers(warmed)
    with no_update(warmed.optimiser):
        for _ in range(3):
            warmed._step(0, picks)
        assert not same(numbers(warmed), before)
    assert all(warmed.state[k] is v for k, v in tensors.items())
    assert [plain.train_epoch(), plain.train_epoch()] == [warmed.train_epoch() for _ in range(2)]
    assert same(numbers(plain), numbers(warmed))


def test_steps_that_fail_leave_no_trace_either():
    held = trainer(parts())
    held.train_epoch()
    before = numbers(held)

    def step_and_fail():
        with no_update(held.optimiser):
            held._step(0, torch.arange(32).reshape(2, 16))
            held._step(0, torch.full((2, 16), 40))

    with pytest.raises(IndexError):
        step_and_fail()
    assert same(numbers(held), before)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 0.0), (torch.float32, 2e-5)])
def test_a_learning_rate_in_a_tensor_is_that_learning_rate(dtype, tolerance, together, tmp_path):
    data = parts()
    plain, held = trainer(data, together=together), trainer(data, together=together)
    held.hold_rate(torch.zeros((), dtype=dtype))
    for each in (plain, held):
        each.train_epoch()
        each.save(tmp_path / "state", "x")
        # What was loaded reads its rate from the same tensor.
        each.load(tmp_path / "state", "x")
        each.train_epoch()
    theirs = numbers(plain)
    for name, value in numbers(held).items():
        assert torch.allclose(value, theirs[name], rtol=0, atol=tolerance), name


def test_an_epoch_has_the_learning_rates_of_the_protocol():
    held, steps = trainer(parts()), 3
    for epoch in range(PROTOCOL.epochs):
        expected = [PROTOCOL.learning_rate(epoch * steps + i, steps) for i in range(steps)]
        assert held.epoch_rates() == expected
        _, rates = held.epoch_plan()
        assert rates == expected
        held.train_epoch()
    held.hold_rate(torch.zeros(()))
    held.epoch = 0
    _, rates = held.epoch_plan()
    assert torch.equal(rates, torch.tensor([PROTOCOL.learning_rate(i, steps) for i in range(3)]))


def test_every_network_comes_once_an_epoch_in_an_order_of_the_seed():
    data = parts()
    orders, again = (
        torch.cat([batch.picks for batch in trainer(data, seeds).epoch_plan()[0]], 1)
        for seeds in ((0, 1), (1, 2))
    )
    assert torch.equal(orders.sort(1).values, torch.arange(40).expand(2, 40))
    assert torch.equal(orders[1], again[0])
    assert not torch.equal(orders[0], orders[1])


def test_a_state_of_another_layout_is_refused(tmp_path):
    data = parts()
    one = trainer(data, [0])
    one.save(tmp_path / "state", "x")
    with pytest.raises(RunError, match="lays out its parameters otherwise"):
        trainer(data, [0, 1]).load(tmp_path / "state", "x")
