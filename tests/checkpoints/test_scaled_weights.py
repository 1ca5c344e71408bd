"""int8 and float8 weights with scales are read as numbers, and compared up to their rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny_families
from tnfn_command import tnfn
from transformer_nfn.checkpoints import open_model
from transformer_nfn.checkpoints.relations import relate
from transformer_nfn.errors import CheckpointError

KEY = "model.layers.1.mlp.down_proj"
Stored = tuple[dict[str, Tensor], Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    return tiny_families.save(tiny_families.build("llama", dtype=torch.float32), folder)


def _rows(w: Tensor, dtype: torch.dtype, largest: float) -> Stored:
    scale = w.abs().amax(1, keepdim=True) / largest
    codes = w / scale
    stored = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def _whole(w: Tensor) -> Stored:
    scale = (w.abs().amax() / 448).bfloat16()
    stored = (w / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()


def _blocks(w: Tensor) -> Stored:
    """Blocks of 16 × 24, of which the last ones are cut."""
    rows, columns = -(-w.shape[0] // 16), -(-w.shape[1] // 24)
    scale, stored = torch.empty(rows, columns), torch.empty(w.shape, dtype=torch.float8_e4m3fn)
    expected = torch.empty_like(w)
    for i in range(rows):
        for j in range(columns):
            at = slice(16 * i, 16 * i + 16), slice(24 * j, 24 * j + 24)
            scale[i, j] = w[at].abs().amax() / 448
            stored[at] = (w[at] / scale[i, j]).to(torch.float8_e4m3fn)
            expected[at] = stored[at].float() * scale[i, j]
    return {"weight": stored, "weight_scale_inv": scale}, expected


def _groups(w: Tensor) -> Stored:
    """Groups of eight columns, with a zero point."""
    columns = w.unflatten(1, (-1, 8))
    low, high = columns.amin(-1), columns.amax(-1)
    scale = (high - low) / 254
    zero = (-127 - low / scale).round()
    codes = (columns / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(-128, 127)
    expected = ((codes - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)
    stored = codes.flatten(1).to(torch.int8)
    return {
        "weight": stored, "weight_scale": scale, "weight_zero_point": zero.to(torch.int32)
    }, expected  # fmt: skip


def _bitsandbytes(w: Tensor) -> Stored:
    largest = w.abs().amax(1)
    stored = (127 * w / largest[:, None]).round().to(torch.int8)
    parts = {"weight": stored, "SCB": largest, "weight_format": torch.zeros(1, dtype=torch.uint8)}
    return parts, stored.float() * largest[:, None] / 127


FORMATS: dict[str, Callable[[Tensor], Stored]] = {
    "int8 rows": lambda w: _rows(w, torch.int8, 127),
    "float8 rows": lambda w: _rows(w, torch.float8_e4m3fn, 448),
    "float8 e5m2": lambda w: _rows(w, torch.float8_e5m2, 57344),
    "float8 whole": _whole,
    "float8 blocks": _blocks,
    "int8 groups": _groups,
    "bitsandbytes": _bitsandbytes,
}


def _quantised(folder: Path, out: Path, form: str) -> dict[str, Tensor]:
    """Quantise every matrix of the blocks; returns the numbers that the file stands for."""
    tensors, expected = {}, {}
    for key, w in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            parts, expected[key] = FORMATS[form](w)
            tensors |= {key.removesuffix("weight") + name: t for name, t in parts.items()}
            tensors[key.removesuffix("weight") + "input_scale"] = torch.ones(1)
        else:
            tensors[key] = expected[key] = w
    out.mkdir()
    save_file({k: t.contiguous() for k, t in tensors.items()}, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    (out / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_multiplied_by_their_scales(form: str, llama: Path, tmp_path: Path) -> None:
    expected = _quantised(llama, tmp_path / "q", form)
    with open_model(tmp_path / "q") as model, open_model(llama) as original:
        assert model.description == original.description
        for key, w in expected.items():
            torch.testing.assert_close(model.checkpoint[key], w, rtol=1e-6, atol=1e-7)
        relation = relate(original, model)
    assert relation.verdict == "same", relation.reason
    assert "int8" in relation.reason or "float8" in relation.reason


@pytest.mark.parametrize("form", FORMATS)
def test_a_changed_weight_is_named(form: str, llama: Path, tmp_path: Path) -> None:
    _quantised(llama, tmp_path / "q", form)
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
    _quantised(llama, tmp_path / "q", "float8 blocks")
    done = tnfn("disguise", tmp_path / "q", "--out", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert "quantization_config" not in json.loads((tmp_path / "other/config.json").read_text())
    assert tnfn("compare", tmp_path / "q", tmp_path / "other").returncode == 0


def test_scales_that_do_not_fit_are_refused(llama: Path, tmp_path: Path) -> None:
    _quantised(llama, tmp_path / "q", "float8 blocks")
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
