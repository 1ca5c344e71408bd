"""Quantised weights in safetensors are read as the numbers that their codes stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_families
from quantised_folders import PACKED, SCALED, write_quantised
from tnfn_command import tnfn
from transformer_nfn.checkpoints import open_model
from transformer_nfn.checkpoints.relations import relate
from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.scaled_weights import LEFT_OUT

KEY = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    return tiny_families.save(tiny_families.build("llama", dtype=torch.float32), folder)


@pytest.mark.parametrize("form", [*PACKED, *SCALED])
def test_weights_are_what_their_codes_stand_for(form: str, llama: Path, tmp_path: Path) -> None:
    expected = write_quantised(llama, tmp_path / "q", form)
    with open_model(tmp_path / "q") as model, open_model(llama) as original:
        assert model.description == original.description
        for key, w in expected.items():
            torch.testing.assert_close(model.checkpoint[key], w, rtol=1e-6, atol=1e-7)
        relation = relate(original, model)
    if form in PACKED:
        assert relation.verdict == "derived"
    else:
        assert relation.verdict == "same", relation.reason
        assert "int8" in relation.reason or "float8" in relation.reason


@pytest.mark.parametrize("form", ["gptq", "float8 blocks"])
def test_commands_read_and_write_them(form: str, llama: Path, tmp_path: Path) -> None:
    write_quantised(llama, tmp_path / "q", form)
    done = tnfn("disguise", tmp_path / "q", "--out", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert "quantization_config" not in json.loads((tmp_path / "other/config.json").read_text())
    assert tnfn("compare", tmp_path / "q", tmp_path / "other").returncode == 0


@pytest.mark.parametrize(
    "form", ["gptq, 2 bits", "gptq, 3 bits", "packed, 2 bits", "packed, 3 bits"]
)
def test_codes_may_cross_words(form: str, tmp_path: Path) -> None:
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    save_file({"a_proj.weight": w}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    expected = write_quantised(tmp_path, tmp_path / "q", form)["a_proj.weight"]
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        torch.testing.assert_close(checkpoint["a_proj.weight"], expected, rtol=1e-6, atol=1e-7)


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


@pytest.mark.parametrize(
    ("form", "part", "bad", "words"),
    [
        ("gptq", "qzeros", None, "qzeros' expected a matrix, found no such tensor"),
        ("gptq", "qweight", torch.ones(3, 5, dtype=torch.int32), r"qweight' expected shape \[3, "),
        ("gptq", "scales", torch.ones(2, dtype=torch.int32), "scales' expected a matrix"),
        ("gptq", "g_idx", torch.full((40,), 99, dtype=torch.int32), "expected groups 0 to 4"),
        ("awq", "qzeros", torch.ones(6, 4, dtype=torch.int32), r"expected shape \[5, 4\]"),
        ("awq", "qzeros", torch.ones(5, 8, dtype=torch.int32), "expected codes .*found 8 bits"),
        ("packed", "weight_shape", torch.tensor([0, -1]), "expected two sizes"),
        ("packed", "weight_scale", None, "weight_scale' expected a matrix, found no such"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    form: str, part: str, bad: Tensor | None, words: str, llama: Path, tmp_path: Path
) -> None:
    write_quantised(llama, tmp_path / "q", form)
    file = tmp_path / "q/model.safetensors"
    tensors = {k: t for k, t in load_file(file).items() if k != f"{KEY}.{part}"}
    save_file(tensors | ({} if bad is None else {f"{KEY}.{part}": bad}), file)
    with pytest.raises(CheckpointError, match=words), open_model(tmp_path / "q") as model:
        model.checkpoint[f"{KEY}.weight"]


def test_other_layouts_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    write_quantised(llama, tmp_path / "q", "awq")
    config = json.loads((tmp_path / "q/config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="version of awq weights expected gemm, found 'gemv'"):
        open_model(tmp_path / "q")


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


@pytest.mark.parametrize("form", [*PACKED, *SCALED])
def test_empty_parts_are_refused(form: str, llama: Path, tmp_path: Path) -> None:
    write_quantised(llama, tmp_path / "q", form)
    file = tmp_path / "q" / "model.safetensors"
    state = load_file(file)
    shapes = {name: [0] * w.ndim for name, w in state.items() if name.startswith(KEY) and w.ndim}
    read = {name: shape for name, shape in shapes.items() if not LEFT_OUT.search(name)}
    for name, empty in read.items():
        save_file({**state, name: state[name].new_empty(empty)}, file)
        with pytest.raises(CheckpointError, match=re.escape(KEY)), open_model(file.parent) as model:
            pytest.fail(f"{name} {empty}: {model.checkpoint[f'{KEY}.weight'].shape}")
