"""Hub folders with int8 and float8 weights and their scales, in the formats that people publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]


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


def write_scaled(folder: Path, out: Path, form: str) -> dict[str, Tensor]:
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
