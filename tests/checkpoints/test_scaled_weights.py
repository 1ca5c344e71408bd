"""int8 and float8 weights with scales are read as numbers, and compared up to their rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_families
from quantised_folders import SCALED, write_quantised
from tnfn_command import tnfn
from transformer_nfn.checkpoints import open_model
from transformer_nfn.checkpoints.relations import relate
from transformer_nfn.errors import CheckpointError

KEY = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    return tiny_families.save(tiny_families.build("llama", dtype=torch.float32), folder)


@pytest.mark.parametrize("form", SCALED)
def test_weights_are_multiplied_by_their_scales(form: str, llama: Path, tmp_path: Path) -> None:
    expected = write_quantised(llama, tmp_path / "q", form)
    with open_model(tmp_path / "q") as model, open_model(llama) as original:
        assert model.description == original.description
        for key, w in expected.items():
            torch.testing.assert_close(model.checkpoint[key], w, rtol=1e-6, atol=1e-7)
        relation = relate(original, model)
    assert relation.verdict == "same", relation.reason
    assert "int8" in relation.reason or "float8" in relation.reason


@pytest.mark.parametrize("form", SCALED)
def test_a_changed_weight_is_named(form: str, llama: Path, tmp_path: Path) -> None:
    write_quantised(llama, tmp_path / "q", form)
    file = tmp_path / "q/model.safetensors"
    tensors = load_file(file)
    codes = tensors[f"{KEY}.weight"]
    tensors[f"{KEY}.weight"] = codes.flip(0).contiguous()
    save_file(tensors, file)
    with open_model(tmp_path / "q") as model, open_model(llama) as original:
        relation = relate(original, model)
    assert relation.conversion is not None
    assert [t.key for t in relation.conversion.wrong] == [f"{KEY}.weight"]


def test_commands_read_and_write_them(llama: Path, tmp_path: Path) -> None:
    write_quantised(llama, tmp_path / "q", "float8 blocks")
    done = tnfn("disguise", tmp_path / "q", "--out", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert "quantization_config" not in json.loads((tmp_path / "other/config.json").read_text())
    assert tnfn("compare", tmp_path / "q", tmp_path / "other").returncode == 0


def test_scales_that_do_not_fit_are_refused(llama: Path, tmp_path: Path) -> None:
    write_quantised(llama, tmp_path / "q", "float8 blocks")
    file = tmp_path / "q/model.safetensors"
    tensors = load_file(file)
    key = f"{KEY}.weight_scale_inv"
    for bad, words in (
        (torch.ones(2, 3), r"expected scales of shape \[2, 2\], found \[2, 3\]"),
        (torch.ones(1, 2, 3), "expected scales of one or two axes"),
        (torch.ones(2, 2, dtype=torch.int32), "expected scales in float32"),
    ):
        save_file(tensors | {key: bad}, file)
        with pytest.raises(CheckpointError, match=words):
            open_model(tmp_path / "q")
    save_file({name: t for name, t in tensors.items() if name != key}, file)
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        open_model(tmp_path / "q")
