"""A mixed zoo through the commands: train, evaluate, predict, and the table of its kinds."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tnfn_command import tnfn
from transformer_nfn.cli.app import app
from transformer_nfn.prediction.dataset import FRACTIONS
from transformer_nfn.prediction.evaluation import evaluate
from transformer_nfn.prediction.known_sizes import UNKNOWN
from transformer_nfn.prediction.novelty import SEEN_FILE, Seen
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.records import RunError, RunRecord
from transformer_nfn.zoo import BuildOptions, SizeGroup, build_mixed

SMALL, WIDE, DEEP = "w16-h4-d1", "w20-h2-d1", "w16-h4-d2"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    settings = BuildOptions("digits", runs=75, epochs=4, batch=32, samples=128, workers=1)
    kinds = [SizeGroup.from_name(name) for name in (SMALL, WIDE, DEEP)]
    return build_mixed(tmp_path_factory.mktemp("kinds") / "m", settings, kinds)


@pytest.fixture(scope="module")
def run(mixed, tmp_path_factory):
    """Trained on two kinds; the deep one is left out."""
    out = tmp_path_factory.mktemp("run") / "run"
    words = ["train", str(mixed.path), "--out", str(out), "--leave-out", DEEP, "--seeds", "1"]
    done = CliRunner().invoke(app, [*words, "--epochs", "2", "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    return out, json.loads(done.stdout)


def test_the_command_tells_every_kind_and_the_one_left_out(mixed, run):
    out, record = run
    assert list(record["summary"]["kinds"]) == [SMALL, WIDE]
    assert list(record["summary"]["left_out"]) == [DEEP]
    assert set(record["summary"]["widening"]) == {"kind", "d_model", "d_ff", "heads"}
    tested = sum(found["networks"] for found in record["summary"]["kinds"].values())
    assert record["selection"]["test"] == tested
    assert record["summary"]["left_out"][DEEP]["networks"] == len(mixed[DEEP].select(percent=75))
    shown = CliRunner().invoke(app, ["evaluate", str(out)])
    assert f"{DEEP}, left out" in shown.output


def test_a_kind_left_out_is_predicted_with_a_warning_and_a_wider_interval(mixed, run):
    out, record = run
    seen, unseen = predict(out, [f"{mixed.path}/{SMALL}#0", f"{mixed.path}/{DEEP}#0"])
    radius = record["summary"]["radius"]
    assert "never seen in training" not in (seen.warning or "")
    assert "networks of 2 blocks were never seen in training" in unseen.warning
    # Depth was the same in all kinds it learned from, so nothing was measured.
    assert "was not measured" in unseen.warning
    for found, reach in ((seen, radius), (unseen, min(1.0, UNKNOWN * radius))):
        assert found.low == pytest.approx(max(0.0, found.accuracy - reach))
        assert found.high == pytest.approx(min(1.0, found.accuracy + reach))


def test_evaluate_takes_a_mixed_zoo_and_counts_what_was_seen(mixed, run):
    out, record = run
    found = evaluate(out, mixed.path)
    assert list(found["kinds"]) == [SMALL, WIDE, DEEP]
    assert found["trained_on"] == record["selection"]["train"]
    assert found["kinds"][DEEP]["trained_on"] == 0 == found["kinds"][DEEP]["selected_by"]
    left_out = record["summary"]["left_out"][DEEP]
    assert found["kinds"][DEEP]["tau"] == pytest.approx(left_out["tau"])
    assert found["kinds"][DEEP]["coverage"] == pytest.approx(left_out["coverage"])
    assert f"1 of 3 kinds of networks were never seen in training ({DEEP})" in found["warning"]
    assert found["networks"] == sum(kind["networks"] for kind in found["kinds"].values())
    one = evaluate(out, mixed.path / DEEP)
    assert one["tau"] == found["kinds"][DEEP]["tau"]
    assert "networks of 2 blocks" in one["warning"]
    done = CliRunner().invoke(app, ["evaluate", str(out), str(mixed.path)])
    assert done.exit_code == 0, done.output
    assert f"{WIDE}, never seen" in done.output


def test_another_task_is_still_refused(mixed, run, tmp_path):
    path = tmp_path / "net.safetensors"
    weights = {name: w[0].contiguous() for name, w in mixed[SMALL].weights([0]).items()}
    save_file(weights | {"classifier.b_2": weights["classifier.b_2"][:4].clone()}, path)
    with pytest.raises(RunError, match="of another architecture: expected 10 classes, found 4"):
        predict(run[0], str(path))
    done = tnfn("predict", run[0], "mnist-sample#0")
    assert done.returncode == 2
    assert "expected 4 pixels in a patch, found 16" in done.stderr


def test_a_run_that_kept_nothing_about_other_sizes_says_so(mixed, run, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(run[0], older)
    tensors = load_file(older / SEEN_FILE)
    save_file(tensors, older / SEEN_FILE)  # without the word that marks it
    assert not Seen.load(older).any_size
    with pytest.raises(RunError, match="trained by an older version"):
        predict(older, f"{mixed.path}/{DEEP}#0")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "mlp"], "'mlp' reads networks of one size"),
        (["--damaged", "x"], "learned from one kind, not several"),
        (["--leave-out", "w9-h3-d1"], "no networks of the kind 'w9-h3-d1'"),
        (["--leave-out", f"{SMALL},{WIDE},{DEEP}"], "no kind left to train on: 3 are left out"),
        (["--leave-out", ""], "no networks of the kind ''"),
    ],
)
def test_what_cannot_be_trained_is_refused(mixed, tmp_path, words, said):
    out = tmp_path / "run"
    done = tnfn("train", mixed.path, "--out", out, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert not out.exists()


def test_a_zoo_of_one_kind_has_none_to_leave_out(mixed, tmp_path):
    done = tnfn("train", mixed.path / SMALL, "--out", tmp_path / "r", "--leave-out", SMALL)
    assert done.returncode == 2
    assert "has networks of one kind: there is none to leave out" in done.stderr


def test_the_table_of_a_mixed_zoo(mixed, tmp_path):
    words = ["reproduce", "mixed", str(mixed.path), "--out", str(tmp_path), "--seeds", "1"]
    words += ["--epochs", "1", "--leave-out", WIDE, "--device", "cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "mixed.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert {SMALL, WIDE, DEEP, "all kinds", "within kinds"} <= set(rows)
    cells = [cell.strip() for cell in rows[WIDE].split("|")[2:-1]]
    rows_at_75 = mixed[WIDE].select(percent=75)
    assert cells[0] == str(len(mixed[WIDE].split(rows_at_75, FRACTIONS)[2]))
    assert cells[3] == str(len(rows_at_75))
    assert cells[5].endswith("%")
    assert rows[SMALL].split("|")[5].strip() == "–"
    table = pq.read_table(tmp_path / "mixed.parquet").to_pydict()
    found = dict(zip(zip(table["row"], table["column"], strict=True), table["value"], strict=True))
    record = RunRecord.read(tmp_path / "cells" / f"mixed-{WIDE}-left_out")
    assert found[WIDE, "left_out"] == record.summary["left_out"][WIDE]["tau"]
    whole = RunRecord.read(tmp_path / "cells" / "mixed-allkinds-whole_network")
    assert found["all kinds", "whole_network"] == whole.summary["tau"]
    assert found[DEEP, "whole_network"] == whole.summary["kinds"][DEEP]["tau"]
    assert found["within kinds", "whole_network"] == whole.summary["tau_within"]
    # Finished cells are read, and a report shows the table.
    again = CliRunner().invoke(app, [*words, "--json"])
    assert next(r["summary"]["tau"] for r in json.loads(again.stdout)) == whole.summary["tau"]
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert "Whole network, kind left out" in page.read_text()


def test_a_table_of_kinds_needs_a_mixed_zoo(mixed, tmp_path):
    for words, said in (
        (["mixed", str(mixed.path / SMALL)], "is not a mixed zoo"),
        (["mixed", mixed.path, "--leave-out", "w9-h3-d1"], "no networks of the kind 'w9-h3-d1'"),
        (["table1", str(mixed.path / SMALL), "--leave-out", SMALL], "--leave-out is for mixed"),
    ):
        done = tnfn("reproduce", *words, "--out", tmp_path / "out")
        assert done.returncode == 2
        assert said in done.stderr
    assert not (tmp_path / "out").exists()
