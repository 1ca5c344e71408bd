"""The published recipe of rivals that learn probes: plain PyTorch beside it, resumed, recorded."""

import json
from dataclasses import replace

import pytest
import torch
from made_networks import (
    ABOUT,
    check_killed_and_resumed,
    experiment,
    groups,
    made,
    parts,
    same_weights,
)
from scipy.stats import kendalltau
from torch import nn

from transformer_nfn.models import HiddenProbe
from transformer_nfn.prediction.data import Parts
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predictors import predictor_builder
from transformer_nfn.prediction.protocol import Plateau, Protocol
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.prediction.training import SeedTrainer, train_seeds

SMALL = {"probes": 4, "stream_tokens": 3, "codes": 4, "hidden": 8, "heads": 2, "neurons": 8}
SMALL_MLP = {"probes": 4, "latent": 3, "channels": 2, "hidden": 8, "layers": 3}
SHORT = Protocol(
    epochs=4, updates=3, batch=16, lr=2e-3, final_lr=0.0, warmup=0, patience=1, clip=0.5
)


def doubled(data):
    twice = data.network.to(torch.float64)
    return replace(data, network=twice, accuracy=data.accuracy.double())


def builder(data, model="hidden_probe", **options):
    small = SMALL if model == "hidden_probe" else SMALL_MLP
    return predictor_builder(model, data.train, {**small, **options})


@pytest.mark.parametrize("model", ["hidden_probe", "probegen"])
def test_a_training_is_plain_pytorch(model, monkeypatch):
    """The loop against one written out with PyTorch's AdamW, clipping and schedulers."""
    monkeypatch.setattr(HiddenProbe, "dropout", 0.0)
    data = Parts(*(doubled(made(n, seed)) for n, seed in ((40, 0), (16, 1), (16, 2))))
    hidden, seed, epochs, updates, lr = model == "hidden_probe", 5, 7, 4, 1e-2

    def build():
        return builder(data, model)().double()

    protocol = Protocol(
        epochs, 16, lr, final_lr=0.0, warmup=0, updates=updates, patience=int(hidden), clip=0.5
    )
    held = SeedTrainer(build, data, protocol, [seed], together=True)
    assert list(held.start()) == [seed]
    torch.manual_seed(seed)
    module = build()
    probes = {id(p) for p in module.generator.parameters()}
    optimiser = torch.optim.AdamW([
        {"params": [p for p in module.parameters() if id(p) not in probes], "weight_decay": 1e-3},
        {"params": list(module.generator.parameters()), "weight_decay": 0.0,
         "lr": 2 * lr if hidden else lr},
    ], lr=lr)  # fmt: skip
    if hidden:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, "max", 0.5, 1)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * updates)
    mean = float(data.train.accuracy.mean())
    scale = float(data.train.accuracy.std(correction=0))
    norms, rates = [], []
    for epoch in range(epochs):
        source = torch.Generator().manual_seed((seed + 1) * 1_000_003 + epoch)
        order = torch.cat([torch.randperm(40, generator=source) for _ in range(2)])
        module.train()
        for step in range(updates):
            batch = data.train.take(order[16 * step : 16 * (step + 1)])
            assert len(batch) == 16
            optimiser.zero_grad()
            error = module.logits(batch.network) - (batch.accuracy - mean) / scale
            error.square().mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
            rates.append([group["lr"] for group in optimiser.param_groups])
            optimiser.step()
            if not hidden:
                scheduler.step()
        assert held.epoch_rates() == pytest.approx(torch.tensor(rates[-updates:]), rel=1e-6)
        held.train_epoch()
        (tau,) = held.select()
        module.eval()
        with torch.no_grad():
            predicted = scale * module.logits(data.val.network) + mean
        expected = kendalltau(data.val.accuracy.numpy(), predicted.numpy()).statistic
        assert tau == pytest.approx(expected, abs=1e-9)
        torch.testing.assert_close(held.predict(0)[0], predicted, rtol=0, atol=1e-9)
        if hidden:
            scheduler.step(expected)
    assert min(norms) < 0.5 < max(norms)
    assert rates[-1][0] < lr / 1.9
    for name, value in module.named_parameters():
        torch.testing.assert_close(held.state[f"0.{name}"], value, rtol=0, atol=1e-9)


def test_rates_are_halved_as_by_pytorch():
    source = torch.Generator().manual_seed(0)
    for patience in (1, 2, 5):
        optimiser = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimiser, "max", factor=0.5, patience=patience
        )
        ours = Plateau(patience)
        for tau in (torch.rand(60, generator=source) - 0.2).tolist():
            theirs.step(tau)
            assert ours.after(tau) == optimiser.param_groups[0]["lr"]
        assert ours.factor < 1


def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    data, longer = parts(), replace(SHORT, epochs=6, lr=2e-2)
    check_killed_and_resumed(builder(data), data, longer, tmp_path, epoch=4)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rates = {(line["seed"], line["epoch"]): line["lr"] for line in log}
    # A seed had waited before it was killed, and its rate is halved behind that.
    assert rates[0, 1] == rates[1, 1] == 2e-2
    assert min(rates.values()) < 2e-2


def test_a_seed_does_not_depend_on_the_others():
    """Each has dropout, a clipped gradient and a plateau of its own."""
    data = parts()
    together = train_seeds(builder(data), data, SHORT, [3, 4]).modules
    assert not same_weights(together[:1], together[1:])
    for i, seed in enumerate((3, 4)):
        before = torch.get_rng_state()
        alone = train_seeds(builder(data), data, SHORT, [seed]).modules
        assert torch.equal(torch.get_rng_state(), before)
        assert same_weights(alone, together[i : i + 1])


def test_dropout_is_drawn_in_training_alone():
    data = parts()
    module = builder(data)()
    module.train()
    with module.stepping(0, 1):
        first = module.logits(data.val.network)
    for step, same in ((1, True), (2, False)):
        with module.stepping(0, step):
            assert torch.equal(module.logits(data.val.network), first) == same
    module.eval()
    assert torch.equal(module.logits(data.val.network), module.logits(data.val.network))


def test_clipped_seeds_are_not_stacked():
    """A gradient is clipped by the norm of its own seed."""
    data, clipped = parts(), Protocol(epochs=2, clip=1e-3)
    build = predictor_builder("mlp", data.train, {})
    together = train_seeds(build, data, clipped, [0, 1]).modules
    alone = [train_seeds(build, data, clipped, [seed]).modules[0] for seed in (0, 1)]
    assert same_weights(together, alone)
    assert not same_weights(alone, train_seeds(build, data, Protocol(epochs=2), [0, 1]).modules)


def test_an_epoch_has_as_many_updates_as_the_protocol_says():
    mixed = groups()
    build = predictor_builder("probegen", mixed.train, SMALL_MLP)
    held = SeedTrainer(build, mixed, Protocol(updates=6, batch=16), [0, 1], together=True)
    batches, rates = held.epoch_plan()
    assert len(batches) == len(rates) == held.steps_per_epoch == 6
    assert sorted(batch.group for batch in batches) == [0, 0, 0, 0, 1, 1]
    assert all(batch.picks.shape == (2, 16) for batch in batches)
    picks = torch.cat([batch.picks[0] for batch in batches if batch.group == 0])
    # 64 of 40 networks: each once, then some of them a second time.
    assert sorted(torch.bincount(picks, minlength=40).tolist()) == [1] * 16 + [2] * 24


def test_a_run_records_its_updates(tmp_path):
    run = experiment("hidden_probe", (0, 1), protocol=SHORT, options=SMALL)
    record = train_run(ABOUT, parts(), run, tmp_path)
    assert RunRecord.read(tmp_path) == record
    assert record.made["updates"] == 12
    expected = {"epochs": 4, "updates": 3, "patience": 1, "clip": 0.5}
    assert {key: record.protocol[key] for key in expected} == expected
    written = json.loads((tmp_path / "run.json").read_text())
    for name in ("updates", "patience", "clip"):
        wrong = {**written, "protocol": {**written["protocol"], name: "many"}}
        (tmp_path / "run.json").write_text(json.dumps(wrong))
        with pytest.raises(RunError, match=rf"'protocol\.{name}'"):
            RunRecord.read(tmp_path)


def test_predictions_are_accuracies(tmp_path):
    """Standardised for the loss, mapped back for everybody else, also behind a folder."""
    data = parts()
    (module,) = train_seeds(builder(data), data, SHORT, [0]).modules
    accuracy = data.train.accuracy
    assert float(module.accuracy_mean) == pytest.approx(float(accuracy.mean()))
    with torch.no_grad():
        outputs = module.logits(data.test.network)
    expected = (accuracy.mean() + accuracy.std(correction=0) * outputs).clamp(0, 1)
    torch.testing.assert_close(module.predict(data.test.network), expected, rtol=0, atol=1e-6)
    module.save(tmp_path)
    again = HiddenProbe.load(tmp_path).predict(data.test.network)
    assert torch.equal(again, module.predict(data.test.network))


@pytest.mark.parametrize(("model", "rates"), [("hidden_probe", (2.5e-4, 5e-4)),
                                              ("probegen", (5e-4, 5e-4))])  # fmt: skip
def test_the_recipe_depends_on_what_networks_read(model, rates):
    words = {"architecture": {**ABOUT["architecture"], "patch": 0}}
    for zoo, rate in zip((ABOUT, words), rates, strict=True):
        protocol = Protocol.of(model, zoo=zoo)
        assert protocol.lr == rate
        assert (protocol.epochs * protocol.updates, protocol.updates) == (40_000, 1000)
        assert (protocol.batch, protocol.warmup, protocol.clip) == (32, 0, 1.0)
        assert protocol.patience == (5 if model == "hidden_probe" else 0)
        assert protocol.learning_rate(0, 1000) == rate
    # A number of epochs means passes over the networks, as for every model.
    assert Protocol.of(model, epochs=3, zoo=ABOUT) == replace(
        Protocol.of(model, zoo=ABOUT), epochs=3, updates=0
    )
    for wrong in ({"updates": -1}, {"patience": 0.5}, {"clip": float("nan")}, {"lr": 0}):
        with pytest.raises(RunError, match=f"{min(wrong)} expected a"):
            Protocol(**wrong)
