"""Predictors on zoos of the user's own checkpoints: from the import to the prediction."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from made_networks import assert_fields_are_checked
from safetensors.torch import load_file, save_file

from tnfn_command import as_json, assert_refused, printed, tnfn
from transformer_nfn.checkpoints import disguise, open_model
from transformer_nfn.prediction.checkpoint_reader import model_features
from transformer_nfn.prediction.runs import OWN_GUARD_FILE
from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import Zoo

NETWORKS = 40


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llamas whose target is the strength of their MLPs; the stronger half is called loud."""
    folder = tmp_path_factory.mktemp("own")
    zoo = Zoo.create(folder / "zoo")
    for seed in range(NETWORKS):
        path = write_example_checkpoint(folder / f"net-{seed}", seed)
        config = json.loads((path / "config.json").read_text())
        strength = 1 + (7 * seed % NETWORKS) / 10
        tensors = {
            name: strength * w if "down_proj" in name else torch.ones_like(w) if w.ndim == 1 else w
            for name, w in load_file(path / "model.safetensors").items()
        }
        kind = "loud" if strength > 3 else "quiet"
        odd = {"same": 1.5, "one": "a", "label": f"run-{seed}", "note": "" if seed == 9 else kind}
        zoo.add(tensors, f"net-{seed}", config=config, strength=strength, kind=kind, **odd)
    return zoo.path


def test_features_are_those_of_the_function(tmp_path: Path) -> None:
    path = write_example_checkpoint(tmp_path / "a")
    with open_model(path) as model:
        features = model_features(model)
        disguise(model, tmp_path / "b", torch.Generator().manual_seed(0))
    with open_model(tmp_path / "b") as model:
        assert torch.allclose(model_features(model), features, atol=1e-3)
    other = write_example_checkpoint(tmp_path / "c", 1)
    with open_model(other) as model:
        assert not torch.allclose(model_features(model), features, atol=1e-1)


@pytest.mark.nightly
def test_a_number_is_learned_and_predicted_for_files_and_rows(zoo: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--target", "strength", "--seeds", 2, "--out", out]
    record = as_json("train", zoo, *words, "--model", "invariant_mlp")
    assert record["zoo"]["families"] == {"llama": NETWORKS}
    assert record["selection"]["percent"] is None, "such networks have no known checkpoints"
    assert record["summary"]["tau"] > 0.5
    disguised = tmp_path / "other"
    printed("disguise", f"{zoo}#3", "--out", disguised)
    row, copy = as_json("predict", out, f"{zoo}#3", disguised)
    assert row["recorded"]["strength"] == Zoo.open(zoo).targets["strength"][3]
    assert row["value"] == pytest.approx(copy["value"], abs=0.05)
    assert row["guarded"] is True
    assert_fields_are_checked(out, tmp_path / "copy")
    check_scales(out, tmp_path / "scaled")
    damaged = bytearray((guard := out / OWN_GUARD_FILE).read_bytes())
    damaged[-3] ^= 64
    (tmp_path / "guard").write_bytes(guard.read_bytes())
    guard.write_bytes(bytes(damaged))
    assert_refused(f"'{guard}' is damaged", "predict", out, f"{zoo}#3")
    shutil.copy(tmp_path / "guard", guard)
    shown = printed("predict", out, f"{zoo}#3").split()
    assert "recorded" in shown
    assert not {"run", "configuration"} & {*shown}  # such networks have none
    measured = as_json("evaluate", out, zoo)
    assert measured["networks"] == NETWORKS
    assert measured["trained_on"] + measured["selected_by"] < NETWORKS
    assert measured["tau"] > 0.5


def check_scales(run: Path, folder: Path) -> None:
    """A checkpoint has a finite prediction at every scale of its weights, or none, by name."""
    path = write_example_checkpoint(folder)
    tensors = load_file(path / "model.safetensors")
    for scale, part in ((1e3, ""), (1e12, "down_proj"), (1e38, ""), (math.nan, "down_proj")):
        scaled = {name: w * scale if part in name else w for name, w in tensors.items()}
        save_file(scaled, path / "model.safetensors")
        done = tnfn("predict", run, path, "--json")
        if done.returncode:
            assert done.returncode == 2
            assert str(path) in json.loads(done.stdout)["error"]
        else:
            (found,) = json.loads(done.stdout)
            numbers = [found[key] for key in ("low", "value", "high", "novelty")]
            assert all(math.isfinite(x) for x in numbers)
            assert numbers[:3] == sorted(numbers[:3])


@pytest.mark.nightly
def test_a_class_is_learned(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    record = as_json("train", zoo, "--target", "kind", "--seeds", 1, "--out", out)
    assert record["model"] == "whole_network"
    assert record["target"]["classes"] == ["loud", "quiet"]
    assert record["summary"]["auroc"] > 0.7
    monkeypatch.setenv("COLUMNS", "80")
    shown = printed("evaluate", out)
    assert {"frequent", "calibration"} < set(shown.split())
    (found,) = as_json("predict", out, f"{zoo}#0")
    assert found["label"] in ("loud", "quiet")
    assert not found.keys() & {"low", "high"}
    assert sum(found["probabilities"].values()) == pytest.approx(1)
    assert_fields_are_checked(out, tmp_path / "copy")


def test_a_network_without_the_target_is_left_out(zoo: Path, tmp_path: Path) -> None:
    words = ("--target", "note", "--model", "statistics_linear", "--seeds", 1)
    record = as_json("train", zoo, *words, "--out", tmp_path / "run")
    parts = [record["selection"][part] for part in ("train", "val", "test", "missing")]
    assert (sum(parts), parts[3]) == (NETWORKS, 1)
    assert as_json("evaluate", tmp_path / "run", zoo)["networks"] == NETWORKS - 1
    assert as_json("predict", tmp_path / "run", f"{zoo}#9")[0]["labels"]
    message = "not enough networks: 0 are selected with a 'test_loss', 16 are needed"
    unknown = ("--target", "test_loss", "--out", tmp_path / "no")
    assert_refused(message, "train", "ag-news-sample", *unknown)


@pytest.mark.nightly
def test_what_does_not_fit_is_one_sentence(zoo: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("train", zoo, "--out", out, "--target")
    assert_refused("has no target 'test_accuracy': it has strength, kind, same,", *words[:-1])
    assert_refused("'same' is 1.5 for all networks", *words, "same")
    assert_refused("'one' has one class only, 'a'", *words, "one")
    assert_refused("'label' is 'run-0' for one network only: a class needs two", *words, "label")
    assert_refused("train xgboost, ", *words, "kind", "--model", "transformer_nfn")
    assert_refused("and --min-accuracy", *words, "strength", "--min-accuracy", 0.5)
    few = Zoo.create(tmp_path / "few")
    few.add(write_example_checkpoint(tmp_path / "one"), loss=1.0)
    words = ("train", few.path, "--target", "loss", "--out", out)
    assert_refused("1 are selected, 16 are needed", *words)
    assert not out.exists()
    printed("train", zoo, "--target", "strength", "--seeds", 1, "--out", out, "--epochs", 1)
    record = json.loads((out / "run.json").read_text())
    record["zoo"]["families"] = ["llama"]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(json.dumps(record))
    assert_refused("'zoo.families' expected", "predict", tmp_path / "bad", f"{zoo}#0")
    assert_refused("is a small_transformer checkpoint", "predict", out, "mnist-sample#0")
    assert_refused("the predictor reads checkpoints", "evaluate", out, "mnist-sample")
    assert_refused("the predictor reads networks that", "evaluate", "mnist-boosting", zoo)


def test_networks_of_another_format_are_refused(zoo: Path, tmp_path: Path) -> None:
    mixed = Zoo.create(tmp_path / "mixed")
    llama = write_example_checkpoint(tmp_path / "llama")
    config = json.loads((llama / "config.json").read_text())
    for row in range(16):
        tensors = load_file(llama / "model.safetensors")
        if row == 15:
            config = {**config, "vocab_size": config["vocab_size"] - 1}
            cut = config["vocab_size"]
            tensors = {k: w[:cut] if len(w) > cut else w for k, w in tensors.items()}
        mixed.add(tensors, config=config, loss=float(row))
    words = ("train", mixed.path, "--target", "loss", "--out", tmp_path / "run")
    assert_refused("#15' reads 24 tokens of", *words)
    assert_refused("reads networks of one size, found 2", *words, "--model", "statistics_mlp")


@pytest.mark.nightly
def test_statistics_of_tensors_are_a_baseline(zoo: Path, tmp_path: Path) -> None:
    words = ("--target", "strength", "--seeds", 1, "--model", "statistics_linear")
    record = as_json("train", zoo, *words, "--out", tmp_path / "run")
    assert record["summary"]["tau"] > 0.5
