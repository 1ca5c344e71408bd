"""`tnfn compare` on real checkpoints: files in, a verdict and an exit code out."""

import json

import pytest
import torch

from tiny_families import build, save
from tnfn_command import tnfn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("a", 0), ("b", 1)):
        save(build("gpt2", dtype=torch.float32, seed=seed), path / name)
    save(build("llama", dtype=torch.float32), path / "llama")
    done = tnfn("disguise", path / "a", "--out", path / "disguised")
    assert done.returncode == 0, done.stderr
    return path


def test_a_disguise_is_the_same_by_proof_and_only_then(folder, tmp_path):
    figure = tmp_path / "blocks.png"
    done = tnfn("compare", folder / "a", folder / "disguised", "--no-prove", "--figure", figure)
    assert done.returncode == 3, done.stderr
    assert "consistent with a disguise, not proved (score 1.000)" in done.stdout
    assert figure.stat().st_size > 1000
    done = tnfn("compare", folder / "a", folder / "disguised", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "same"
    assert answer["proof"]["same_function"] is True
    assert "1.W_Q" in answer["proof"]["tensors"]


def test_strangers_are_told_apart_by_token_ids(folder):
    done = tnfn("compare", folder / "a", folder / "b", "--prove")
    assert done.returncode == 1, done.stderr
    assert "unrelated" in done.stdout
    assert "on token ids [" in done.stdout


def test_other_families_are_a_no_in_one_sentence(folder):
    done = tnfn("compare", folder / "a", folder / "llama")
    assert done.returncode == 1, done.stderr
    assert "not one model in disguise" in done.stdout


def test_what_cannot_be_read_is_an_error(folder, tmp_path):
    done = tnfn("compare", folder / "a", folder / "nothing")
    assert done.returncode == 2
    assert "there is no file" in done.stderr
    net = tmp_path / "net.safetensors"
    assert tnfn("sample", "attention_block:8,2,3,4,10", "--out", net).returncode == 0
    done = tnfn("compare", folder / "a", net)
    assert done.returncode == 2
    assert "they do not compare" in done.stderr
    done = tnfn("compare", net, net, "--figure", tmp_path / "f.png")
    assert done.returncode == 2
    assert "--figure is for checkpoints" in done.stderr
