"""Training of `WholeNetwork`: probes first, all checkpoints, killed or not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_networks import (
    ABOUT,
    SMALL,
    check_killed_and_resumed,
    experiment,
    made,
    parts,
)

from transformer_nfn.models import Batch, WholeNetwork
from transformer_nfn.models.pretrained import Pretrained
from transformer_nfn.models.whole_network import model
from transformer_nfn.models.whole_network.search import find_probes
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.training import SeedTrainer, train_seeds
from transformer_nfn.zoo import NetworkSizes

SHORT = Protocol.of("whole_network", epochs=4, batch=16)


def with_more():
    """Parts with additional checkpoints of the training runs."""
    data = parts()
    columns = {key: np.resize(value, 60) for key, value in data.train.columns.items()}
    columns |= {"row": np.arange(1000, 1060)}
    return replace(data, more=replace(made(60, 5), columns=columns))


def builder(data, **options):
    return predictor_builder("whole_network", data.train, {**SMALL, **options})


@pytest.mark.nightly
def test_probes_become_what_good_networks_agree_on():
    one = made(1)
    noise = torch.Generator().manual_seed(0)
    weights = 4 * one.network.weights.expand(20, -1)
    weights = weights + 0.1 * torch.randn(weights.shape, generator=noise)
    alike = Batch.of_rows(weights, one.network.layout)
    data = replace(made(20), network=alike)
    module = builder(parts())()
    labels = module.probes.labels

    def agreement():
        with torch.no_grad():
            p = module.outputs(data.network, module.probes()).logits.softmax(-1)
        return float((p.mean(0)[torch.arange(len(labels)), labels]).mean())

    before = agreement()
    find_probes(module, [data], 0, steps=80)
    assert agreement() > before + 0.1


def test_the_same_seed_finds_the_same_probes():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        module = builder(parts())()
        find_probes(module, [parts().train], 3, steps=5)
        found.append(module.probes().detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("many", [True, False])
def test_probes_learn_with_the_heads_if_there_are_many_networks(monkeypatch, many):
    data = parts()
    if many:
        monkeypatch.setattr(model, "MANY_NETWORKS", len(data.train))
    trainer = SeedTrainer(builder(data), data, SHORT, [0], together=False)
    list(trainer.start())
    module = trainer.modules[0]
    found, head = module.probes().detach(), module.output_head[0].weight.detach().clone()
    trainer.train_epoch()
    assert torch.equal(module.probes(), found) is not many
    assert not torch.equal(module.output_head[0].weight, head)
    assert ("outputs" in trainer.inputs[0][0][0].computed) is not many


@pytest.mark.nightly
def test_a_killed_training_of_probes_ends_with_the_same_weights(monkeypatch, tmp_path):
    data = parts()
    monkeypatch.setattr(model, "MANY_NETWORKS", len(data.train))
    check_killed_and_resumed(builder(data), data, SHORT, tmp_path, epoch=3)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"probes": 0}, {}])
def test_a_run_is_read_back_and_predicts_the_same(tmp_path, options):
    data = with_more()
    run = experiment("whole_network", (0, 1), protocol=SHORT, options={**SMALL, **options})
    record = train_run(ABOUT, data, run, tmp_path)
    assert record.model == "whole_network"
    predictor = WholeNetwork.load(tmp_path / "seed-0")
    again = WholeNetwork.load(tmp_path / "seed-0")
    moved = replace(data.test, network=data.test.network.map(torch.clone))
    assert torch.equal(predictor.predict(data.test.network), again.predict(moved.network))
    assert train_run(ABOUT, data, run, tmp_path).summary == record.summary


@pytest.mark.nightly
def test_predictions_are_on_the_scale_of_the_validation_networks(monkeypatch):
    data = parts()
    narrow = {
        name: replace(part, accuracy=0.8 + 0.05 * part.accuracy)
        for name, part in (("train", data.train), ("val", data.val), ("test", data.test))
    }
    data = replace(data, **narrow)
    scaled = train_seeds(builder(data), data, SHORT, [0]).modules[0]
    monkeypatch.setattr(WholeNetwork, "finish", Pretrained.finish)
    raw = train_seeds(builder(data), data, SHORT, [0]).modules[0]
    with torch.no_grad():
        here, before = scaled.logits(data.val.network), raw.logits(data.val.network)
        error, inflated = (
            float((x.sigmoid() - data.val.accuracy).abs().mean()) for x in (here, before)
        )
    assert torch.equal(here.argsort(), before.argsort())
    assert error < 0.8 * inflated


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
