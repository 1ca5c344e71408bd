"""What is in a safetensors file? The header is read and checked, a tensor when it is asked for.

The format is eight bytes (the length of the header), a header in JSON, and the tensors one after
another. Reading it here, not through a map of the file, keeps memory at what was asked for and
lets every defect be told in one sentence.
"""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_nfn.io.errors import CheckpointError
from transformer_nfn.io.regular import open_regular
from transformer_nfn.io.source import TensorInfo
from transformer_nfn.io.whole import whole_file

# As in the format's reference implementation.
MAX_HEADER = 100_000_000
METADATA = "__metadata__"
# The file's word for a dtype, torch's word, and bits per number.
DTYPES = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "C64": ("complex64", 64),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
}


@dataclass(frozen=True)
class TensorPlace:
    """What one tensor is, and from which byte of the file to which it lies."""

    info: TensorInfo
    start: int
    stop: int


class SafetensorsFile:
    """An open safetensors file; see `TensorSource`.

    Args:
        path: the file.
        where: what errors call it.
    """

    def __init__(self, path: Path, where: str | None = None) -> None:
        self._where = str(path) if where is None else where
        try:
            self._handle = open_regular(path)
        except OSError as error:
            raise CheckpointError(
                f"'{self._where}' cannot be read: {error.strerror or error}"
            ) from error
        self._close = weakref.finalize(self, os.close, self._handle)
        try:
            raw, length = raw_header(self._handle, self._where)
            self._parts, self.metadata = parse_header(raw, length, self._where)
        except CheckpointError:
            self._close()
            raise
        self.infos = {name: part.info for name, part in self._parts.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, of any dtype that torch has."""
        part = self._parts[name]
        dtype = getattr(torch, part.info.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"'{self._where}': '{name}' holds {part.info.dtype}, which torch does not read"
            )
        data = read_at(self._handle, part.start, part.stop - part.start, self._where)
        return data.view(dtype).reshape(part.info.shape)

    def close(self) -> None:
        """Closes the file."""
        self._close()


def read_at(handle: int, start: int, size: int, where: str) -> Tensor:
    """Some bytes of an open file, as a tensor of bytes."""
    data = torch.empty(size, dtype=torch.uint8)
    view = data.numpy().data
    done = 0
    while done < size:  # one call reads two gigabytes at most
        try:
            got = os.preadv(handle, [view[done:]], start + done)
        except OSError as error:
            raise CheckpointError(f"'{where}' cannot be read: {error.strerror}") from error
        if got == 0:
            raise CheckpointError(f"'{where}' ends at byte {start + done}: it was cut short")
        done += got
    return data


def raw_header(handle: int, where: str) -> tuple[bytes, int]:
    """The bytes of the header, and the length of the file."""
    length = os.fstat(handle).st_size
    head = os.pread(handle, 8, 0)
    if len(head) < 8:
        _refuse(where, f"it has {len(head)} bytes, a header needs at least 8")
    (size,) = struct.unpack("<Q", head)
    if size > length - 8:
        _refuse(where, f"its header claims {size} bytes, {length - 8} are there")
    if size > MAX_HEADER:
        _refuse(where, f"its header claims {size} bytes, at most {MAX_HEADER} are allowed")
    return os.pread(handle, size, 8), length


def parse_header(
    raw: bytes, length: int, where: str
) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Where each tensor lies, and the metadata; checks that the tensors fill the file."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise TypeError(f"it is a {type(header).__name__}")
        for name in header:
            name.encode()  # JSON can spell names that no text can hold
    except UnicodeError as error:
        _refuse(where, f"its header is not UTF-8 ({error})", error)
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        _refuse(where, f"its header is not an object in JSON ({error})", error)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(where, "its metadata is not text by name")
    base = 8 + len(raw)
    parts = {name: _part(name, entry, base, length, where) for name, entry in header.items()}
    _check_tiling(parts, base, length, where)
    return parts, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{twice}' stands in it twice")
    return out


def _part(name: str, entry: Any, base: int, length: int, where: str) -> TensorPlace:
    try:
        code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        _refuse(where, f"tensor '{name}' has no dtype, shape and two offsets", error)
    sizes = [*shape, start, stop] if isinstance(shape, list) else [None]
    if not isinstance(code, str) or not all(type(n) is int and 0 <= n < 2**63 for n in sizes):
        _refuse(where, f"tensor '{name}' has a malformed dtype, shape or offset")
    if start > stop or base + stop > length:
        _refuse(
            where,
            f"tensor '{name}' lies at bytes {base + start} to {base + stop}, the file has {length}",
        )
    word, bits = DTYPES.get(code, (code, 0))
    size = math.prod(shape) * bits // 8
    if bits and size != stop - start:
        _refuse(
            where,
            f"tensor '{name}' of shape {shape} in {word} expected {size} bytes, found "
            f"{stop - start}",
        )
    return TensorPlace(TensorInfo(tuple(shape), word), base + start, base + stop)


def _check_tiling(parts: Mapping[str, TensorPlace], base: int, length: int, where: str) -> None:
    """Every byte belongs to one tensor: the format allows neither overlaps nor holes."""
    at, before = base, ""
    for name, part in sorted(parts.items(), key=lambda item: (item[1].start, item[1].stop)):
        if part.start < at:
            _refuse(where, f"tensors '{before}' and '{name}' overlap at byte {part.start}")
        if part.start > at:
            _refuse(where, f"bytes {at} to {part.start} belong to no tensor")
        at, before = part.stop, name
    if at != length:
        _refuse(where, f"bytes {at} to {length} belong to no tensor")


def _refuse(where: str, why: str, error: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"'{where}' is not a readable safetensors file: {why}") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of a file and its metadata; for the library's own small files."""
    file = SafetensorsFile(path)
    try:
        return {name: file.read(name) for name in file.infos}, file.metadata
    finally:
        file.close()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    kept = {name: w.detach().cpu().contiguous() for name, w in tensors.items()}
    with whole_file(path) as beside:
        try:
            save_file(kept, beside, None if metadata is None else dict(metadata))
        except SafetensorError as error:
            raise OSError(str(error)) from error
