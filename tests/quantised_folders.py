"""Hub folders with quantised weights, in the formats that people publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]
GROUP = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output in each four bits of a word, from the lowest on."""
PACKED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "gptq, reordered": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "gptq, 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    "packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "packed, symmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


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


SCALED: dict[str, Callable[[Tensor], Stored]] = {
    "int8 rows": lambda w: _rows(w, torch.int8, 127),
    "float8 rows": lambda w: _rows(w, torch.float8_e4m3fn, 448),
    "float8 e5m2": lambda w: _rows(w, torch.float8_e5m2, 57344),
    "float8 whole": _whole,
    "float8 blocks": _blocks,
    "int8 groups": _groups,
    "bitsandbytes": _bitsandbytes,
}


def _words(codes: np.ndarray, bits: int, axis: int) -> Tensor:
    """Codes of an axis one after the other in words of 32 bits, the first in the lowest bits."""

    def lane(values: np.ndarray) -> np.ndarray:
        number = sum(int(v) << (bits * i) for i, v in enumerate(values))
        count = -(-len(values) * bits // 32)
        return np.array([number >> (32 * i) & 0xFFFFFFFF for i in range(count)], dtype=np.uint32)

    return torch.from_numpy(np.apply_along_axis(lane, axis, codes).view(np.int32).copy())


def _packed(w: Tensor, form: str) -> tuple[dict[str, Tensor], Tensor]:
    """Parts of a matrix ``[out, in]`` in a format, and the numbers that they stand for."""
    bits = int(form[-6]) if form.endswith(" bits") else 4
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
        below = 0 if "reordered" in form else 1
        parts = {"qweight": _words(codes.T, bits, 0), "scales": scales.T,
                 "qzeros": _words(zeros.T - below, bits, 1),
                 "g_idx": torch.from_numpy(group).int()}  # fmt: skip
    return parts, expected


def write_quantised(folder: Path, out: Path, form: str) -> dict[str, Tensor]:
    """Quantise every matrix of the blocks; returns the numbers that the file stands for."""
    tensors, expected = {}, {}
    for key, w in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            parts, expected[key] = SCALED[form](w) if form in SCALED else _packed(w, form)
            if form in SCALED:
                parts["input_scale"] = torch.ones(1)
            tensors |= {key.removesuffix("weight") + name: t for name, t in parts.items()}
        else:
            tensors[key] = expected[key] = w
    out.mkdir()
    save_file({k: t.contiguous() for k, t in tensors.items()}, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    usual = PACKED.get(form.partition(",")[0], blocks)
    config["quantization_config"] = PACKED.get(form, usual)
    (out / "config.json").write_text(json.dumps(config))
    return expected
