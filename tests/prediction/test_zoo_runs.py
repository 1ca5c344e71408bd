"""From a real zoo to runs and predictions: small, but every part is the one users run."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from made_networks import assert_fields_are_checked, experiment
from safetensors.torch import save_file

from tnfn_command import assert_refused, printed, tnfn
from transformer_nfn.prediction.data import describe_zoo, load_parts
from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.metrics import worth_in_examples
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


def test_every_field_of_the_record_of_a_neural_run_is_checked(run, tmp_path):
    assert_fields_are_checked(run, tmp_path / "run")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seeds", []),
        ("target", {}),
        ("summary", {}),
        ("status", "not enough networks"),
        ("model", "no_such_model"),
        ("zoo.seeds", "many"),
        ("zoo.architecture.heads", 3),
        ("selection.train", 0),
        ("seeds[0].seed", 1),
        ("seeds[0].seed", 7),
        ("summary.radius", 1.5),
        ("summary.level", -0.1),
        ("summary.shift.usual", 1e9),
        ("summary.tau_se", math.nan),
        ("summary.mae", math.inf),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(run, tmp_path, field, value):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    record = inner = json.loads(path.read_text())
    *outer, last = field.replace("[0]", ".0").split(".")
    for key in outer:
        inner = inner[int(key) if key == "0" else key]
    inner[last] = value
    path.write_text(json.dumps(record))
    done = tnfn("predict", tmp_path / "run", "mnist-sample#0")
    assert done.returncode == 2
    assert str(path) in done.stderr
    expected = "number in JSON" if value in (math.inf,) or value != value else field.split(".")[-1]
    expected = "seeds" if field.startswith("seeds") else expected
    assert expected in done.stderr


def test_a_damaged_file_of_a_run_is_refused_by_name(digits_zoo, run, tmp_path):
    """Whatever opens the run: one bit of any file, a file too few, a file of another run."""
    shutil.copytree(run, copy := tmp_path / "run")
    (copy / "notes.txt").write_text("a user's own file is none of the run's")
    files = [*RunRecord.read(copy).files]
    assert len(files) == 8
    commands = (
        ("predict", copy, f"{digits_zoo.path}#0"),
        ("evaluate", copy),
        ("evaluate", copy, digits_zoo.path),
        ("report", copy, "--out", tmp_path / "page.html"),
        ("train", digits_zoo.path, "--model", "transformer_nfn", "--out", copy,
         "--option", "channels=[2]"),
        ("reproduce", "transfer", copy, "--to", "mnist-sample", "--out", tmp_path / "out"),
    )
    for i, name in enumerate(files):
        data = (copy / name).read_bytes()
        bad = bytearray(data)
        bad[len(bad) // 2] ^= 64
        for contents in (bytes(bad), None):
            if contents is None:
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(contents)
            wrong = "missing" if contents is None else "damaged"
            assert_refused(f"'{copy / name}' is {wrong}", *commands[i % len(commands)])
        (copy / name).write_bytes(data)
    for words in commands:
        (copy / files[0]).write_bytes(b"{}")
        assert_refused(f"'{copy / files[0]}' is damaged", *words)
    shutil.copy(run / files[0], copy / files[0])
    for name in ("guard.safetensors", "own_guard.safetensors"):
        shutil.copy(run / "trained_on.safetensors", copy / name)
        assert_refused(f"'{copy / name}' is of another run", *commands[0])
        (copy / name).unlink()
    assert RunRecord.read(copy) == RunRecord.read(run)


def test_records_have_null_where_there_is_no_number(digits_zoo, tmp_path):
    """Not even that of a single seed, which has no standard error."""
    words = ("--model", "statistics_linear", "--seeds", 1, "--out", tmp_path / "run")
    printed("train", digits_zoo.path, *words)
    text = (tmp_path / "run" / "run.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["summary"]["tau_se"] is None
    assert "nan" not in printed("evaluate", tmp_path / "run").lower()


def test_folders_that_hold_no_run_are_explained(digits_zoo, run, tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        predict(tmp_path, [f"{digits_zoo.path}#0"])
    data = json.loads((run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**data, "format": 99}))
    with pytest.raises(RunError, match="'format' expected 1, which this version reads, found 99"):
        RunRecord.read(tmp_path)


@pytest.mark.nightly
def test_a_training_killed_with_signal_9_ends_the_same(digits_zoo, tmp_path):
    words = ["train", str(digits_zoo.path), "--model", "transformer_nfn"]
    words += ["--option", "channels=[2]"]
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
    figures = evaluate(run, digits_zoo.path)
    worth, low, high = figures["examples"]
    assert low <= worth <= high
    accuracy = digits_zoo.table["test_accuracy"][digits_zoo.select(percent=75)]
    assert worth_in_examples(accuracy.astype(float), [figures["tau"]]) == [worth]
    shown = " ".join(printed("evaluate", run).split())
    assert "a seed each" in shown
    assert f"together {record.summary['tau_together']:.3f}" in shown
