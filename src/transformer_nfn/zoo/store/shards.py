"""Shards: safetensors files of stacked networks, written at once and read row by row."""

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
import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io import tensor_files
from transformer_nfn.io.files import open_regular
from transformer_nfn.io.json_fields import parse_object
from transformer_nfn.io.tensor_files import TensorInfo, TensorPlace, parse_header, write_tensors
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.sizes import NetworkSizes

DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""Types in which weights can be stored."""
# Tensors with fewer bytes per row (biases) are prefetched as a whole: a page holds several rows.
SMALL = 1024


def write_shard(
    path: Path,
    sizes: NetworkSizes,
    weights: Tensor,
    rows: Sequence[Mapping[str, Any]],
    made: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write ``weights`` ``[checkpoints, weights]`` and their index rows as one safetensors file.

    Args:
        rows: index rows; those not crashed belong to the rows of ``weights`` in order.
        made: how the shard was made (JSON values), for the record.

    >>> from tempfile import mkdtemp
    >>> path, sizes = Path(mkdtemp()) / "00000.safetensors", NetworkSizes(16, 10, 4)
    >>> write_shard(path, sizes, torch.zeros(1, sizes.num_weights), [{"crashed": False}], {})
    >>> read_header(path).networks
    1
    """
    named = {name: w.to(dtype).contiguous() for name, w in sizes.to_named(weights).items()}
    arrays = [w.numpy() for w in named.values()]
    index: list[dict[str, Any]] = []
    at = 0
    for row in rows:
        if row["crashed"]:
            index.append({**row, "row": -1, "checksum": 0})
            continue
        checksum = 0
        for array in arrays:
            checksum = zlib.crc32(memoryview(array[at]).cast("B"), checksum)
        index.append({**row, "row": at, "checksum": checksum})
        at += 1
    if at != len(weights):
        raise StoreError(f"{path}: {at} index rows for {len(weights)} networks")
    body = json.dumps({"rows": index, "made": dict(made)}, allow_nan=True)
    metadata = {"index": body, "index_crc32": str(zlib.crc32(body.encode()))}
    write_tensors(path, named, metadata)


@dataclass(frozen=True)
class Header:
    """The index rows of a shard, how it was made, its checksum and its number of networks."""

    rows: list[dict[str, Any]]
    made: dict[str, Any]
    crc32: int
    networks: int


def _raw_header(path: Path) -> tuple[bytes, int]:
    """The bytes of a shard's header, and the length of the file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return tensor_files.raw_header(file.fileno(), str(path))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    except CheckpointError as error:
        raise StoreError(f"damaged: {error}") from error


def read_header(path: Path) -> Header:
    """Read and check the index rows of a shard, without its weights; see `write_shard`."""
    raw, length = _raw_header(path)
    try:
        _, metadata = parse_header(raw, length, str(path))
        body = metadata["index"]
        if zlib.crc32(body.encode()) != int(metadata["index_crc32"]):
            raise ValueError("its index does not match its checksum")
        index = parse_object(body, str(path), StoreError)
        networks = sum(1 for row in index["rows"] if not row["crashed"])
        return Header(index["rows"], index["made"], zlib.crc32(raw), networks)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(f"{path}: damaged header ({error})") from error


@dataclass(frozen=True)
class _Part:
    """One tensor of a shard: offset and length of its rows in the file, its bytes in a row."""

    offset: int
    row_bytes: int
    first: int
    last: int


class ShardReader:
    """Random access to the networks of a shard, with one positioned read per tensor.

    Mapping the file would cost twice as much: a fault per page, and pages that count as memory
    of this process.

    Args:
        header_crc32: checksum of the header according to the index; None does not check.
    """

    def __init__(self, path: Path, sizes: NetworkSizes, header_crc32: int | None = None) -> None:
        raw, length = _raw_header(path)
        if header_crc32 is not None and zlib.crc32(raw) != header_crc32:
            raise StoreError(f"{path}: damaged, its header does not match its checksum")
        try:
            places, _ = parse_header(raw, length, str(path))
            first = next(iter(places.values())).info
            self.dtype = DTYPES[first.dtype]
            self.numpy_dtype = np.dtype(first.dtype)
            self._rows = first.shape[0]
        except (CheckpointError, KeyError, IndexError, StopIteration) as error:
            raise StoreError(f"{path}: damaged header ({error})") from error
        self.path = path
        self._parts = self._lay_out(places, sizes)
        self._large = [part for part in self._parts if part.row_bytes >= SMALL]
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        # Rows are read in random order, so reading ahead would be wasted.
        _advise(self._file, 0, 0, "RANDOM")
        for part in self._parts:
            if part.row_bytes < SMALL:
                _advise(self._file, part.offset, part.row_bytes * self._rows, "WILLNEED")

    def _lay_out(self, places: dict[str, TensorPlace], sizes: NetworkSizes) -> list[_Part]:
        parts: list[_Part] = []
        at = 0
        for name, shape in sizes.space.shapes.items():
            expected = TensorInfo((self._rows, *shape), str(self.numpy_dtype))
            info = places[name].info if name in places else None
            if info != expected:
                raise StoreError(f"{self.path}: tensor '{name}' expected {expected}, found {info}")
            size = math.prod(shape) * self.numpy_dtype.itemsize
            parts.append(_Part(places[name].start, size, at, at + size))
            at += size
        if len(places) > len(parts):
            raise StoreError(f"{self.path}: damaged, holds tensors of no network")
        return parts

    def __len__(self) -> int:
        return self._rows

    def prefetch(self, row: int) -> None:
        """Ask the system to load the pages of one network; returns at once."""
        for part in self._large:
            _advise(self._file, part.offset + row * part.row_bytes, part.row_bytes, "WILLNEED")

    def read(self, row: int, checksum: int, out: np.ndarray) -> None:
        """Read one network into ``out`` ``[weights]``, its tensors in order, and check it."""
        if not 0 <= row < self._rows:
            raise StoreError(f"{self.path}: has no row {row}, only {self._rows} rows")
        view = memoryview(out.data).cast("B")
        for part in self._parts:
            target = [view[part.first : part.last]]
            if os.preadv(self._file, target, part.offset + row * part.row_bytes) != part.row_bytes:
                raise StoreError(f"{self.path}: damaged, ends inside row {row}")
        if zlib.crc32(view) != checksum:
            raise StoreError(f"{self.path}: damaged, row {row} does not match its checksum")


def _advise(file: int, start: int, size: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, size, getattr(os, f"POSIX_FADV_{advice}"))
