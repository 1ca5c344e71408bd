"""What a reader can type again: names of predictors, rows of zoos, the command, the date."""

import re
from datetime import UTC, datetime
from html import unescape

import pytest
from run_folders import write_run
from runs_on_zoo import write_run_on

from tnfn_command import assert_refused, printed
from transformer_nfn.io.assets import resolve
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.report import write_report
from transformer_nfn.zoo import Zoo


def numbers(path):
    """Every marked number of a page by its key, as text."""
    found = re.findall(r'<span data-n="([^"]*)">((?:<(?!/?span)[^>]*>|[^<])*)', path.read_text())
    return {key: unescape(re.sub("<[^>]*>", "", text)) for key, text in found}


@pytest.fixture(scope="module")
def sample():
    return Zoo.open(resolve("mnist-sample", "zoo"))


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
    path = str(resolve("mnist-sample", "zoo"))
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


def test_date_and_command_stand_on_the_page(tmp_path):
    write_run(tmp_path / "my runs", networks=60, seeds=1)
    out = tmp_path / "report.html"
    before = datetime.now(UTC).replace(second=0, microsecond=0)
    printed("report", str(tmp_path / "my runs"), "--out", str(out))
    text = out.read_text()
    written = re.search(r'<time datetime="([^"]*)">', text)[1]
    assert before <= datetime.strptime(written, "%Y-%m-%dT%H:%M%z") <= datetime.now(UTC)
    assert f"tnfn report '{tmp_path}/my runs' --out {out}" in unescape(text)
