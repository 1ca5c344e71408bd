"""GPTQ, AWQ and packed integer weights are read as the numbers that their codes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
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
GROUP = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output in each four bits of a word, from the lowest on."""
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "gptq, reordered": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "gptq, 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    "packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed, symmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    return tiny_families.save(tiny_families.build("llama", dtype=torch.float32), folder)


def _words(codes: np.ndarray, bits: int, axis: int) -> Tensor:
    """Codes of an axis one after the other in words of 32 bits, the first in the lowest bits."""

    def lane(values: np.ndarray) -> np.ndarray:
        number = sum(int(v) << (bits * i) for i, v in enumerate(values))
        count = -(-len(values) * bits // 32)
        return np.array([number >> (32 * i) & 0xFFFFFFFF for i in range(count)], dtype=np.uint32)

    return torch.from_numpy(np.apply_along_axis(lane, axis, codes).view(np.int32).copy())


def _stored(w: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Parts of a matrix ``[out, in]`` in a format, and the numbers that they stand for."""
    bits = 8 if "8 bits" in form else 4
    top = 2**bits - 1
    group = np.arange(w.shape[1]) // GROUP
    if "reordered" in form:
        group = np.random.default_rng(0).permutation(group)
    matrix, count = w.double().numpy(), group.max() + 1
    low, high = (
        np.stack([getattr(matrix[:, group == g], end)(1) for g in range(count)], 1)
        for end in ("min", "max")
    )
    if "symmetric" in form:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    scale = ((high - low) / top).astype(np.float32).astype(np.float64)
    zero = np.full_like(scale, 8) if "symmetric" in form else np.round(-low / scale).clip(1, top)
    codes = np.round(matrix / scale[:, group] + zero[:, group]).clip(0, top).astype(np.int64)
    expected = torch.from_numpy((codes - zero[:, group]) * scale[:, group]).float()
    scales, zeros = torch.from_numpy(scale).float(), zero.astype(np.int64)
    if form.startswith("packed"):
        parts = {"weight_packed": _words(codes, bits, 1), "weight_scale": scales,
                 "weight_shape": torch.tensor(w.shape)}  # fmt: skip
        if "symmetric" not in form:
            parts["weight_zero_point"] = _words(zeros, bits, 0)
    elif form == "awq":
        order = np.arange(len(codes)).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
        parts = {"qweight": _words(codes[order].T, bits, 1), "scales": scales.T,
                 "qzeros": _words(zeros[order].T, bits, 1)}  # fmt: skip
    else:
        below = 0 if "gptq_v2" in str(CONFIGS[form]) else 1
        parts = {"qweight": _words(codes.T, bits, 0), "scales": scales.T,
                 "qzeros": _words(zeros.T - below, bits, 1),
                 "g_idx": torch.from_numpy(group).int()}  # fmt: skip
    return parts, expected


def _quantised(folder: Path, out: Path, form: str) -> dict[str, Tensor]:
    """Quantise every matrix of the blocks; returns the numbers that the file stands for."""
    tensors, expected = {}, {}
    for key, w in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            parts, expected[key] = _stored(w, form)
            tensors |= {key.removesuffix("weight") + name: t for name, t in parts.items()}
        else:
            tensors[key] = expected[key] = w
    out.mkdir()
    save_file({k: t.contiguous() for k, t in tensors.items()}, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[form]
    (out / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("form", CONFIGS)
def test_weights_are_what_their_codes_stand_for(form: str, llama: Path, tmp_path: Path) -> None:
    expected = _quantised(llama, tmp_path / "q", form)
    with open_model(tmp_path / "q") as model, open_model(llama) as original:
        assert model.description == original.description
        for key, w in expected.items():
            torch.testing.assert_close(model.checkpoint[key], w, rtol=1e-6, atol=1e-7)
        assert relate(original, model).verdict == "derived"


def test_commands_read_and_write_them(llama: Path, tmp_path: Path) -> None:
    _quantised(llama, tmp_path / "q", "gptq")
    done = tnfn("disguise", tmp_path / "q", "--out", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert "quantization_config" not in json.loads((tmp_path / "other/config.json").read_text())
    assert tnfn("compare", tmp_path / "q", tmp_path / "other").returncode == 0


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
    _quantised(llama, tmp_path / "q", form)
    file = tmp_path / "q/model.safetensors"
    tensors = {k: t for k, t in load_file(file).items() if k != f"{KEY}.{part}"}
    save_file(tensors | ({} if bad is None else {f"{KEY}.{part}": bad}), file)
    with pytest.raises(CheckpointError, match=words), open_model(tmp_path / "q") as model:
        model.checkpoint[f"{KEY}.weight"]


def test_other_layouts_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    _quantised(llama, tmp_path / "q", "awq")
    config = json.loads((tmp_path / "q/config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="version of awq weights expected gemm, found 'gemv'"):
        open_model(tmp_path / "q")
