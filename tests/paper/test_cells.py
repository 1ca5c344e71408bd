"""From a real zoo to the paper's tables: small, but every part is the one users run."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import own_models
import pyarrow.parquet as pq
import pytest
import torch
from made_networks import parts

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.paper.cells import augmented, fill_cell
from transformer_nfn.paper.numbers import mean_text
from transformer_nfn.paper.rows import result_rows
from transformer_nfn.paper.table_text import markdown_table
from transformer_nfn.paper.tables import reproduce, table_cells
from transformer_nfn.prediction.data import load_parts
from transformer_nfn.prediction.metrics import standard_error
from transformer_nfn.prediction.runs import RunError, RunRecord, find_runs, read_predictions

SHORT = 3
MODELS = ["mlp", "lightgbm"]

# In a process of its own: Ray's warnings and threads are not this test's to judge.
_DRIVER = """
import json, sys
from pathlib import Path
import torch
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.paper.tables import reproduce

import ray
torch.set_num_threads(1)
zoo, out, models = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
how = dict(epochs=2, models=models, how={"engine": "ray"})
told = []
reproduce("table1", zoo, out, seeds=[0, 1], told=lambda c, line: told.append(c.folder), **how)
try:
    reproduce("table1", zoo, out, seeds=[2], **how)
except TransformerNFNError as error:
    print(json.dumps({"told": told, "error": str(error)}))
"""


def test_tables_have_the_papers_cells():
    assert len(table_cells("table1", "mnist")) == 9 * 5
    assert [c.row for c in table_cells("table3", "ag_news")] == [
        "encoder",
        "classifier",
        "encoder+classifier",
    ]
    assert len(table_cells("table3", "mnist")) == 7
    assert [c.options["channels"] for c in table_cells("table5", "ag_news")][-1] == [15, 15]
    bounds = [c.bound for c in table_cells("table7", "mnist", ["mlp"])]
    assert bounds == [None, 0.0, 1.0, 10.0, 100.0]
    with pytest.raises(TransformerNFNError, match="there is no 'table9'"):
        table_cells("table9", "mnist")


def test_a_table_is_filled_written_and_cached(digits_zoo, tmp_path):
    records = reproduce(
        "table1", digits_zoo.path, tmp_path, seeds=[0, 1], epochs=SHORT, models=MODELS
    )
    assert len(records) == 10
    done = [r for r in records if r.status == "done"]
    empty = [r for r in records if r.status != "done"]
    assert done
    assert all(r.status.startswith("not enough networks") for r in empty)
    assert empty, "few digits networks reach 80 % in four epochs"
    text = (tmp_path / "table1.md").read_text()
    assert "0.866" in text, "the paper's own numbers stand beside ours"
    assert "not enough networks" in text
    stamp = {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/predictions.parquet")}
    again = reproduce(
        "table1", digits_zoo.path, tmp_path, seeds=[0, 1], epochs=SHORT, models=MODELS
    )
    assert [r.summary for r in again] == [r.summary for r in records]
    assert stamp == {p: p.stat().st_mtime_ns for p in tmp_path.glob("cells/*/predictions.parquet")}
    assert len(list(find_runs([tmp_path]))) == 10


def test_parameters_and_augmentation_tables(digits_zoo, tmp_path):
    counts = {
        r.model: r.num_parameters for r in reproduce("table6", digits_zoo.path, tmp_path, seeds=[0])
    }
    assert set(counts) == {"transformer_nfn", "mlp", "statnn"}
    assert all(n > 10_000 for n in counts.values())
    _, twice, _, moved, _ = table_cells("table7", "digits", ["transformer_nfn"])
    short = [replace(cell, seeds=(0,), epochs=SHORT) for cell in (twice, moved)]
    records = [fill_cell(digits_zoo.path, cell, tmp_path) for cell in short]
    assert [r.selection["augment"] for r in records] == [0.0, 10.0]
    for record in records:
        assert record.selection["train"] == 2 * load_parts(digits_zoo).counts["train"]
    # As many steps on the same functions: the network cannot tell the two apart.
    assert records[0].summary["tau"] == pytest.approx(records[1].summary["tau"], abs=0.05)


@pytest.mark.nightly
def test_predictions_for_gU_and_U_are_compared(digits_zoo, tmp_path):
    columns = ("[-1,1]", "[-100,100]")
    models = ["transformer_nfn", "mlp", "invariant_boosting"]
    cells = table_cells("table7", "digits", [*models, "statnn"])
    short = [replace(cell, seeds=(0,), epochs=2) for cell in cells]
    for cell in (c for c in short if c.column in columns and c.model in models):
        found = fill_cell(digits_zoo.path, cell, tmp_path).summary["agreement"]
        assert found["networks"] == load_parts(digits_zoo).counts["test"]
        assert found["max_condition"] == 1e4
        if cell.model == "transformer_nfn":
            assert found["float32"] <= 1e-4
            assert found["float64"] <= 1e-9
        elif cell.model == "mlp":
            assert found["float32"] > 1e-3
            assert found["float64"] > 1e-3
        else:
            assert found["float64"] is None, "trees have one precision"
    records = [RunRecord.read(run) for run in find_runs([tmp_path])]
    text = markdown_table("table7", result_rows(records))
    assert "Transformer-NFN, predictions for gU and U: float32 max" in text
    plain = next(cell for cell in short if cell.model == "statnn")
    assert "agreement" not in fill_cell(digits_zoo.path, plain, tmp_path).summary


def test_augmentation_keeps_the_originals_and_the_function():
    data = parts()
    twice = augmented(data, 10.0)
    assert twice.counts == {"train": 80, "val": 32, "test": 32}
    assert torch.equal(twice.train.accuracy[:40], twice.train.accuracy[40:])
    first = twice.train.network.views["blocks.1.W_Q"]
    assert torch.equal(first[:40], data.train.network.views["blocks.1.W_Q"])
    assert not torch.allclose(first[40:], first[:40], atol=0.1)


@pytest.mark.nightly
def test_splits_share_a_cell_and_cells_are_filled_side_by_side(tmp_path):
    own = f"{own_models.__file__}:FitsItself"  # imported by every worker
    words = ("reproduce", "learning-curve", "mnist-sample", "--models", own,
             "--sizes", "100,112", "--seeds", 1, "--splits", 2, "--split-seed", 3)  # fmt: skip
    alone = as_json(*words, "--out", tmp_path / "alone")
    together = as_json(*words, "--out", tmp_path / "together", "--jobs", 2)
    taus = [record["summary"]["tau"] for record in alone]
    assert [record["summary"]["tau"] for record in together] == taus
    assert [record["selection"]["split_seed"] for record in alone] == [3, 3, 4, 4]
    text = (tmp_path / "together" / "learning-curve.md").read_text()
    for pair in (taus[::2], taus[1::2]):
        assert mean_text(sum(pair) / 2, standard_error(pair)) in text
    rows = pq.read_table(tmp_path / "together" / "learning-curve.parquet").to_pylist()
    assert [(row["split_seed"], row["max_train"]) for row in rows] == [
        (3, 100), (3, 112), (4, 100), (4, 112)
    ]  # fmt: skip


def test_targets_are_read_from_weights(tmp_path):
    words = ("reproduce", "targets", "ag-news-sample", "--models", "statistics_linear")
    assert_refused(
        "targets are learned from one number of networks, not 2",
        *words, "--sizes", "40,50", "--out", tmp_path / "no",
    )  # fmt: skip
    records = as_json(*words, "--sizes", "40", "--seeds", 1, "--out", tmp_path)
    found = {record["table"]["row"]: record["summary"] for record in records}
    assert {"optimizer", "learning_rate", "test_accuracy"} <= {*found}
    assert not {"run", "seed", "best", "percent"} & {*found}
    assert 0 <= found["optimizer"]["auroc"] <= 1
    text = (tmp_path / "targets.md").read_text()
    assert f"| optimizer | AUROC {found['optimizer']['auroc']:.3f} |" in text
    assert f"| test_accuracy | {found['test_accuracy']['tau']:.3f} |" in text
    assert "| Target | Linear on statistics |" in text


def test_no_cell_is_begun_after_the_time(tmp_path):
    words = ("reproduce", "learning-curve", "mnist-sample", "--models", "statistics_linear",
             "--sizes", "100", "--seeds", 1, "--out", tmp_path)  # fmt: skip
    assert "1 cells are left" in printed(*words, "--minutes", 0)
    assert not list(tmp_path.glob("cells/*"))
    assert "left" not in printed(*words)
    assert "left" not in printed(*words, "--minutes", 0), "what is there is read"


def test_checkpoints_are_chosen_and_split(digits_zoo, tmp_path):
    words = ("learning-curve", digits_zoo.path, "--models", "statistics_linear", "--seeds", 1)
    every = as_json("reproduce", *words, "--percent", "all", "--out", tmp_path / "all")
    by_run, by_checkpoint = (
        as_json("train", digits_zoo.path, "--model", "statistics_linear", "--seeds", 1,
                "--percent", "all", "--split", split, "--out", tmp_path / split)
        for split in ("run", "checkpoint")
    )  # fmt: skip
    assert every[-1]["selection"]["percent"] is None
    assert every[-1]["summary"]["tau"] == by_run["summary"]["tau"]
    assert (by_checkpoint["selection"]["split"], "split" in by_run["selection"]) == (
        "checkpoint", False,
    )  # fmt: skip
    found = read_predictions(tmp_path / "checkpoint")
    held_out, rows = {*found["run"].tolist()}, {*found["row"].tolist()}
    train = set(range(len(digits_zoo))) - rows
    assert held_out & {*digits_zoo.runs[[*train]].tolist()}, "a run is on both sides"
    sample = ("train", "mnist-sample", "--out", tmp_path / "no")
    assert_refused("split by checkpoint needs several", *sample, "--split", "checkpoint")
    assert_refused("a split is by run or checkpoint", *sample, "--split", "epoch")
    assert_refused("no checkpoints at 60 %, only at [75]", *sample, "--percent", "60")
    assert_refused("a whole number or all, found '7.5'", *sample, "--percent", "7.5")
    assert not (tmp_path / "no").exists()


@pytest.mark.nightly
def test_ray_fills_the_same_table(digits_zoo, tmp_path):
    reproduce("table1", digits_zoo.path, tmp_path / "local", seeds=[0, 1], epochs=2, models=MODELS)
    quiet = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "disabled"}
    driver = subprocess.run(
        [
            sys.executable,
            "-c",
            _DRIVER,
            str(digits_zoo.path),
            str(tmp_path / "ray"),
            json.dumps(MODELS),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | quiet,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert driver.returncode == 0, driver.stderr
    tables = [pq.read_table(tmp_path / engine / "table1.parquet") for engine in ("local", "ray")]
    assert tables[0].drop(["seconds"]).equals(tables[1].drop(["seconds"]))
    assert tables[0]["tau"].drop_null().length() >= 2, "some cells have enough networks"
    texts = [(tmp_path / engine / "table1.md").read_text() for engine in ("local", "ray")]
    assert texts[0] == texts[1]
    said = json.loads(driver.stdout.splitlines()[-1])
    assert len(said["told"]) == 10, "every cell is reported once"
    assert "holds another run" in said["error"]
    assert "\n" not in said["error"], "one sentence, without the worker's traceback"


@pytest.mark.usefixtures("no_ray_cluster")
def test_no_cluster_is_one_clear_error(digits_zoo, tmp_path, monkeypatch):
    def fill(**options):
        how = {"engine": "ray", **options}
        reproduce("table6", digits_zoo.path, tmp_path, seeds=[0], how=how)

    with pytest.raises(RunError, match=r"no Ray cluster at 10\.0\.0\.1:1"):
        fill(address="10.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match=r"pip install 'transformer-nfn\[ray\]'"):
        fill()
