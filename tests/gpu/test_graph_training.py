"""Training on a GPU: the captured step is the step, resumed or not, seeds together or alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_networks import KilledError, groups, parts

from transformer_nfn.models.whole_network.search import find_probes
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import Execution, SeedTrainer, seed_orders, train_seeds

pytestmark = pytest.mark.gpu

# 40 networks in batches of 16: the last of three has 8.
PROTOCOL = Protocol(epochs=4)
# Clipped, with rates halved at a plateau, in full batches.
RECIPE = replace(Protocol.of("hidden_probe"), epochs=4, updates=3, batch=16, patience=1)
MODELS = ["transformer_nfn", "transformer_nfn_gated", "mlp", "statnn"]
UNCAPTURABLE = Path(__file__).with_name("uncapturable.py")


@pytest.fixture(scope="module")
def data():
    return parts().to("cuda")


def trainer(data, seeds, model="transformer_nfn", **options):
    build = predictor_builder(model, data.train, {})
    return SeedTrainer(build, data, PROTOCOL, seeds, together=True, **options)


def close(ours, theirs):
    """Largest differences against the largest number of each tensor, a hundredth of an update."""
    apart = {k: float((ours[k] - v).detach().abs().max()) for k, v in theirs.items()}
    return all(
        apart[k] <= 1e-4 * max(0.1, float(v.detach().abs().max())) for k, v in theirs.items()
    )


@pytest.mark.parametrize("seeds", [[3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("model", MODELS)
def test_the_captured_step_is_the_step(data, model, seeds):
    captured = trainer(data, seeds, model)
    eager = trainer(data, seeds, model, capture=False)
    losses = [[t.train_epoch() for _ in range(2)] for t in (captured, eager)]
    assert set(captured.graphs.captured) == {((0, 0), 16), ((0, 0), 8)}
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert close(captured.state, eager.state)
    # The steps before a capture are not counted.
    steps = {float(entry["step"]) for entry in captured.optimisers[0].state.values()}
    assert steps == {6.0}
    assert torch.allclose(captured.predict(0), eager.predict(0), atol=1e-4)


@pytest.mark.parametrize("model", ["probegen", "hidden_probe", "neural_graph"])
def test_steps_of_rivals_are_captured(data, model):
    captured, eager = (trainer(data, [0, 1], model, capture=each) for each in (True, False))
    losses = [[t.train_epoch() for _ in range(2)] for t in (captured, eager)]
    # Seeds that are stacked share a graph.
    seeds = (0,) if captured.together else (0, 1)
    steps = {((seed, 0), batch) for seed in seeds for batch in (16, 8)}
    assert set(captured.graphs.captured) == steps
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_captured_step_is_clipped_and_drops_as_an_eager_one(data):
    build = predictor_builder("hidden_probe", data.train, {})
    held = [
        SeedTrainer(build, data, RECIPE, [0, 1], together=True, capture=capture)
        for capture in (True, False)
    ]
    for each in held:
        list(each.start())
    losses = [[each.train_epoch() for _ in range(2)] for each in held]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert set(held[0].graphs.captured) == {((0, 0), 16), ((1, 0), 16)}


def test_the_captured_step_learns(data):
    learner = trainer(data, [0, 1])
    first = learner.train_epoch()
    for _ in range(PROTOCOL.epochs - 1):
        last = learner.train_epoch()
    assert last < first


@pytest.mark.parametrize("model", MODELS)
def test_seeds_together_are_seeds_alone(data, model):
    seeds = [0, 1, 2, 3, 4]
    together = trainer(data, seeds, model)
    for _ in range(2):
        together.train_epoch()
    predicted = together.predict(0)
    for i, seed in enumerate(seeds):
        alone = trainer(data, [seed], model)
        for _ in range(2):
            alone.train_epoch()
        assert torch.allclose(alone.predict(0)[0], predicted[i], atol=1e-4)
        apart = [j for j in range(len(seeds)) if j != i]
        assert not torch.allclose(alone.predict(0)[0], predicted[apart], atol=1e-3)


def test_every_kind_of_network_has_steps_of_its_own():
    mixed = groups().to("cuda")
    options = {"probes": 6, "rank": 4, "hidden": 8}
    build = predictor_builder("whole_network", mixed.train[0], options)
    losses, held = [], []
    for capture in (True, False):
        each = SeedTrainer(build, mixed, PROTOCOL, [0, 1], together=True, capture=capture)
        for module in each.modules:  # the search for probes rounds otherwise each time
            module.search = False
        list(each.start())
        losses.append([each.train_epoch() for _ in range(2)])
        held.append(each)
    captured, eager = held
    assert {kind for (_, kind), _ in captured.graphs.captured} == {0, 1}
    assert not captured.graphs.refused
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for kind in range(len(mixed.val)):
        assert torch.allclose(captured.predict(kind), eager.predict(kind), atol=5e-3)


def test_probes_are_found_in_networks_of_several_kinds():
    mixed = groups().to("cuda")
    options = {"probes": 6, "rank": 4}
    module = predictor_builder("whole_network", mixed.train[0], options)().to("cuda")
    before = module.probes().detach().clone()
    find_probes(module, mixed.train, 0, steps=12)
    assert module.probes().isfinite().all()
    assert not torch.equal(module.probes(), before)


@pytest.mark.parametrize("seeds", [[7], [0, 1]])
@pytest.mark.parametrize(
    ("model", "protocol"), [("transformer_nfn", PROTOCOL), ("hidden_probe", RECIPE)]
)
def test_a_killed_training_ends_as_a_whole_one(data, tmp_path, seeds, model, protocol):
    build = predictor_builder(model, data.train, {})
    whole = train_seeds(build, data, protocol, seeds)

    def kill(line):
        if line.get("epoch") == 3:
            raise KilledError

    killed = Execution(tmp_path, "x", kill, save_every=0)
    with pytest.raises(KilledError):
        train_seeds(build, data, protocol, seeds, killed)
    resumed = train_seeds(build, data, protocol, seeds, Execution(tmp_path, "x"))
    assert resumed.best_epoch == whole.best_epoch
    for ours, theirs in zip(resumed.modules, whole.modules, strict=True):
        predicted = (each.predict(data.test.network) for each in (ours, theirs))
        torch.testing.assert_close(*predicted, rtol=0, atol=5e-3)
        if model == "transformer_nfn":  # keys have biases without an effect, which rounding moves
            assert close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_a_state_may_be_taken_up_after_steps_were_captured(data, tmp_path):
    held = trainer(data, [0, 1])
    held.train_epoch()
    held.save(tmp_path / "state", "x")
    held.train_epoch()
    expected = {k: v.detach().clone() for k, v in held.state.items()}
    held.train_epoch()
    assert not close(held.state, expected)
    held.load(tmp_path / "state", "x")
    held.train_epoch()
    assert held.epoch == 2
    assert close(held.state, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_an_epoch_waits_for_nothing(data):
    held = trainer(data, [0, 1])
    held.train_epoch()
    plan = held.epoch_plan()
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = held.run_steps(*plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.isfinite()


def test_orders_are_drawn_on_the_gpu_from_the_seed_alone():
    device = torch.device("cuda")

    def order_of(seed, epoch):
        (order,) = seed_orders([1000], [1000], seed, epoch, device)
        return order

    order = order_of(3, 5)
    assert order.is_cuda
    assert torch.equal(order.sort().values, torch.arange(1000, device=device))
    assert torch.equal(order, order_of(3, 5))
    assert not torch.equal(order, order_of(3, 6))
    assert not torch.equal(order, order_of(4, 5))


def test_what_cannot_be_captured_says_so_and_trains():
    # In a process of its own: a capture that breaks off may leave traces.
    done = subprocess.run(
        [sys.executable, str(UNCAPTURABLE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "warning,", "same", "weights"]
    assert done.stderr.count("cannot be captured as a CUDA graph") == 1
