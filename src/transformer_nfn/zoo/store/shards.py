"""Shards: safetensors files with a row of weights for each network, read row by row."""

from __future__ import annotations

import json
import os
import threading
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
from transformer_nfn.models.batch import RowLayout
from transformer_nfn.zoo.errors import StoreError

DTYPES = {"float32": torch.float32, "float16": torch.float16}
"""Types in which weights can be stored."""
WEIGHTS = "weights"
"""The only tensor of a shard, ``[networks, numbers]``."""


def write_shard(
    path: Path,
    layout: RowLayout,
    weights: Tensor,
    rows: Sequence[Mapping[str, Any]],
    made: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Header:
    """Write rows of weights ``[networks, numbers]`` and their index rows as one safetensors file.

    Args:
        layout: of a row of weights.
        rows: index rows; those not crashed belong to the rows of ``weights`` in order.
        made: how the shard was made (JSON values), for the record.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "00000.safetensors"
    >>> layout = RowLayout({"W": (2, 3)})
    >>> write_shard(path, layout, torch.zeros(1, 6), [{"crashed": False}], {}).networks
    1
    """
    if weights.ndim != 2 or weights.shape[1] != layout.width:
        raise StoreError(
            f"{path}: rows of {layout.width} numbers expected, found {list(weights.shape)}"
        )
    stored = weights.to(dtype).contiguous()
    sums = [zlib.crc32(memoryview(row).cast("B")) for row in stored.numpy()]
    index: list[dict[str, Any]] = []
    at = 0
    for row in rows:
        if row["crashed"]:
            index.append({**row, "row": -1, "checksum": 0})
            continue
        index.append({**row, "row": at, "checksum": sums[at] if at < len(sums) else 0})
        at += 1
    if at != len(weights):
        raise StoreError(f"{path}: {at} index rows for {len(weights)} networks")
    body = json.dumps({"rows": index, "made": dict(made)}, allow_nan=True)
    metadata = {"layout": layout_text(layout), "index": body}
    metadata["index_crc32"] = str(zlib.crc32(body.encode()))
    write_tensors(path, {WEIGHTS: stored}, metadata)
    return read_header(path)


def layout_text(layout: RowLayout) -> str:
    """Names and shapes of the tensors in a row, as JSON."""
    return json.dumps({name: list(shape) for name, shape in layout.shapes.items()})


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


class ShardReader:
    """Random access to the networks of a shard, with one read for each.

    Mapping the file would cost twice as much: a fault per page, and pages that count as memory
    of this process.

    Args:
        layout: that rows have to have.
        header_crc32: checksum of the header according to the index; None does not check.
    """

    def __init__(self, path: Path, layout: RowLayout, header_crc32: int | None = None) -> None:
        raw, length = _raw_header(path)
        if header_crc32 is not None and zlib.crc32(raw) != header_crc32:
            raise StoreError(f"{path}: damaged, its header does not match its checksum")
        try:
            places, metadata = parse_header(raw, length, str(path))
            place = places[WEIGHTS]
            self.dtype = DTYPES[place.info.dtype]
            self._rows, width = place.info.shape
            stored = parse_object(metadata["layout"], str(path), StoreError)
        except (CheckpointError, KeyError, ValueError) as error:
            raise StoreError(f"{path}: damaged header ({error})") from error
        self.path, self.numpy_dtype = path, np.dtype(place.info.dtype)
        self._check_layout(stored, layout, places)
        self._start, self._row_bytes = place.start, width * self.numpy_dtype.itemsize
        self._file, self._lock = path.open("rb", buffering=0), threading.Lock()
        weakref.finalize(self, self._file.close)
        # Rows are read in random order, so reading ahead would be wasted.
        _advise(self._file.fileno(), 0, 0, "RANDOM")

    def _check_layout(
        self, stored: Mapping[str, Any], layout: RowLayout, places: Mapping[str, TensorPlace]
    ) -> None:
        for name, shape in layout.shapes.items():
            if (found := stored.get(name)) != list(shape):
                raise StoreError(f"{self.path}: '{name}' expected {list(shape)}, found {found}")
        expected = TensorInfo((self._rows, layout.width), str(self.numpy_dtype))
        if list(stored) != list(layout.shapes) or {*places} != {WEIGHTS}:
            raise StoreError(f"{self.path}: damaged, holds tensors of no network")
        if places[WEIGHTS].info != expected:
            raise StoreError(
                f"{self.path}: '{WEIGHTS}' expected {expected}, found {places[WEIGHTS].info}"
            )

    def __len__(self) -> int:
        return self._rows

    def prefetch(self, row: int) -> None:
        """Ask the system to load the pages of one network; returns at once."""
        start = self._start + row * self._row_bytes
        _advise(self._file.fileno(), start, self._row_bytes, "WILLNEED")

    def read(self, row: int, checksum: int, out: np.ndarray) -> None:
        """Read one network into ``out`` ``[numbers]``, and check it."""
        if not 0 <= row < self._rows:
            raise StoreError(f"{self.path}: has no row {row}, only {self._rows} rows")
        view = memoryview(out.data).cast("B")
        if self._read_at(self._start + row * self._row_bytes, view) != self._row_bytes:
            raise StoreError(f"{self.path}: damaged, ends inside row {row}")
        if zlib.crc32(view) != checksum:
            raise StoreError(f"{self.path}: damaged, row {row} does not match its checksum")

    def _read_at(self, start: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):  # keeps no position, which workers would share
            return os.preadv(self._file.fileno(), [view], start)
        with self._lock:
            self._file.seek(start)
            return self._file.readinto(view)


def _advise(file: int, start: int, size: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, size, getattr(os, f"POSIX_FADV_{advice}"))
