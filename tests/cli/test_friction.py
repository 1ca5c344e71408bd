"""Commands do what they say: which file they write, what they need, what they promise."""

from pathlib import Path

import pytest
import torch

from tnfn_command import as_json, printed, tnfn
from transformer_nfn.networks import read_network
from transformer_nfn.prediction.predictors import PREDICTORS

SPACE = "attention_block:8,2,4,4,12"


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin"])
def test_a_file_named_as_a_state_dict_is_one(suffix: str, tmp_path: Path) -> None:
    path, plain = tmp_path / f"net.{suffix}", tmp_path / "net.safetensors"
    out = printed("sample", SPACE, "--out", path)
    assert f"need --space {SPACE}" in out
    printed("sample", SPACE, "--out", plain)
    state = torch.load(path, weights_only=True)
    space, weights = read_network(plain)
    assert list(state) == list(space.tensors)
    assert all(torch.equal(state[name], w[0, 0]) for name, w in weights.items())
    printed("compare", path, plain, "--space", SPACE)
    printed("disguise", path, "--space", SPACE, "--out", tmp_path / f"other.{suffix}")
    assert torch.load(tmp_path / f"other.{suffix}", weights_only=True).keys() == state.keys()


def test_models_are_listed_without_anything_else() -> None:
    code, out, err = tnfn("train", "--model", "list")
    assert (code, out.split(), err) == (0, list(PREDICTORS), "")
    assert as_json("train", "--model", "list") == list(PREDICTORS)


def test_a_training_says_what_it_lacks() -> None:
    code, _, err = tnfn("train", "mnist-sample")
    assert (code, err) == (
        2, "error: name the run folder to write with --out, as in tnfn train ZOO --out RUN\n"
    )  # fmt: skip
    assert "name a zoo to train on" in tnfn("train", "--out", "run").stderr
