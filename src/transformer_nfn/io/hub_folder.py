"""Which files of a folder hold its weights? The layout that model hubs use, read with care."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from transformer_nfn.io.errors import CheckpointError
from transformer_nfn.io.json_object import read_object

CONFIG = "config.json"
INDEX = ".index.json"
# In the order in which they are preferred.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def find_weights(folder: Path) -> Path:
    """The file of a folder that holds its weights, or the index of those that do."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return inside(folder, name, folder)
    raise CheckpointError(f"'{folder}' holds no weights: expected {' or '.join(WEIGHTS[:3])}")


def read_config(folder: Path) -> dict[str, Any]:
    """What ``config.json`` says; nothing if there is none."""
    path = folder / CONFIG
    return read_object(path) if path.is_file() else {}


def read_shard_index(index: Path) -> dict[str, Path]:
    """The file that holds each tensor; refuses paths that lead out of the index's folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"'{index}' is not an index of shards: it has no 'weight_map'")
    found: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"'{index}': the file of tensor '{name}' is not named by text")
        if shard not in found:
            found[shard] = inside(index.parent, shard, index)
    return {name: found[shard] for name, shard in weight_map.items()}


def inside(folder: Path, name: str, said_by: Path) -> Path:
    """A file of a folder that a file in it named; never one outside, not even by a link.

    The links of a hub's own cache, from ``snapshots/<revision>`` to ``blobs`` beside
    ``snapshots``, are the one exception.
    """
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or not parts.parts:
        raise CheckpointError(f"'{said_by}': '{name}' leads out of its folder")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"'{said_by}' names '{name}', which is missing")
    real, home = path.resolve(), folder.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in homes):
        raise CheckpointError(f"'{said_by}': '{name}' is a link that leads out of its folder")
    return path
