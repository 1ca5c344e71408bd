"""Training: seeds together or alone, killed or not, the result is the same."""

import itertools
import json

import numpy as np
import pytest
import torch
from killed_training import kill_in_epoch
from made_networks import ABOUT, parts
from scipy.stats import kendalltau

from transformer_nfn.prediction.predictors import Predictor, module_builder
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import RunError, RunRecord, read_predictions
from transformer_nfn.prediction.runs import train_run
from transformer_nfn.prediction.training import train_seeds
from transformer_nfn.prediction.training_state import STATE_FILE

SHORT = Protocol(epochs=4)


def weights(trained):
    return [{k: v.clone() for k, v in m.state_dict().items()} for m in trained.modules]


def builder(data, **options):
    return module_builder("transformer_nfn", data.train, {"channels": [2], **options})


def test_a_killed_training_ends_with_the_same_weights(tmp_path):
    data = parts()
    whole = train_seeds(builder(data), data, SHORT, [0, 1])
    kill_in_epoch(3, builder(data), data, SHORT, tmp_path)
    assert (tmp_path / STATE_FILE).is_file()
    resumed = train_seeds(builder(data), data, SHORT, [0, 1], folder=tmp_path, identity="x")
    assert resumed.best_epoch == whole.best_epoch
    for ours, theirs in zip(weights(resumed), weights(whole), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(x["epoch"], x["seed"]) for x in lines] == [(e, s) for e in range(1, 5) for s in (0, 1)]
    assert (tmp_path / STATE_FILE).is_file()
    with pytest.raises(RunError, match="is of another training"):
        train_seeds(builder(data), data, SHORT, [0, 1], folder=tmp_path, identity="y")


@pytest.mark.parametrize("model", ["transformer_nfn", "mlp", "statnn"])
def test_seeds_together_are_seeds_alone(model):
    data = parts()
    build = module_builder(model, data.train, {})
    together = train_seeds(build, data, SHORT, [3, 4], together=True)
    for i, seed in enumerate((3, 4)):
        alone = train_seeds(build, data, SHORT, [seed])
        left = Predictor(model, together.modules[i]).predict(data.test)
        right = Predictor(model, alone.modules[0]).predict(data.test)
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


def test_a_run_folder_says_everything(tmp_path):
    data = parts()
    record = train_run(
        ABOUT, data, "transformer_nfn", tmp_path / "run", seeds=[0, 1], protocol=SHORT
    )
    again = RunRecord.read(tmp_path / "run")
    assert again == record
    assert {"tau", "tau_se", "r2", "mae", "coverage", "radius"} <= set(record.summary)
    assert record.selection["train"] == 40
    found = read_predictions(tmp_path / "run")
    test = (found["split"] == "test") & (found["seed"] == 1)
    predictor = Predictor.load("transformer_nfn", tmp_path / "run" / "seed-1")
    assert np.allclose(predictor.predict(data.test).numpy(), found["predicted"][test], atol=1e-6)
    assert (found["low"] <= found["predicted"]).all()
    mean = (found["predicted"][found["split"] == "test"]).reshape(2, -1).mean(0)
    expected = kendalltau(data.test.accuracy.numpy(), mean).statistic
    assert record.summary["tau_together"] == pytest.approx(expected)
    assert not (tmp_path / "run" / STATE_FILE).exists()
    cached = train_run(
        ABOUT, data, "transformer_nfn", tmp_path / "run", seeds=[0, 1], protocol=SHORT
    )
    assert cached == record
    del record.summary["tau_together"]
    record.write(tmp_path / "run")
    older = train_run(
        ABOUT, data, "transformer_nfn", tmp_path / "run", seeds=[0, 1], protocol=SHORT
    )
    assert older == cached, "a record from before seeds were measured together is completed"
    with pytest.raises(RunError, match="holds another run"):
        train_run(ABOUT, data, "mlp", tmp_path / "run", seeds=[0], protocol=SHORT)
