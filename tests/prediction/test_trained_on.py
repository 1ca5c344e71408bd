"""A predictor is measured on networks it has learned from only where that is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tnfn_command import tnfn
from transformer_nfn.models import map_network
from transformer_nfn.prediction.dataset import load_parts, load_rows
from transformer_nfn.prediction.evaluation import evaluate
from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.records import RunError
from transformer_nfn.prediction.runs import describe_zoo, train_run
from transformer_nfn.prediction.trained_on import TRAINED_FILE, TrainedOn, standings
from transformer_nfn.zoo import Zoo


@pytest.fixture(scope="module")
def zoo() -> Zoo:
    return Zoo.open("ag-news-sample")


@pytest.fixture(scope="module")
def run(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "boosting"
    train_run(describe_zoo(zoo), load_parts(zoo), "invariant_boosting", out, seeds=[0])
    return out


def test_the_fair_figures_are_those_of_the_test_part(zoo: Zoo, run: Path) -> None:
    parts = load_parts(zoo)
    found = evaluate(run, "ag-news-sample")
    counts = parts.counts
    assert (found["trained_on"], found["selected_by"]) == (counts["train"], counts["val"])
    assert found["networks"] == sum(counts.values())
    assert found["unseen"]["networks"] == counts["test"]
    names = [f"ag-news-sample#{row}" for row in parts.test.columns["row"]]
    predicted = torch.tensor([p.accuracy for p in predict(run, names)])
    fair = scores(parts.test.accuracy.double().numpy(), predicted.double().numpy())
    assert found["unseen"]["tau"] == pytest.approx(fair["tau"])
    assert found["tau"] != found["unseen"]["tau"]


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


def test_a_run_from_before_marks_were_kept_is_asked_otherwise(zoo: Zoo, run: Path) -> None:
    data = load_rows(zoo, zoo.select(percent=75))
    marked = standings(run, data, "ag_news")
    marks = (run / TRAINED_FILE).read_bytes()
    (run / TRAINED_FILE).unlink()
    try:
        assert standings(run, data, "ag_news") == marked
    finally:
        (run / TRAINED_FILE).write_bytes(marks)


def test_rounded_copies_and_other_checkpoints_of_a_run_are_known(zoo: Zoo) -> None:
    parts = load_parts(zoo)
    kept = TrainedOn.of(parts, "ag_news")
    for dtype in (torch.float16, torch.bfloat16):
        rounded = map_network(parts.train.network, lambda w, to=dtype: w.to(to).float())
        nameless = replace(parts.train, network=rounded, columns={})
        assert set(kept.standings(nameless, "ag_news")) == {"trained"}
    later = map_network(parts.val.network, lambda w: -w)
    assert set(kept.standings(replace(parts.val, network=later), "ag_news")) == {"selected"}
    stranger = replace(parts.test, network=map_network(parts.test.network, lambda w: -w))
    assert set(kept.standings(stranger, "ag_news")) == {"unseen"}


def test_further_checkpoints_that_a_predictor_learned_from_are_known(zoo: Zoo) -> None:
    parts = load_parts(zoo, max_train=10)
    first, rest = (parts.train.take(np.arange(*ends)) for ends in ((0, 4), (4, 10)))
    further = replace(parts, train=first, more=rest)
    kept = TrainedOn.of(further, "ag_news")
    assert set(kept.standings(parts.train, "ag_news")) == {"trained"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda marks: marks | {"trained": marks["trained"].double()}, "'trained' expected int64"),
        (lambda marks: marks | {"selected": marks["selected"][None]}, "'selected' expected int64"),
        (lambda marks: {"trained": marks["trained"]}, "is not readable"),
        (lambda marks: marks | {"more": marks["trained"].clone()}, "is not readable"),
    ],
)
def test_damaged_marks_are_one_sentence(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    words: str,
    zoo: Zoo,
    tmp_path: Path,
) -> None:
    TrainedOn.of(load_parts(zoo, max_train=5), "ag_news").save(tmp_path)
    marks = load_file(tmp_path / TRAINED_FILE)
    save_file(change(marks), tmp_path / TRAINED_FILE)
    with pytest.raises(RunError, match=words):
        TrainedOn.load(tmp_path)
