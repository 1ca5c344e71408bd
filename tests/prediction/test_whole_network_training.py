"""Training of `WholeNetwork`: probes first, all checkpoints, killed or not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_networks import (
    SMALL,
    check_killed_and_resumed,
    experiment,
    made,
    parts,
    same_weights,
)

from transformer_nfn.models import WholeNetwork, map_network
from transformer_nfn.prediction import strategies
from transformer_nfn.prediction.data import SizeGroups
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predictors import Predictor, module_builder
from transformer_nfn.prediction.probe_search import find_probes, networks_per_group, search_steps
from transformer_nfn.prediction.strategies import Protocol, TrainingStrategy, WholeNetworkStrategy
from transformer_nfn.prediction.training import Execution, SeedTrainer, train_seeds
from transformer_nfn.zoo import NetworkSizes

SHORT = Protocol.of("whole_network", epochs=4, batch=16)


def with_more():
    """Parts with additional checkpoints of the training runs."""
    data = parts()
    columns = {key: np.resize(value, 60) for key, value in data.train.columns.items()}
    columns |= {"row": np.arange(1000, 1060)}
    return replace(data, more=replace(made(60, 5), columns=columns))


def builder(data, **options):
    return module_builder("whole_network", data.train, {**SMALL, **options})


def trainer(data, seeds=(0,)):
    return SeedTrainer(builder(data), data, SHORT, list(seeds), together=True)


def test_probes_become_what_good_networks_agree_on():
    one = made(1)
    noise = torch.Generator().manual_seed(0)
    alike = map_network(
        one.network,
        lambda w: (
            4 * w.expand(20, *w.shape[1:])
            + 0.1 * torch.randn(20, *w.shape[1:], generator=noise)
        ),
    )
    data = replace(made(20), network=alike)
    module = builder(parts())()
    labels = module.probes.labels

    def agreement():
        with torch.no_grad():
            p = module.outputs(data.network, module.probes()).logits.softmax(-1)
        return float((p.mean(0)[torch.arange(len(labels)), labels]).mean())

    before = agreement()
    find_probes(module, [data], 0, steps=240)
    assert agreement() > before + 0.1


def test_the_same_seed_finds_the_same_probes():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        module = builder(parts())()
        find_probes(module, [parts().train], 3, steps=5)
        found.append(module.probes().detach())
    assert torch.equal(*found)


def test_an_epoch_takes_one_checkpoint_for_each_run_but_enough_of_few(monkeypatch):
    data = with_more()
    orders = torch.cat([batch.picks for batch in trainer(data).epoch_plan()[0]], 1)
    assert orders.shape == (1, strategies.MIN_EPOCH)
    assert sorted(orders[0, :100].tolist()) == list(range(100))
    monkeypatch.setattr(strategies, "MIN_EPOCH", 1)
    orders = torch.cat([batch.picks for batch in trainer(data).epoch_plan()[0]], 1)
    assert orders.shape == (1, 40)
    assert int(orders.max()) >= 40  # some of the additional networks


def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    data = with_more()
    check_killed_and_resumed(builder(data), data, SHORT, tmp_path)


def test_the_search_grows_with_the_training_set():
    steps = {100: 100, 480: 480, 3840: 480, 5600: 700, 11_200: 1400, 20_000: 1440}
    assert {n: search_steps(30, n) for n in steps} == steps
    assert search_steps(2, 11_200) == 120
    per_group = {256: 2, 1050: 3, 1434: 4, 2800: 8, 11_200: 8}
    assert {n: networks_per_group(n) for n in per_group} == per_group


def test_a_training_killed_between_two_seeds_does_not_search_again(tmp_path, monkeypatch):
    data, searched = parts(), []
    whole = train_seeds(builder(data), data, SHORT, [0, 1])
    find = strategies.find_probes

    def watched(module, datasets, seed, **options):
        searched.append(seed)
        if searched == [0, 1]:
            raise KeyboardInterrupt
        find(module, datasets, seed, **options)

    monkeypatch.setattr(strategies, "find_probes", watched)
    execution = Execution(tmp_path, "x", save_every=0)
    with pytest.raises(KeyboardInterrupt):
        train_seeds(builder(data), data, SHORT, [0, 1], execution)
    resumed = train_seeds(builder(data), data, SHORT, [0, 1], execution)
    assert searched == [0, 1, 1]
    assert same_weights(resumed.modules, whole.modules)


def test_readers_learn_with_weight_decay_and_probes_stay_as_found():
    held = trainer(parts())
    list(held.start())
    module = held.modules[0]
    (learned,) = held.optimiser.param_groups
    assert learned["weight_decay"] > 0
    found = {id(p) for p in module.probes.parameters()}
    everything = {id(p) for p in module.parameters()}
    assert {id(p) for p in learned["params"]} == everything - found
    before = {name: value.clone() for name, value in module.state_dict().items()}
    held.train_epoch()
    moved = {n for n, value in module.state_dict().items() if not torch.equal(value, before[n])}
    assert {name.split(".")[0] for name in moved} == {"output_head", "invariant_head"}


def test_every_seed_learns_from_the_outputs_on_its_own_probes():
    held = trainer(with_more(), (0, 1))
    list(held.start())
    for module, inputs in zip(held.modules, held.inputs, strict=True):
        with torch.no_grad():
            expected = module.logits(held.train[0].network)
        assert torch.allclose(module.logits(inputs.train[0]), expected, atol=1e-5)
    first, second = (inputs.train[0]["outputs"] for inputs in held.inputs)
    assert float((first - second).abs().max()) > 0.1


@pytest.mark.parametrize("options", [{"probes": 0}, {}])
def test_a_run_is_read_back_and_predicts_the_same(tmp_path, options):
    data = with_more()
    about = {"name": "made", "task": "digits", "networks": 72}
    run = experiment("whole_network", (0, 1), protocol=SHORT, options={**SMALL, **options})
    record = train_run(about, data, run, tmp_path)
    assert record.model == "whole_network"
    predictor = Predictor.load("whole_network", tmp_path / "seed-0")
    again = Predictor.load("whole_network", tmp_path / "seed-0")
    moved = replace(data.test, network=map_network(data.test.network, torch.clone))
    assert torch.equal(predictor.predict(data.test), again.predict(moved))
    assert train_run(about, data, run, tmp_path).summary == record.summary


def test_predictions_are_on_the_scale_of_the_validation_networks(monkeypatch):
    data = parts()
    narrow = {
        name: replace(part, accuracy=0.8 + 0.05 * part.accuracy)
        for name, part in (("train", data.train), ("val", data.val), ("test", data.test))
    }
    data = replace(data, **narrow)
    scaled = train_seeds(builder(data), data, SHORT, [0]).modules[0]
    monkeypatch.setattr(WholeNetworkStrategy, "finish", TrainingStrategy.finish)
    raw = train_seeds(builder(data), data, SHORT, [0]).modules[0]
    with torch.no_grad():
        here, before = scaled.logits(data.val.network), raw.logits(data.val.network)
        error, inflated = (
            float((x.sigmoid() - data.val.accuracy).abs().mean()) for x in (here, before)
        )
    assert torch.equal(here.argsort(), before.argsort())
    assert error < 0.8 * inflated


def test_a_search_can_be_skipped():
    data = parts()
    usual, noisy = builder(data)(), builder(data)()
    noisy.load_state_dict(usual.state_dict())
    noisy.search = False
    for module in (usual, noisy):
        WholeNetworkStrategy(module).start(module, SizeGroups.of(data), 0, 4, True)
    assert not torch.equal(usual.probes(), noisy.probes())


def test_the_model_says_which_sizes_it_cannot_read():
    task = NetworkSizes(tokens=16, classes=10, patch=4)
    module = WholeNetwork(task.block_space, tokens=16, width=4, classes=10, probes=2, rank=2)
    for change, reason in (
        ({"d_model": 64, "heads": 4, "blocks": 7, "d_ff": 12}, None),
        ({"patch": 16}, "expected 4 pixels in a patch, found 16"),
        ({"classes": 4}, "expected 10 classes, found 4"),
        ({"tokens": 49}, "expected 16 tokens, found 49"),
        ({"patch": 0}, "expected networks that read images, found some that read word vectors"),
    ):
        assert module.misfit(replace(task, **change), task) == reason
    text = NetworkSizes(tokens=20, classes=4, patch=0)
    module = WholeNetwork(
        text.block_space, tokens=20, width=32, classes=4, images=False, probes=2, rank=2
    )
    assert module.misfit(replace(text, blocks=5, heads=4), text) is None
    wider = module.misfit(replace(text, d_model=48), text)
    assert wider == "expected word vectors of width 32, found 48"
