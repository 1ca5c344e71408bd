"""From a real zoo to runs and predictions: small, but every part is the one users run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from transformer_nfn.cli.app import app
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.prediction.dataset import load_parts, load_rows
from transformer_nfn.prediction.evaluation import evaluate
from transformer_nfn.prediction.events import write_events
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.prediction.runs import describe_zoo, train_run
from transformer_nfn.zoo import BuildOptions, Zoo, build
from transformer_nfn.zoo.module import to_state_dict

SHORT = Protocol(epochs=3)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "digits"
    return build(path, BuildOptions(task="digits", runs=48, epochs=4, workers=1))


@pytest.fixture(scope="module")
def run(zoo, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "nfn"
    train_run(
        describe_zoo(zoo),
        load_parts(zoo),
        "transformer_nfn",
        out,
        seeds=[0, 1],
        protocol=SHORT,
        options={"channels": [2]},
    )
    return out


def test_parts_share_no_run(zoo):
    parts = load_parts(zoo)
    runs = [set(part.columns["run"]) for part in (parts.train, parts.val, parts.test)]
    assert len(set.union(*runs)) == sum(len(names) for names in runs)
    assert sum(parts.counts.values()) == len(zoo.select(percent=75))
    assert parts.train.sizes == {"embedding": 160, "classifier": 1386}
    few = load_parts(zoo, max_train=10)
    assert few.counts["train"] == 10
    assert few.counts["test"] == parts.counts["test"]


def test_too_few_networks_are_named(zoo):
    with pytest.raises(RunError, match=r"not enough networks: 0 have accuracy at least 1\.1"):
        load_parts(zoo, min_accuracy=1.1)
    with pytest.raises(RunError, match="no checkpoints at 33 %"):
        load_parts(zoo, percent=33)


def test_one_accuracy_only_is_named(zoo, monkeypatch):
    same = dict(zoo.table) | {"test_accuracy": np.full(len(zoo), 0.5)}
    monkeypatch.setattr(zoo, "table", same)
    with pytest.raises(RunError, match=r"all in the train part have one accuracy, 0\.5000"):
        load_parts(zoo)


def test_weights_that_are_not_finite_are_named(zoo, monkeypatch):
    rows = zoo.select(percent=75)[:5]
    weights = zoo.weights(rows)
    weights["blocks.1.W_A"][3, 0, 0] = float("nan")
    monkeypatch.setattr(zoo, "weights", lambda _: weights)
    with pytest.raises(RunError, match=rf"'blocks\.1\.W_A' of row {rows[3]} of the zoo"):
        load_rows(zoo, rows)


def test_predictions_for_rows_state_dicts_and_files(zoo, run, tmp_path):
    row = int(zoo.select(percent=75)[3])
    named = {name: w[0] for name, w in zoo.weights([row]).items()}
    torch.save(to_state_dict(zoo.sizes, named), tmp_path / "net.pt")
    save_file(to_state_dict(zoo.sizes, named), tmp_path / "net.safetensors")
    save_file(named, tmp_path / "ours.safetensors")
    files = [str(tmp_path / f) for f in ("net.pt", "net.safetensors", "ours.safetensors")]
    found = predict(run, [f"{zoo.path}#{row}", *files])
    assert len({round(p.accuracy, 6) for p in found}) == 1
    assert all(p.low <= p.accuracy <= p.high for p in found)
    save_file({name: 30 * w for name, w in named.items()}, tmp_path / "odd.safetensors")
    (odd,) = predict(run, [str(tmp_path / "odd.safetensors")])
    assert odd.novelty > 1
    assert "unlike any network" in odd.warning


def test_seen_networks_raise_no_alarm(zoo, run):
    rows = zoo.select(percent=75)
    found = predict(run, [f"{zoo.path}#{row}" for row in rows])
    assert sum(p.warning is not None for p in found) <= 0.1 * len(rows)


def test_evaluate_on_a_zoo_and_tensorboard(zoo, run):
    found = evaluate(run, zoo.path)
    assert found["networks"] == len(zoo.select(percent=75))
    assert -1 <= found["tau"] <= 1
    out = write_events(run)
    assert len(list(out.glob("seed-*/events*"))) == 2


def test_bad_checkpoints_and_runs_are_explained(zoo, run, tmp_path):
    row = int(zoo.select(percent=75)[0])
    named = {name: w[0] for name, w in zoo.weights([row]).items()}
    state = to_state_dict(zoo.sizes, named)
    cases = {
        "there is no file": str(tmp_path / "none.pt"),
        "whole number": f"{zoo.path}#x",
        "not a plain state dict": str(tmp_path / "code.pt"),
        "not a readable safetensors": str(tmp_path / "torn.safetensors"),
        "'classifier.fc2.weight': expected shape": str(tmp_path / "other.pt"),
        "state dict lacks": str(tmp_path / "part.pt"),
        "'classifier.b_2' holds values that are not finite": str(tmp_path / "nan.pt"),
    }
    torch.save(print, tmp_path / "code.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"x" * 40)
    torch.save({**state, "classifier.fc2.weight": torch.ones(7, 32)}, tmp_path / "other.pt")
    torch.save({k: v for k, v in state.items() if "fc1" not in k}, tmp_path / "part.pt")
    torch.save(
        {**state, "classifier.fc2.bias": state["classifier.fc2.bias"] / 0}, tmp_path / "nan.pt"
    )
    for message, checkpoint in cases.items():
        with pytest.raises(TransformerNFNError, match=message):
            predict(run, [checkpoint])
    with pytest.raises(RunError, match="is not a run folder"):
        predict(tmp_path, [f"{zoo.path}#0"])
    data = json.loads((run / "run.json").read_text())
    other = tmp_path / "newer"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({**data, "format": 99}))
    with pytest.raises(RunError, match="has format 99, expected 1"):
        RunRecord.read(other)


def test_a_training_killed_with_signal_9_ends_the_same(zoo, tmp_path):
    words = ["train", str(zoo.path), "--model", "transformer_nfn", "--channels", "2"]
    words += ["--seeds", "2", "--epochs", "12", "--device", "cpu", "--save-every", "0"]

    def command(out):
        return [sys.executable, "-m", "transformer_nfn", *words, "--out", str(tmp_path / out)]

    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(command("killed"), **quiet)
    state = tmp_path / "killed" / "training.safetensors"
    deadline = time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert state.exists()
    assert not (tmp_path / "killed" / "run.json").exists()
    for out in ("killed", "whole"):
        subprocess.run(command(out), check=True, **quiet)
    for seed in (0, 1):
        killed, whole = (
            (tmp_path / out / f"seed-{seed}" / "model.safetensors").read_bytes()
            for out in ("killed", "whole")
        )
        assert killed == whole


def test_opening_again_reads_the_same_zoo(zoo):
    assert describe_zoo(Zoo.open(zoo.path)) == describe_zoo(zoo)


def test_a_record_says_whose_seeds_the_networks_have(zoo, run):
    assert describe_zoo(zoo)["seeds"] == "each"
    assert RunRecord.read(run).zoo["seeds"] == "each"
    assert evaluate(run, zoo.path)["zoo_seeds"] == "each"
    result = CliRunner().invoke(app, ["evaluate", str(run), str(zoo.path)])
    assert "a seed each" in result.output
    result = CliRunner().invoke(app, ["evaluate", str(run)])
    assert "a seed each" in " ".join(result.output.split())


def test_evaluate_tells_how_good_the_seeds_are_together(run, tmp_path):
    old = shutil.copytree(run, tmp_path / "old")
    record = json.loads((old / "run.json").read_text())
    together = record["summary"].pop("tau_together")
    (old / "run.json").write_text(json.dumps(record))
    result = CliRunner().invoke(app, ["evaluate", str(old), "--json"])
    assert json.loads(result.output)["summary"]["tau_together"] == together
    shown = " ".join(CliRunner().invoke(app, ["evaluate", str(old)]).output.split())
    assert f"together {together:.3f}" in shown
    (old / "predictions.parquet").write_bytes(b"no table")
    result = CliRunner().invoke(app, ["evaluate", str(old)])
    assert "predictions.parquet' is not readable" in str(result.exception)
    (old / "predictions.parquet").unlink()
    assert CliRunner().invoke(app, ["evaluate", str(old)]).exit_code == 0


def test_a_run_from_before_zoos_told_their_seeds_is_completed_not_trained(zoo, run, tmp_path):
    old = shutil.copytree(run, tmp_path / "old")
    record = json.loads((old / "run.json").read_text())
    del record["zoo"]["seeds"]
    (old / "run.json").write_text(json.dumps(record))
    result = CliRunner().invoke(app, ["evaluate", str(old)])
    assert (result.exit_code, "seed each" in result.output) == (0, False)
    how = dict(seeds=[0, 1], protocol=SHORT, options={"channels": [2]})
    found = train_run(describe_zoo(zoo), load_parts(zoo), "transformer_nfn", old, **how)
    assert found.zoo["seeds"] == "each"
    assert RunRecord.read(old) == RunRecord.read(run)
