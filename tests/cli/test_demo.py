"""The demo as a user runs it, made tiny: both kinds of zoo, one table, one report."""

import io
import re

import pytest
from rich.console import Console

from tnfn_command import assert_refused, printed
from transformer_nfn.cli import demo
from transformer_nfn.cli.experiment_progress import tau_by_kind_table
from transformer_nfn.paper import tables
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.zoo import Zoo

TINY = demo.Size(runs=24, zoo_epochs=1, seeds=2, epochs=1, probe_epochs=1)
EVERY_MODEL = (*tables.PAPER_MODELS, *tables.EXTRA_MODELS)
TAU = r"(−?\d\.\d{3} ± \d\.\d{3})"


def run_demo(out, models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "QUICK", TINY)
        patch.setattr(tables, "PAPER_MODELS", models)
        patch.setattr(tables, "EXTRA_MODELS", ())
        patch.setenv("COLUMNS", "100")
        if models != EVERY_MODEL:
            # One core: starting workers would take longer than training these zoos.
            patch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
        return printed("demo", "--quick", "--out", out)


def printed_taus(text):
    """For each predictor what stands in the two columns."""
    rows = re.findall(rf"│ (\w+) +│ +{TAU} │ +{TAU} │", text)
    return {model: (one, each) for model, one, each in rows}


@pytest.fixture(
    scope="module",
    params=[("statnn", "invariant_mlp"), pytest.param(EVERY_MODEL, marks=pytest.mark.nightly)],
)
def made(request, tmp_path_factory):
    """What the demo printed, its folder, and its models."""
    out = tmp_path_factory.mktemp("demo")
    return run_demo(out, request.param), out / "quick", request.param


def test_the_table_has_a_column_for_each_kind_of_zoo(made):
    text, folder, models = made
    assert re.search(r"┃ model +┃ +one seed for all ┃ +a seed each ┃", text)
    shown = printed_taus(text)
    assert set(shown) == set(models)
    for model, cells in shown.items():
        for kind, cell in zip(("one", "each"), cells, strict=True):
            record = RunRecord.read(folder / kind / "cells" / model)
            assert record.zoo["seeds"] == kind
            summary = record.summary
            tau = f"{summary['tau']:.3f}".replace("-", "−")
            assert cell == f"{tau} ± {summary['tau_se']:.3f}"
    assert "aligned from birth" in " ".join(text.split())


def test_both_zoos_hold_the_same_runs_up_to_the_checkpoint_read(made):
    _, folder, _ = made
    one, each = (Zoo.open(folder / kind / "zoo") for kind in ("one", "each"))
    assert (one.seeds, each.seeds) == ("one", "each")
    assert sorted(set(one.table["run"])) == sorted(set(each.table["run"]))
    assert {key for key in one.metadata if one.metadata[key] != each.metadata[key]} == {"seeds"}
    assert one.metadata["recipe"]["until"] == 75


def test_the_report_holds_both_zoos(made):
    _, folder, _ = made
    page = re.sub(r"</?span[^>]*>", "", (folder / "report.html").read_text())
    for kind in ("one seed for all", "a seed each"):
        assert f"<h3>Digits, 24 networks, {kind}</h3>" in page
        assert f"How well each model ranks the test networks · Digits, 24 networks, {kind}" in page


def test_run_again_it_trains_nothing_and_prints_the_same(made):
    text, folder, models = made
    files = [*folder.rglob("run.json"), *folder.rglob("*.safetensors")]
    before = {path: path.stat().st_mtime_ns for path in files}
    again = run_demo(folder.parent, models)
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert printed_taus(again) == printed_taus(text)


def test_rows_are_ordered_by_the_last_kind_and_gaps_are_shown():
    def record(model, tau, **changes):
        summary = {} if tau is None else {"tau": tau, "tau_se": 0.01}
        return RunRecord(model, {}, {}, {}, summary=summary, **changes)

    records = {
        "one": [record("a", 0.9), record("b", 0.1), record("c", 0.5)],
        "each": [record("b", 0.7), record("c", None, status="failed"), record("a", 0.2)],
    }
    text = io.StringIO()
    Console(width=100, file=text).print(tau_by_kind_table(records))
    lines = [line for line in text.getvalue().splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert rows == [
        ["b", "0.100 ± 0.010", "0.700 ± 0.010", "trees"],
        ["a", "0.900 ± 0.010", "0.200 ± 0.010", "trees"],
        ["c", "0.500 ± 0.010", "failed", "trees"],
    ]


def test_a_demo_in_a_zoo_is_refused(tmp_path):
    (tmp_path / "zoo.json").write_text("{}")
    for out in (tmp_path, tmp_path / "deep" / "er"):
        assert_refused(f"lies in the zoo '{tmp_path}'", "demo", "--quick", "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["zoo.json"]
