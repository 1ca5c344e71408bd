"""LoRA adapters as PEFT writes them, random, and the model that merging them by hand gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."


def write_adapter(
    base: Path,
    out: Path,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Random factors for every matrix of ``base`` whose name ends so."""
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 6, "use_rslora": False, "bias": "none",
        "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False,
        "target_modules": list(targets), "base_model_name_or_path": "somebody/some-model",
    } | fields  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, w in load_file(base / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if key.endswith(".weight") and module.endswith(tuple(targets)):
            rank = next(
                (r for name, r in config["rank_pattern"].items() if module.endswith(name)),
                config["r"],
            )
            rows, columns = w.shape[::-1] if config["fan_in_fan_out"] else w.shape
            A = torch.randn(rank, columns, generator=generator) / 8
            B = torch.randn(rows, rank, generator=generator) / 8
            tensors[f"{PREFIX}{module}.lora_A.weight"] = A.to(dtype)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = B.to(dtype)
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def merge(base: Path, adapter: Path, out: Path, scales: dict[str, float]) -> Path:
    """The base with ``scale · B A`` added, by the ends of names."""
    shutil.copytree(base, out)
    tensors = load_file(out / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    turned = json.loads((adapter / "adapter_config.json").read_text())["fan_in_fan_out"]
    for key, w in tensors.items():
        module = PREFIX + key.removesuffix(".weight")
        if f"{module}.lora_A.weight" in factors:
            scale = next(scale for end, scale in scales.items() if module.endswith(end))
            A, B = (factors[f"{module}.lora_{part}.weight"].double() for part in "AB")
            change = torch.einsum("or,ri->io" if turned else "or,ri->oi", B, A)
            tensors[key] = (w.double() + scale * change).to(w.dtype).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def rebase(adapter: Path, out: Path, seed: int = 1) -> Path:
    """The same changes in another inner basis."""
    shutil.copytree(adapter, out)
    file = out / "adapter_model.safetensors"
    factors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    for key in [key for key in factors if ".lora_A." in key]:
        other = key.replace(".lora_A.", ".lora_B.")
        rank = len(factors[key])
        G: Tensor = torch.randn(rank, rank, generator=generator) + 3 * torch.eye(rank)
        factors[key] = torch.linalg.solve(G, factors[key]).contiguous()
        factors[other] = factors[other] @ G
    save_file(factors, file, {"format": "pt"})
    return out
