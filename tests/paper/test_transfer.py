"""Predictors of one task's networks rank those of another, or say why they cannot."""

import shutil

import pyarrow.parquet as pq
import pytest
from scipy.stats import kendalltau

from tnfn_command import as_json, assert_refused
from transformer_nfn.io.assets import asset_folder
from transformer_nfn.paper.rows import result_rows
from transformer_nfn.paper.table_text import markdown_table
from transformer_nfn.paper.tables import reproduce
from transformer_nfn.prediction.data import load_rows
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.predictors import load_predictors
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.zoo import Zoo

LEARNERS = ["invariant_mlp", "invariant_mlp:whole", "whole_network:invariants"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("transfer")


@pytest.fixture(scope="module")
def records(digits_zoo, out):
    return reproduce(
        "transfer", asset_folder("mnist-sample", "zoo"), out, to=[digits_zoo.path], seeds=[0, 1],
        epochs=2, models=LEARNERS,
    )  # fmt: skip


@pytest.mark.nightly
def test_networks_of_another_format_are_read_by_invariants_or_not_at_all(records, digits_zoo):
    home = {r.table["row"]: r for r in records if r.table["column"] == "home"}
    other = {r.table["row"]: r for r in records if r.table["column"] == "digits"}
    assert list(home) == list(other) == LEARNERS
    assert all(r.selection["test"] == 24 and r.summary["tau"] > 0.3 for r in home.values())
    refused = other.pop("invariant_mlp")
    assert refused.status == "cannot read them: expected 16 pixels in a patch, found 4"
    assert not refused.summary
    for r in other.values():
        assert r.selection["test"] == len(digits_zoo.select(percent=75))
        assert -1 <= r.summary["tau"] <= 1


def test_tau_is_that_of_the_predictions(records, digits_zoo, out):
    folder = out / "cells" / "transfer-invariant_mlp_whole-home"
    data = load_rows(digits_zoo, digits_zoo.select(percent=75))
    taus = [
        kendalltau(data.accuracy, predictor.predict(data.network)).statistic
        for predictor in load_predictors(folder, RunRecord.read(folder))
    ]
    place = ("invariant_mlp:whole", "digits")
    found = next(r for r in records if (r.table["row"], r.table["column"]) == place)
    assert [row["tau"] for row in found.seeds] == pytest.approx(taus)
    assert found.summary["tau"] == pytest.approx(sum(taus) / 2)


def test_the_table_is_written(records, out):
    text = (out / "transfer.md").read_text()
    assert text == markdown_table("transfer", result_rows(records))
    assert "Here: MNIST (mnist-sample), 160 networks" in text
    assert "| cannot read them |" in text
    assert "- MLP on invariants, Digits: cannot read them: expected 16 pixels" in text
    rows = pq.read_table(out / "transfer.parquet").to_pylist()
    done = [row for row in rows if row["status"] == "done"]
    assert [(row["row"], row["column"], row["seed"]) for row in done] == [
        (r.table["row"], r.table["column"], seed["seed"]) for r in records for seed in r.seeds
    ]


def test_a_run_ranks_networks_it_has_not_seen(tmp_path):
    words = ("reproduce", "transfer", "mnist-boosting", "--to", "mnist-sample")
    home, other = as_json(*words, "--out", tmp_path)
    assert (home["table"]["column"], other["table"]["column"]) == ("home", "mnist-sample")
    zoo = Zoo.open("mnist-sample")
    rows = zoo.select(percent=75)
    said = predict("mnist-boosting", [f"{zoo.path}#{row}" for row in rows])
    expected = kendalltau(zoo.table["test_accuracy"][rows], [p.by_weights for p in said]).statistic
    assert other["summary"]["tau"] == pytest.approx(expected)


def test_what_cannot_be_is_refused(digits_zoo, tmp_path):
    to = ("--to", "mnist-sample")
    shutil.copytree(asset_folder("mnist-sample", "zoo"), tmp_path / "copy")
    for message, *words in (
        ("name another zoo, whose networks are to be ranked", "transfer", "mnist-boosting"),
        ("there is no model 'mlp2'", "transfer", "mnist-sample", *to, "--models", "mlp2"),
        ("two zoos are called 'mnist-sample'", "transfer", "mnist-boosting", *to, *to),
        ("--to is for transfer", "table6", "mnist-sample", *to),
        ("holds 160 networks of", "transfer", "mnist-sample", *to),
        ("holds 160 networks of", "transfer", "mnist-sample", "--to", tmp_path / "copy"),
        ("--address is for --engine ray", "table6", "mnist-sample", "--address", "auto"),
        ("--leave-out is for mixed", "table1", "mnist-sample", "--leave-out", "w16-h2-d1"),
        ("--sizes is for learning-curve, targets", "table1", "mnist-sample", "--sizes", "64"),
        ("table7, learning-curve, targets, transfer, table3 has none",
         "table3", "mnist-sample", "--models", "mlp"),
    ):
        assert_refused(message, "reproduce", *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for words in (
        ("transfer", "mnist-sample", "--to", digits_zoo.path), ("table6", "mnist-sample")
    ):  # fmt: skip
        assert_refused(
            f"lies in the zoo '{digits_zoo.path}'",
            "reproduce", *words, "--out", digits_zoo.path / "results",
        )  # fmt: skip


def test_networks_that_were_trained_on_are_refused(records, out, tmp_path):
    folder = out / "cells" / "transfer-invariant_mlp-home"
    with pytest.raises(RunError, match=r"136 networks of runs that .* was trained on or selected"):
        reproduce("transfer", folder, tmp_path, to=["mnist-sample"], seeds=[0])
