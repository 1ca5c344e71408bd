"""Commands do what they say: which file they write, what they need, what they promise."""

import os
from pathlib import Path

import pytest

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.checkpoints.families import families
from transformer_nfn.models.predictor import names


def test_models_are_listed() -> None:
    assert [row["name"] for row in as_json("models")] == names()
    out = printed("models", "whole*")
    assert "Whole network" in out
    assert "mlp" not in out
    assert_refused("no predictor is called 'none'", "models", "none")


def test_a_training_says_what_it_lacks() -> None:
    assert_refused("name the run folder to write with --out, as in", "train", "mnist-sample")
    assert_refused("name a zoo to train on", "train", "--out", "run")


def test_architectures_lists_every_family_and_checks_a_data_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown, listed = printed("architectures"), as_json("architectures")
    assert listed.keys() == families().keys()
    for name, family in families().items():
        assert family.title in shown
        assert family.reads in shown
        assert listed[name]["model_types"] == list(family.model_types)
    assert listed["gpt2"]["tensors"]["wte.weight"] == "token: vocab D"
    path = tmp_path / "mine.toml"
    path.write_text('extends = "llama"\ntitle = "Mine"\nmodel_types = ["mine"]\n')
    assert as_json("architectures", "--architecture", path)["mine"]["title"] == "Mine"
    path.write_text("title =")
    assert_refused(f"'{path}' is no data file", "architectures", "--architecture", path)
    path.unlink()
    os.mkfifo(path)
    assert_refused("is not a regular file", "architectures", "--architecture", path)
