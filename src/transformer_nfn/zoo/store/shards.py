"""Shards: safetensors files of stacked networks, written whole and read row by row."""

from __future__ import annotations

import json
import math
import os
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io import tensor_files
from transformer_nfn.io.files import open_regular, write_bytes
from transformer_nfn.io.tensor_files import TensorInfo, TensorPlace, parse_header
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


# Tensors with fewer bytes a row (biases) are fetched whole: a page holds several rows anyway.
SMALL = 1024
DTYPES = {"float32": (torch.float32, np.float32), "float16": (torch.float16, np.float16)}


@dataclass(frozen=True)
class _Part:
    """One tensor of a shard: where its rows lie in the file, and where in a flat row."""

    offset: int
    row_bytes: int
    first: int
    last: int


class ShardReader:
    """A shard whose rows are read in place, each with one positioned read a tensor.

    A map of the file would do the same at twice the cost: a page fault for every page, and
    pages that count as this process's memory until they are given back.

    Args:
        header_crc32: what the index says the header hashes to; None does not check.
    """

    def __init__(self, path: Path, arch: NetworkSizes, header_crc32: int | None = None) -> None:
        raw, length = raw_header(path)
        if header_crc32 is not None and zlib.crc32(raw) != header_crc32:
            raise StoreError(f"{path}: damaged, its header does not match its checksum")
        try:
            places, _ = parse_header(raw, length, str(path))
            first = next(iter(places.values())).info
            self.dtype, kind = DTYPES[first.dtype]
            self._rows = first.shape[0]
        except (CheckpointError, KeyError, IndexError, StopIteration) as error:
            raise StoreError(f"{path}: damaged header ({error})") from error
        self.path, self.kind = path, np.dtype(kind)
        self._parts = self._lay_out(places, arch)
        self._large = [part for part in self._parts if part.row_bytes >= SMALL]
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        # Rows are read in no order, so what lies around one is not worth reading with it.
        _advise(self._file, 0, 0, "RANDOM")
        for part in self._parts:
            if part.row_bytes < SMALL:
                _advise(self._file, part.offset, part.row_bytes * self._rows, "WILLNEED")

    def _lay_out(self, places: dict[str, TensorPlace], arch: NetworkSizes) -> list[_Part]:
        parts: list[_Part] = []
        at = 0
        dtype = str(self.kind)
        for name, shape in arch.space.shapes.items():
            expected = TensorInfo((self._rows, *shape), dtype)
            found = places[name].info if name in places else None
            if found != expected:
                raise StoreError(
                    f"{self.path}: tensor '{name}' expected {expected}, found {found}"
                )
            size = math.prod(shape) * self.kind.itemsize
            parts.append(_Part(places[name].start, size, at, at + size))
            at += size
        if len(places) > len(parts):
            raise StoreError(f"{self.path}: damaged, tensors that are no network's")
        return parts

    def __len__(self) -> int:
        return self._rows

    def will_need(self, row: int) -> None:
        """Asks the system to fetch one network's pages; returns before they are there."""
        for part in self._large:
            _advise(self._file, part.offset + row * part.row_bytes, part.row_bytes, "WILLNEED")

    def read(self, row: int, checksum: int, out: np.ndarray) -> None:
        """Copies one network into ``out`` ``[weights]``, its tensors in order, and checks it."""
        if not 0 <= row < self._rows:
            raise StoreError(f"{self.path}: row {row} asked, {self._rows} there")
        view = memoryview(out.data).cast("B")
        for part in self._parts:
            target = [view[part.first : part.last]]
            if os.preadv(self._file, target, part.offset + row * part.row_bytes) != part.row_bytes:
                raise StoreError(f"{self.path}: damaged, ends inside row {row}")
        if zlib.crc32(view) != checksum:
            raise StoreError(f"{self.path}: damaged, row {row} does not match its checksum")


def _advise(file: int, start: int, size: int, what: str) -> None:
    # Advice only; systems without it read a little slower.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, size, getattr(os, f"POSIX_FADV_{what}"))
