"""Single networks out of a shard, in any order, without loading the rest of it."""

from __future__ import annotations

import math
import os
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.tensor_files import TensorInfo, TensorPlace, parse_header
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store.shards import raw_header

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
