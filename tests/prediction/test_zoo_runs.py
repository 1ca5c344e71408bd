"""From a real zoo to runs and predictions: small, but every part is the one users run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from made_networks import experiment
from safetensors.torch import save_file

from tnfn_command import printed
from transformer_nfn.prediction.data import describe_zoo, load_parts
from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.zoo.module import to_state_dict


@pytest.fixture(scope="module")
def run(digits_zoo, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "nfn"
    train_run(
        describe_zoo(digits_zoo),
        load_parts(digits_zoo),
        experiment("transformer_nfn", (0, 1), options={"channels": [2]}),
        out,
    )
    return out


def test_predictions_for_rows_state_dicts_and_files(digits_zoo, run, tmp_path):
    row = int(digits_zoo.select(percent=75)[3])
    named = {name: w[0] for name, w in digits_zoo.weights([row]).items()}
    torch.save(to_state_dict(digits_zoo.sizes, named), tmp_path / "net.pt")
    save_file(to_state_dict(digits_zoo.sizes, named), tmp_path / "net.safetensors")
    save_file(named, tmp_path / "ours.safetensors")
    files = [str(tmp_path / f) for f in ("net.pt", "net.safetensors", "ours.safetensors")]
    found = predict(run, [f"{digits_zoo.path}#{row}", *files])
    assert len({round(p.value, 6) for p in found}) == 1
    assert all(p.low <= p.value <= p.high for p in found)
    save_file({name: 30 * w for name, w in named.items()}, tmp_path / "odd.safetensors")
    (odd,) = predict(run, [str(tmp_path / "odd.safetensors")])
    assert odd.novelty > 1
    assert "unlike any network" in odd.note
    assert (odd.low, odd.high, odd.warning) == (0, 1, None)


def test_seen_networks_raise_no_alarm(digits_zoo, run):
    rows = digits_zoo.select(percent=75)
    found = predict(run, [f"{digits_zoo.path}#{row}" for row in rows])
    assert sum(p.warning is not None for p in found) <= 0.1 * len(rows)


def test_evaluate_on_a_zoo(digits_zoo, run):
    found = evaluate(run, digits_zoo.path)
    assert found["networks"] == len(digits_zoo.select(percent=75))
    assert -1 <= found["tau"] <= 1


def test_folders_that_hold_no_run_are_explained(digits_zoo, run, tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        predict(tmp_path, [f"{digits_zoo.path}#0"])
    data = json.loads((run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**data, "format": 99}))
    with pytest.raises(RunError, match="'format' expected 1, which this version reads, found 99"):
        RunRecord.read(tmp_path)


@pytest.mark.nightly
def test_a_training_killed_with_signal_9_ends_the_same(digits_zoo, tmp_path):
    words = ["train", str(digits_zoo.path), "--model", "transformer_nfn", "--channels", "2"]
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


def test_a_record_says_whose_seeds_the_networks_have(digits_zoo, run):
    record = RunRecord.read(run)
    assert describe_zoo(digits_zoo)["seeds"] == "each"
    assert record.zoo["seeds"] == "each"
    assert evaluate(run, digits_zoo.path)["zoo_seeds"] == "each"
    assert "a seed each" in printed("evaluate", run, digits_zoo.path)
    shown = " ".join(printed("evaluate", run).split())
    assert "a seed each" in shown
    assert f"together {record.summary['tau_together']:.3f}" in shown
