"""One shard: stacked tensors, a row a checkpoint, with the rows' index and checksums inside."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io import tensor_files
from transformer_nfn.io.files import open_regular, write_bytes
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.sizes import NetworkSizes


def row_checksum(parts: Sequence[bytes | memoryview]) -> int:
    """The crc32 of one network's tensors, in the order of the space."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def write_shard(
    path: Path,
    arch: NetworkSizes,
    weights: Tensor,
    rows: Sequence[Mapping[str, Any]],
    made: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes ``weights`` ``[checkpoints, weights]`` and their index as one safetensors file.

    Args:
        rows: index rows; those not crashed belong to the rows of ``weights`` in order.
        made: how the shard was made (JSON values), for the record.
    """
    named = {name: w.to(dtype).contiguous() for name, w in arch.to_named(weights).items()}
    arrays = [w.numpy() for w in named.values()]
    index: list[dict[str, Any]] = []
    at = 0
    for row in rows:
        if row["crashed"]:
            index.append({**row, "row": -1, "checksum": 0})
            continue
        parts = [memoryview(a[at]).cast("B") for a in arrays]
        index.append({**row, "row": at, "checksum": row_checksum(parts)})
        at += 1
    if at != len(weights):
        raise StoreError(f"{path}: {at} index rows for {len(weights)} networks")
    body = json.dumps({"rows": index, "made": dict(made)}, allow_nan=True)
    metadata = {"index": body, "index_crc32": str(zlib.crc32(body.encode()))}
    write_bytes(path, safetensors.torch.save(named, metadata))


@dataclass(frozen=True)
class Header:
    """What stands before the tensors of a shard."""

    rows: list[dict[str, Any]]
    made: dict[str, Any]
    crc32: int
    networks: int


def raw_header(path: Path) -> tuple[bytes, int]:
    """The bytes of a shard's header, and the length of the file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return tensor_files.raw_header(file.fileno(), str(path))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    except CheckpointError as error:
        raise StoreError(f"damaged: {error}") from error


def read_header(path: Path) -> Header:
    """The index rows inside a shard, checked; reads no weights."""
    raw, length = raw_header(path)
    try:
        _, metadata = tensor_files.parse_header(raw, length, str(path))
        body = metadata["index"]
        if zlib.crc32(body.encode()) != int(metadata["index_crc32"]):
            raise ValueError("its index does not match its checksum")
        index = json.loads(body)
        networks = sum(1 for row in index["rows"] if not row["crashed"])
        return Header(index["rows"], index["made"], zlib.crc32(raw), networks)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{path}: damaged header ({error})") from error
