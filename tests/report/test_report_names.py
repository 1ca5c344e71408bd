"""What a reader can type again: names of predictors, rows of zoos, the command, the date."""

import re
from datetime import UTC, datetime
from html import unescape

import pytest
from run_folders import write_run
from runs_on_zoo import make_own_zoo, write_mixed, write_run_on

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.io.assets import asset_folder
from transformer_nfn.prediction.runs import RunError, read_predictions
from transformer_nfn.report import write_report
from transformer_nfn.zoo import Zoo


def numbers(path):
    """Every marked number of a page by its key, as text."""
    found = re.findall(r'<span data-n="([^"]*)">((?:<(?!/?span)[^>]*>|[^<])*)', path.read_text())
    return {key: unescape(re.sub("<[^>]*>", "", text)) for key, text in found}


@pytest.fixture(scope="module")
def sample():
    return Zoo.open("mnist-sample")


def test_predictors_are_taken_by_name(tmp_path):
    out = tmp_path / "report.html"
    printed("report", "mnist-nfn", "mnist-boosting", "--out", str(out))
    text = out.read_text()
    assert "Transformer-NFN" in text
    assert "Boosting on invariants" in text
    assert numbers(out)["models"] == "2 models"


@pytest.mark.parametrize(
    ("name", "words"),
    [("mnist-sample", "'mnist-sample' is a zoo, expected a predictor"),
     ("mnist-nothing", "there is no folder 'mnist-nothing' and no predictor of that name")],
)  # fmt: skip
def test_other_names_are_refused(tmp_path, name, words):
    out = tmp_path / "report.html"
    assert_refused(words, "report", name, "--out", str(out))
    assert not out.exists()


def test_predict_takes_a_row_as_the_report_names_it(tmp_path, sample):
    write_run_on(sample, tmp_path / "runs" / "a")
    out = tmp_path / "report.html"
    write_report([tmp_path / "runs"], out)
    found = numbers(out)
    printed("predict", "mnist-nfn", found["z0.m0.w0.id"], "--json")
    row = int(found["z0.m0.w0.id"].rpartition("#")[2])
    assert found["z0.m0.w0.id"] == f"mnist-sample#{row}"
    assert found["z0.m0.w0.true"] == f"{100 * sample.table['test_accuracy'][row]:.1f} %"
    assert found["z0.m0.w0.run"] == str(sample.table["run"][row])


def test_a_given_zoo_shows_all_networks_and_names_rows_by_its_path(tmp_path, sample):
    write_run_on(sample, tmp_path / "runs" / "a")
    out = tmp_path / "report.html"
    write_report([tmp_path / "runs"], out)
    assert numbers(out)["z0.histogram"] == "48"
    path = str(asset_folder("mnist-sample", "zoo"))
    write_report([tmp_path / "runs"], out, zoos=[path])
    assert numbers(out)["z0.histogram"] == str(len(sample))
    assert numbers(out)["z0.m0.w0.id"].startswith(f"{path}#")


def test_rows_of_a_zoo_packed_again_are_found_or_not_named(tmp_path, sample):
    write_run_on(sample, tmp_path / "runs" / "a")
    write_run_on(sample, tmp_path / "runs" / "b", model="mlp", shift=7)
    out = tmp_path / "report.html"
    write_report([tmp_path / "runs"], out)
    assert re.fullmatch(r"run \d{5}", numbers(out)["z0.m0.w0.id"])
    assert numbers(out)["z0.histogram"] == "48", "each network once"
    write_report([tmp_path / "runs"], out, zoos=["mnist-sample"])
    for model in ("m0", "m1"):
        name, run = (numbers(out)[f"z0.{model}.w0.{key}"] for key in ("id", "run"))
        assert sample.table["run"][int(name.rpartition("#")[2])] == run


def test_another_zoo_is_refused(tmp_path, sample):
    write_run_on(sample, tmp_path / "runs" / "a")
    with pytest.raises(RunError, match="'ag-news-sample' is not the zoo of these runs"):
        write_report([tmp_path / "runs"], tmp_path / "report.html", zoos=["ag-news-sample"])
    assert not (tmp_path / "report.html").exists()


def test_own_networks_are_reported_on_by_a_target_named_as_an_accuracy(own, tmp_path):
    out = tmp_path / "report.html"
    printed("report", str(own.runs), str(own.others), "--zoo", str(own.zoo.path), "--out", str(out))
    found, text = numbers(out), unescape(re.sub("<[^>]*>", "", out.read_text()))
    accuracy = own.zoo.targets["valAcc"]
    assert found["z0.histogram"] == str(len(own.zoo))
    for model in ("m0", "m1"):
        row = int(found[f"z0.{model}.w0.id"].removeprefix(f"{own.zoo.path}#"))
        assert found[f"z0.{model}.w0.true"] == f"{100 * accuracy[row]:.1f} %"
        assert found[f"z0.{model}.w0.optimizer"] == own.zoo.targets["optimizer"][row]
        assert f"z0.{model}.w0.learning_rate" not in found, "what no network has is no column"
    for name in ("loss", "top1_accuracy", "optimizer"):
        assert f"{own.others / name} ({name.replace('_', ' ')})" in text, "left out, and said so"
    assert f"{len(own.zoo)} llama" in text
    assert found["z0.facts.size"] == str(len(own.zoo)), "each checkpoint is a network"
    said = re.sub("<[^>]*>", "", re.sub("(?s)<figure.*?</figure>|<script.*", "", out.read_text()))
    for words in ("75 %", "small transformers", "seeds unknown", "null"):
        assert words not in said


def test_equally_accurate_checkpoints_of_a_run_are_two_networks(own, tmp_path):
    out = tmp_path / "report.html"
    write_report([own.runs], out)
    rows = set(read_predictions(own.runs / "random_forest")["row"].tolist())
    assert len({*own.zoo.targets["valAcc"]}) < len(own.zoo)
    assert numbers(out)["z0.histogram"] == str(len(rows))


def test_tables_of_own_networks_name_run_0_and_no_seeds(own):
    run = own.runs / "random_forest"
    text = printed("predict", run, f"{own.zoo.path}#0")
    assert re.search(r"zoo#0 +│ 0 +│", text), text
    for words in (("evaluate", run), ("evaluate", run, own.zoo.path)):
        assert "seeds" not in printed(*words)


def test_a_report_needs_a_run_on_an_accuracy(own, tmp_path):
    words = "the runs predict 'loss', 'optimizer', 'top1_accuracy': reports are about accuracies"
    assert_refused(words, "report", own.others, "--out", tmp_path / "report.html")


def test_a_zoo_of_other_checkpoints_is_refused(own, tmp_path):
    other = make_own_zoo(tmp_path, 2, seed=1).path
    out = ("--out", tmp_path / "report.html")
    for zoo in (other, "mnist-sample"):
        words = f"'{zoo}' is not the zoo of these runs"
        assert_refused(words, "report", own.runs, "--zoo", zoo, *out)
    write_run_on(Zoo.open("mnist-sample"), tmp_path / "built")
    words = f"'{own.zoo.path}' is not the zoo of these runs"
    assert_refused(words, "report", tmp_path / "built", "--zoo", own.zoo.path, *out)


def test_networks_of_a_mixed_zoo_are_named_with_their_size(tmp_path, sample):
    mixed, out = write_mixed(tmp_path), tmp_path / "report.html"
    write_report([tmp_path / "runs"], out)
    assert numbers(out)["z0.m0.w0.id"].startswith("mixed/w32-h2-d2#")
    write_report([tmp_path / "runs"], out, zoos=[mixed])
    assert numbers(out)["z0.histogram"] == str(len(sample))
    name = numbers(out)["z0.m0.w0.id"]
    (found,) = as_json("predict", "mnist-nfn", name)
    assert numbers(out)["z0.m0.w0.true"] == f"{100 * found['recorded']['test_accuracy']:.1f} %"


def test_date_and_command_stand_on_the_page(tmp_path):
    write_run(tmp_path / "my runs", networks=60, seeds=1)
    out = tmp_path / "report.html"
    before = datetime.now(UTC).replace(second=0, microsecond=0)
    printed("report", str(tmp_path / "my runs"), "--out", str(out))
    text = out.read_text()
    written = re.search(r'<time datetime="([^"]*)">', text)[1]
    assert before <= datetime.strptime(written, "%Y-%m-%dT%H:%M%z") <= datetime.now(UTC)
    assert f"tnfn report '{tmp_path}/my runs' --out {out}" in unescape(text)
