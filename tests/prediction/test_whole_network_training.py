"""Training the model of whole networks: probes first, all checkpoints, killed or not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from killed_training import kill_in_epoch
from made_networks import made, parts

from transformer_nfn.models import map_network
from transformer_nfn.models.whole_network.model import order_loss
from transformer_nfn.prediction import manner, probe_search
from transformer_nfn.prediction.kinds import as_kinds
from transformer_nfn.prediction.predictors import Predictor, module_builder
from transformer_nfn.prediction.probe_search import _draws, find_probes, group_asks, search_steps
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import train_run
from transformer_nfn.prediction.training import SeedTrainer, train_seeds

SMALL = {"probes": 6, "rank": 4, "hidden": 8}
SHORT = Protocol.of("whole_network", epochs=4, batch=16)


def with_more():
    data = parts()
    return replace(data, more=replace(made(60, 5), columns=_runs_of(data.train, 60)))


def _runs_of(train, count):
    columns = {key: np.resize(value, count) for key, value in train.columns.items()}
    return {**columns, "row": np.arange(1000, 1000 + count)}


def orders_of(trainer):
    batches, _ = trainer.epoch_plan()
    return torch.cat([batch.picks for batch in batches], 1)


def builder(data, **options):
    return module_builder("whole_network", data.train, {**SMALL, **options})


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


def test_an_epoch_takes_one_checkpoint_for_each_run(monkeypatch):
    monkeypatch.setattr(manner, "SHORTEST_EPOCH", 1)
    data = with_more()
    trainer = SeedTrainer(builder(data), data, SHORT, [0], together=True)
    assert len(trainer.kinds.train[0]) == 100
    orders = orders_of(trainer)
    assert orders.shape == (1, 40)
    assert int(orders.max()) >= 40  # some of the further networks


def test_an_epoch_of_few_runs_takes_every_network_before_any_again():
    data = with_more()
    trainer = SeedTrainer(builder(data), data, SHORT, [0], together=True)
    orders = orders_of(trainer)
    assert orders.shape == (1, manner.SHORTEST_EPOCH)
    assert sorted(orders[0, :100].tolist()) == list(range(100))


def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    data = with_more()
    whole = train_seeds(builder(data), data, SHORT, [0, 1])
    kill_in_epoch(2, builder(data), data, SHORT, tmp_path)
    resumed = train_seeds(builder(data), data, SHORT, [0, 1], folder=tmp_path, identity="x")
    for ours, theirs in zip(resumed.modules, whole.modules, strict=True):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name


def test_the_more_networks_there_are_the_more_the_search_asks():
    steps = {100: 100, 480: 480, 3840: 480, 5600: 700, 11_200: 1400, 20_000: 1440}
    assert {n: search_steps(30, n) for n in steps} == steps
    assert search_steps(2, 11_200) == 120
    asked = {256: 2, 1050: 3, 1434: 4, 2800: 8, 11_200: 8}
    assert {n: group_asks(n) for n in asked} == asked


@pytest.mark.parametrize(("each", "asked"), [(5, 8), (20, 5), (1000, 2)])
def test_a_training_asks_by_how_many_runs_there_are(monkeypatch, each, asked):
    data, found = parts(train=100), []
    monkeypatch.setattr(probe_search, "NETWORKS_ASKED", each)
    monkeypatch.setattr(
        manner, "find_probes", lambda *_, steps, asked: found.append((steps, asked))
    )
    module = builder(data)()
    manner.manner_of(module).begin(module, as_kinds(data), 0, 4, True)
    assert found == [(100, asked)]


def test_a_training_killed_between_two_seeds_does_not_search_again(tmp_path, monkeypatch):
    data, searched = parts(), []
    whole = train_seeds(builder(data), data, SHORT, [0, 1])
    find = manner.find_probes

    def watched(module, kinds, seed, **options):
        searched.append(seed)
        if searched == [0, 1]:
            raise KeyboardInterrupt
        find(module, kinds, seed, **options)

    monkeypatch.setattr(manner, "find_probes", watched)
    how = {"folder": tmp_path, "identity": "x", "save_every": 0}
    with pytest.raises(KeyboardInterrupt):
        train_seeds(builder(data), data, SHORT, [0, 1], **how)
    resumed = train_seeds(builder(data), data, SHORT, [0, 1], **how)
    assert searched == [0, 1, 1]
    for ours, theirs in zip(resumed.modules, whole.modules, strict=True):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name


def test_readers_learn_with_weight_decay_and_probes_stay_as_found():
    data = parts()
    trainer = SeedTrainer(builder(data), data, SHORT, [0], together=True)
    list(trainer.begin())
    module = trainer.modules[0]
    (learned,) = trainer.optimiser.param_groups
    assert learned["weight_decay"] > 0
    found = {id(p) for p in module.probes.parameters()}
    everything = {id(p) for p in module.parameters()}
    assert {id(p) for p in learned["params"]} == everything - found
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.train_epoch()
    moved = {n for n, value in module.state_dict().items() if not torch.equal(value, before[n])}
    assert {name.split(".")[0] for name in moved} == {"output_head", "invariant_head"}


def test_every_seed_learns_from_the_answers_to_its_own_probes():
    data = with_more()
    trainer = SeedTrainer(builder(data), data, SHORT, [0, 1], together=True)
    list(trainer.begin())
    for module, own in zip(trainer.modules, trainer.own, strict=True):
        with torch.no_grad():
            asked = module.logits(trainer.kinds.train[0].network)
        assert torch.allclose(module.logits(own.train[0]), asked, atol=1e-5)
    first, second = (own.train[0]["outputs"] for own in trainer.own)
    assert float((first - second).abs().max()) > 0.1


def test_groups_of_probes_ask_networks_of_their_own():
    drawn = _draws([torch.rand(30)], 4, 0, groups=2, asked=3)
    assert all(rows.shape == (2, 3) for _, rows in drawn)
    assert not all(torch.equal(*rows) for _, rows in drawn)


@pytest.mark.parametrize("probes", [0, 6])
def test_a_run_is_read_back_and_predicts_the_same(tmp_path, probes):
    data = with_more()
    options = {**SMALL, "probes": probes}
    about = {"name": "made", "task": "digits", "networks": 72}
    record = train_run(
        about, data, "whole_network", tmp_path, seeds=[0, 1], protocol=SHORT, options=options
    )
    assert record.model == "whole_network"
    predictor = Predictor.load("whole_network", tmp_path / "seed-0")
    again = Predictor.load("whole_network", tmp_path / "seed-0")
    moved = replace(data.test, network=map_network(data.test.network, torch.clone))
    assert torch.equal(predictor.predict(data.test), again.predict(moved))
    again_record = train_run(
        about, data, "whole_network", tmp_path, seeds=[0, 1], protocol=SHORT, options=options
    )
    assert again_record.summary == record.summary


def test_more_checkpoints_make_another_training(tmp_path):
    from transformer_nfn.prediction.identity import training_identity

    plain, more = parts(), with_more()
    assert training_identity("whole_network", {}, plain, SHORT, [0]) != training_identity(
        "whole_network", {}, more, SHORT, [0]
    )


def test_what_training_does_can_be_left_out():
    data = parts()
    usual, noisy = builder(data)(), builder(data)()
    noisy.load_state_dict(usual.state_dict())
    noisy.search, noisy.order = False, 0.0
    for module in (usual, noisy):
        manner.manner_of(module).begin(module, as_kinds(data), 0, 4, True)
    assert not torch.equal(usual.probes(), noisy.probes())
    assert torch.equal(noisy.mean, usual.mean)
    logits, accuracy = torch.tensor([1.0, -1.0]), torch.tensor([0.2, 0.8])
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, accuracy)
    assert torch.equal(noisy.loss(logits, accuracy), entropy)
    expected = entropy + 0.3 * order_loss(logits, accuracy)
    assert torch.equal(usual.loss(logits, accuracy), expected)


def test_what_it_says_is_on_the_scale_of_the_validation_networks(monkeypatch):
    data = parts()
    narrow = {
        name: replace(part, accuracy=0.8 + 0.05 * part.accuracy)
        for name, part in (("train", data.train), ("val", data.val), ("test", data.test))
    }
    data = replace(data, **narrow)
    scaled = train_seeds(builder(data), data, SHORT, [0]).modules[0]
    monkeypatch.setattr(manner.WholeNetworkManner, "finish", manner.Manner.finish)
    raw = train_seeds(builder(data), data, SHORT, [0]).modules[0]
    with torch.no_grad():
        here, before = scaled.logits(data.val.network), raw.logits(data.val.network)
        error, stretched = (
            float((x.sigmoid() - data.val.accuracy).abs().mean()) for x in (here, before)
        )
    assert torch.equal(here.argsort(), before.argsort())
    assert error < 0.8 * stretched
