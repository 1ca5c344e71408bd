"""One shard: stacked tensors, a row a checkpoint, with the rows' index and checksums inside."""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from transformer_nfn.zoo.architecture import Architecture
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.store.files import write_whole

DTYPES = {"F32": (torch.float32, np.float32, 4), "F16": (torch.float16, np.float16, 2)}


def row_checksum(parts: Sequence[bytes | memoryview]) -> int:
    """The crc32 of one network's tensors, in the order of the space."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def write_shard(
    path: Path,
    arch: Architecture,
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
    write_whole(path, safetensors.torch.save(named, metadata))


@dataclass(frozen=True)
class Header:
    """What stands before the tensors of a shard."""

    rows: list[dict[str, Any]]
    made: dict[str, Any]
    crc32: int
    networks: int


def _raw_header(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = struct.unpack("<Q", head)[0]
            length = path.stat().st_size
            if size > length:
                raise StoreError(f"{path}: damaged, its header claims {size} bytes of {length}")
            return file.read(size), length
    except (OSError, struct.error) as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error


def read_header(path: Path) -> Header:
    """The index rows inside a shard, checked; reads no weights."""
    raw, _ = _raw_header(path)
    try:
        metadata = json.loads(raw)["__metadata__"]
        body = metadata["index"]
        if zlib.crc32(body.encode()) != int(metadata["index_crc32"]):
            raise ValueError("its index does not match its checksum")
        index = json.loads(body)
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: damaged header ({error})") from error
    networks = sum(1 for row in index["rows"] if not row["crashed"])
    return Header(index["rows"], index["made"], zlib.crc32(raw), networks)


class ShardReader:
    """A memory-mapped shard; nothing is read before it is asked for.

    Args:
        header_crc32: what the index says the header hashes to; None does not check.
    """

    def __init__(self, path: Path, arch: Architecture, header_crc32: int | None = None) -> None:
        raw, length = _raw_header(path)
        if header_crc32 is not None and zlib.crc32(raw) != header_crc32:
            raise StoreError(f"{path}: damaged, its header does not match its checksum")
        try:
            entries = json.loads(raw)
            entries.pop("__metadata__", None)
            self.dtype, kind, _ = DTYPES[next(iter(entries.values()))["dtype"]]
        except (ValueError, KeyError, StopIteration, UnicodeDecodeError) as error:
            raise StoreError(f"{path}: damaged header ({error})") from error
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Rows are read in no order, so what lies around one is not worth reading with it.
        self._map.madvise(mmap.MADV_RANDOM)
        base = 8 + len(raw)
        self._arrays: list[np.ndarray] = []
        self._offsets: list[int] = []
        for name, shape in arch.space.shapes.items():
            entry = entries.get(name)
            if entry is None or tuple(entry["shape"][1:]) != shape:
                found = None if entry is None else entry["shape"][1:]
                raise StoreError(
                    f"{path}: tensor '{name}' expected of shape {list(shape)}, found {found}"
                )
            start, end = entry["data_offsets"]
            if base + end > length:
                raise StoreError(f"{path}: damaged, ends inside tensor '{name}'")
            array = np.frombuffer(
                self._map, kind, count=(end - start) // np.dtype(kind).itemsize, offset=base + start
            )
            self._arrays.append(array.reshape(entry["shape"][0], -1))
            self._offsets.append(base + start)
        if base + sum(array.nbytes for array in self._arrays) != length:
            raise StoreError(f"{path}: damaged, bytes too many or too few ({length})")

    def __len__(self) -> int:
        return len(self._arrays[0])

    def will_need(self, row: int) -> None:
        """Asks the system to fetch one network's pages before they are read."""
        for array, offset in zip(self._arrays, self._offsets, strict=True):
            size = array.shape[1] * array.itemsize
            first = (offset + row * size) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, offset + (row + 1) * size - first)

    def read(self, row: int, checksum: int, out: Sequence[np.ndarray], at: int) -> None:
        """Copies one network into row ``at`` of the arrays ``out``, after checking it."""
        if not 0 <= row < len(self):
            raise StoreError(f"{self.path}: row {row} asked, {len(self)} there")
        for target, source in zip(out, self._arrays, strict=True):
            target[at] = source[row]
        if row_checksum([memoryview(target[at]).cast("B") for target in out]) != checksum:
            raise StoreError(f"{self.path}: damaged, row {row} does not match its checksum")

    def buffers(self, rows: int) -> list[np.ndarray]:
        """Arrays for `read` to copy into."""
        return [np.empty((rows, array.shape[1]), array.dtype) for array in self._arrays]

    def forget(self) -> None:
        """Lets go of pages already read, so that memory does not grow with the zoo."""
        self._map.madvise(mmap.MADV_DONTNEED)
