"""What a run keeps of its training set: distances to it, and which networks belong to it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_networks import experiment
from safetensors.torch import load_file, save_file

from tnfn_command import tnfn
from transformer_nfn.prediction.data import Selection, describe_zoo, load_parts, load_rows
from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.prediction.training_set import (
    DIGESTS_FILE,
    DISTANCE_FILE,
    TrainingDigests,
    TrainingSetDistance,
)
from transformer_nfn.zoo import Zoo


@pytest.fixture(scope="module")
def zoo() -> Zoo:
    return Zoo.open("ag-news-sample")


@pytest.fixture(scope="module")
def run(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "boosting"
    train_run(describe_zoo(zoo), load_parts(zoo), experiment("invariant_boosting"), out)
    return out


def test_half_precision_moves_no_distance(tmp_path: Path) -> None:
    mnist = Zoo.open("mnist-sample")
    networks = load_rows(mnist, Selection().rows(mnist)[:48])
    others = networks.take(torch.arange(32, 48))
    for any_size in (False, True):
        exact = TrainingSetDistance.of([networks.take(torch.arange(32))], any_size=any_size)
        exact.save(tmp_path)
        assert load_file(tmp_path / DISTANCE_FILE)["rows"].dtype == torch.float16
        kept = TrainingSetDistance.load(tmp_path)
        assert float((kept(others) - exact(others)).abs().max()) < 1e-3
        assert float(exact(others).min()) > 0.1
    tensors = load_file(tmp_path / DISTANCE_FILE) | {"rows": exact.rows.double()}
    save_file(tensors, tmp_path / DISTANCE_FILE)
    with pytest.raises(RunError, match=r"'rows' expected .* in float32, found .* in float64"):
        TrainingSetDistance.load(tmp_path)


def test_unseen_networks_are_those_of_the_test_part(zoo: Zoo, run: Path) -> None:
    parts = load_parts(zoo)
    found = evaluate(run, "ag-news-sample")
    counts = parts.counts
    assert (found["trained_on"], found["selected_by"]) == (counts["train"], counts["val"])
    assert found["networks"] == sum(counts.values())
    assert found["unseen"]["networks"] == counts["test"]
    names = [f"ag-news-sample#{row}" for row in parts.test.columns["row"]]
    predicted = np.array([p.value for p in predict(run, names)])
    assert found["unseen"]["tau"] == pytest.approx(scores(parts.test.truth, predicted)["tau"])
    assert found["tau"] != found["unseen"]["tau"]


@pytest.mark.nightly
def test_the_command_warns_and_prints_both(zoo: Zoo, run: Path) -> None:
    counts = load_parts(zoo).counts
    code, out, err = tnfn("evaluate", run, "ag-news-sample")
    assert code == 0
    assert "never seen" in out
    assert f"{counts['train']} are those the predictor was trained on" in err
    assert f"the {counts['test']} it never saw" in err
    code, out, err = tnfn("evaluate", "mnist-boosting", "mnist-sample", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["trained_on"], found["note"]) == (0, None)
    assert found["unseen"]["tau"] == found["tau"]


def test_rounded_copies_and_other_checkpoints_are_recognised(zoo: Zoo) -> None:
    parts = load_parts(zoo)
    digests = TrainingDigests.of(parts, "ag_news")
    for dtype in (torch.float16, torch.bfloat16):
        rounded = parts.train.network.to(dtype).to(torch.float32)
        nameless = replace(parts.train, network=rounded, columns={})
        assert set(digests.standings(nameless, "ag_news")) == {"trained"}
    later = parts.val.network.map(torch.neg)
    assert set(digests.standings(replace(parts.val, network=later), "ag_news")) == {"selected"}
    stranger = replace(parts.test, network=parts.test.network.map(torch.neg))
    assert set(digests.standings(stranger, "ag_news")) == {"unseen"}
    first, rest = (parts.train.take(np.arange(*ends)) for ends in ((0, 4), (4, 10)))
    more = TrainingDigests.of(replace(parts, train=first, more=rest), "ag_news")
    assert set(more.standings(parts.train.take(np.arange(10)), "ag_news")) == {"trained"}


def test_damaged_digests_are_rejected(zoo: Zoo, tmp_path: Path) -> None:
    TrainingDigests.of(load_parts(zoo, Selection(max_train=5)), "ag_news").save(tmp_path)
    kept = load_file(tmp_path / DIGESTS_FILE)
    for changed, message in (
        (kept | {"trained": kept["trained"].double()}, "'trained' expected .* in int64, found"),
        (kept | {"selected": kept["selected"][None]}, r"'selected' expected .*, found \[1, \d+\]"),
        ({"trained": kept["trained"]}, "'trained_runs' expected .*, found None"),
        (kept | {"more": kept["trained"].clone()}, "'more' expected None, found"),
    ):
        save_file(changed, tmp_path / DIGESTS_FILE)
        with pytest.raises(RunError, match=message):
            TrainingDigests.load(tmp_path)
