"""Checkpoints that tests write: the same tensors as shards, in the old format, or byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.io.checkpoint import INDEX

TENSORS = {
    "embedding.W": torch.arange(12.0).reshape(3, 4),
    "h.0.W": torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "h.0.b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "h.1.b": torch.tensor([0.25], dtype=torch.float16),
    "scale": torch.tensor(3.0),
    "empty": torch.empty(0, 7),
}


def sharded(folder: Path, stem: str, save: Callable[[dict[str, Tensor], Path], None]) -> Path:
    """Two shards and their index, as a hub lays them out."""
    names = list(TENSORS)
    end = Path(stem).suffix
    shards = {f"part-{i}{end}": names[i::2] for i in range(2)}
    folder.mkdir()
    for shard, held in shards.items():
        save({name: TENSORS[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / f"{stem}{INDEX}").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def legacy(tensors: dict[str, Tensor], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def write_raw(path: Path, header: dict[str, Any] | bytes, body: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
