"""τ over 64, 128, … and all networks: its cells, the command on a real zoo, what is refused."""

import hashlib

import pyarrow.parquet as pq
import pytest

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn import __version__
from transformer_nfn.io.assets import asset_folder
from transformer_nfn.paper.numbers import mean_text
from transformer_nfn.paper.tables import reproduce, table_cells
from transformer_nfn.prediction.metrics import standard_error
from transformer_nfn.prediction.runs import RunRecord, read_predictions

MODELS = ["statnn", "invariant_mlp"]
SHORT = 2


def file_sha(zoo):
    digest = hashlib.sha256((zoo / "index.parquet").read_bytes()).hexdigest()
    return hashlib.sha256(digest.encode()).hexdigest()


@pytest.fixture(scope="module")
def zoo():
    """160 networks, of which 112 are to train on."""
    return asset_folder("mnist-sample", "zoo")


@pytest.fixture(scope="module")
def curve(zoo, tmp_path_factory):
    """The folder that the command wrote, and what it printed."""
    out = tmp_path_factory.mktemp("curve") / "results"
    words = ["reproduce", "learning-curve", str(zoo), "--out", str(out)]
    words += ["--models", ",".join(MODELS), "--seeds", "2", "--epochs", "2", "--device", "cpu"]
    return out, printed(*words), words


def test_numbers_double_from_64_and_end_with_all_for_every_model():
    cells = table_cells("learning-curve", "mnist", train=716)
    sizes = {cell.column: cell.selection.max_train for cell in cells}
    assert sizes == {"64": 64, "128": 128, "256": 256, "512": 512, "all": None}
    assert list(sizes) == ["64", "128", "256", "512", "all"]
    for column in sizes:
        models = {cell.model for cell in cells if cell.column == column}
        assert models == {
            "transformer_nfn", "mlp", "statnn", "xgboost", "lightgbm", "random_forest",
            "invariant_boosting", "invariant_mlp", "whole_network",
        }  # fmt: skip
    assert len({cell.folder for cell in cells}) == len(cells) == 45
    for train, columns in ((64, ["all"]), (65, ["64", "all"]), (128, ["64", "all"])):
        few = table_cells("learning-curve", "mnist", ["mlp"], train=train)
        assert [cell.column for cell in few] == columns
    chosen = table_cells("learning-curve", "mnist", ["mlp"], train=112, sizes=[100, 64])
    assert {cell.column: cell.selection.max_train for cell in chosen} == {"64": 64, "100": 100}


def test_the_command_writes_table_and_figure(curve, zoo):
    out, printed, _ = curve
    for ending in ("md", "parquet", "svg"):
        assert f"{out}/learning-curve.{ending}" in printed
    assert (out / "learning-curve.svg").read_text().count('class="dot m') == 4
    rows = pq.read_table(out / "learning-curve.parquet").to_pylist()
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["row"], row["column"]), []).append(row["tau"])
    assert set(found) == {(model, column) for model in MODELS for column in ("64", "all")}
    assert [row["train"] for row in rows] == [64] * 4 + [112] * 4
    assert [row["seed"] for row in rows] == [0, 1] * 4
    about = {(row["zoo_sha256"], row["device"], row["version"], row["split_seed"]) for row in rows}
    assert about == {(file_sha(zoo), "cpu", __version__, None)}
    assert {row["updates"] for row in rows} == {None, 2 * 64 // 16, 2 * 112 // 16}
    text = (out / "learning-curve.md").read_text()
    assert "| Model | 64 | All 112 |" in text
    line = next(line for line in text.splitlines() if line.startswith("| StatNN |"))
    for column in ("64", "all"):
        taus = found["statnn", column]
        assert mean_text(sum(taus) / 2, standard_error(taus)) in line


def test_every_number_is_measured_on_the_same_networks(curve):
    out, _, _ = curve
    few, every = (
        read_predictions(out / "cells" / f"learning-curve-statnn-{column}")
        for column in ("64", "all")
    )
    assert few["row"].tolist() == every["row"].tolist()
    assert few["predicted"].tolist() != every["predicted"].tolist()
    record = RunRecord.read(out / "cells" / "learning-curve-statnn-64")
    assert record.selection["max_train"] == 64


def test_json_has_a_record_for_each_cell_and_nothing_is_trained_twice(curve):
    out, _, words = curve
    before = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/*")}
    records = as_json(*words)
    assert [record["selection"]["train"] for record in records] == [64, 64, 112, 112]
    assert {path: path.stat().st_mtime_ns for path in out.glob("cells/*/*")} == before


def test_an_interrupted_curve_goes_on(zoo, tmp_path):
    def stop(cell, line):
        if "result" in line:
            raise KeyboardInterrupt

    how = dict(seeds=[0], epochs=SHORT, models=["statnn"])
    with pytest.raises(KeyboardInterrupt):
        reproduce("learning-curve", zoo, tmp_path, told=stop, **how)
    first = tmp_path / "cells" / "learning-curve-statnn-64" / "run.json"
    assert not (tmp_path / "learning-curve.md").exists()
    stamp = first.stat().st_mtime_ns
    records = reproduce("learning-curve", zoo, tmp_path, **how)
    assert [record.selection["train"] for record in records] == [64, 112]
    assert first.stat().st_mtime_ns == stamp
    assert (tmp_path / "learning-curve.md").is_file()


def test_sizes_that_cannot_be_are_refused(tmp_path):
    out = tmp_path / "results"
    for message, *words in (
        ("at least 64 networks to train on, the training part of the zoo has 56",
         "learning-curve", "ag-news-sample"),
        ("and at most the 112 networks", "learning-curve", "mnist-sample", "--sizes", "63"),
        ("and at most the 112 networks", "learning-curve", "mnist-sample", "--sizes", "113"),
        ("whole numbers separated by commas, found 'many'",
         "learning-curve", "mnist-sample", "--sizes", "64,many"),
        ("learning-curve, targets, table1 has none", "table1", "mnist-sample", "--sizes", 64),
    ):  # fmt: skip
        assert_refused(message, "reproduce", *words, "--out", out)
    assert not out.exists()
