"""Tensors of a GGUF file, dequantised on reading, and the numbers that each stored one stands for.

The header is parsed here: the reader of the ``gguf`` package makes an object of every token of the
vocabulary, which takes seconds. Its dequantisation and its table of types are used.

A quantised weight stands for every number that its format rounds to it: half a step to either
side, further where the code is the first or last of its block, which also clips. Steps are
measured, not unpacked: a block with all codes at their lowest and one with all at their highest
are dequantised, and differ by the range of the block.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError, needs_extra
from transformer_nfn.io.tensor_files import (
    DTYPES,
    TensorInfo,
    TensorPlace,
    closed_on_error,
    open_handle,
    read_at,
)

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE, SPLIT = "general.architecture", "split.count"
PLAIN = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
"""Types of numbers that are stored as they are, named as in safetensors."""
# Formats of struct for the types of metadata, by the file's numbers; text and arrays are apart.
TEXT, ARRAY = 8, 9
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
LONGEST_ARRAY, LONGEST_TEXT = 4096, 1 << 16
"""Longer metadata belongs to tokenizers and is skipped."""
MAX_DIMS = 8


@dataclass(frozen=True)
class Grid:
    """How the codes of a quantised block are spaced.

    Attributes:
        codes: byte ranges of the codes in a block; the others hold scales.
        steps: range of a block in units of the widest gap between neighbouring values.
        lowest: byte of codes that all stand for the lowest value, with positive scales.
        highest: likewise for the highest one.
        clips: weights beyond the ends of a block are rounded to the ends.
    """

    codes: tuple[slice, ...]
    steps: float
    lowest: int = 0x00
    highest: int = 0xFF
    clips: bool = True


GRIDS = {
    "Q4_0": Grid((slice(2, 18),), 15),
    "Q4_1": Grid((slice(4, 20),), 15),
    "Q5_0": Grid((slice(2, 22),), 31),
    "Q5_1": Grid((slice(4, 24),), 31),
    "Q8_0": Grid((slice(2, 34),), 255, 0x80, 0x7F, clips=False),
    "Q2_K": Grid((slice(16, 80),), 3),
    "Q3_K": Grid((slice(0, 96),), 7),
    "Q4_K": Grid((slice(16, 144),), 15),
    "Q5_K": Grid((slice(16, 176),), 31),
    "Q6_K": Grid((slice(0, 192),), 63),
    "IQ4_NL": Grid((slice(2, 18),), 10),
    "IQ4_XS": Grid((slice(8, 136),), 10),
    "MXFP4": Grid((slice(1, 17),), 6, 0xFF, 0x77),
    "NVFP4": Grid((slice(4, 36),), 6, 0xFF, 0x77),
    "TQ1_0": Grid((slice(0, 52),), 2),
    "TQ2_0": Grid((slice(0, 64),), 2, 0x00, 0xAA),
}
"""Formats with one code for each weight. The others store indices of vectors, whose weights are
not rounded one by one."""
SLACK = 0.01
"""Part of a step that is allowed beyond half of one, for the arithmetic of who rounded."""
SCALE_ERROR = 2.0**-10
"""Of the largest value of a block: its scale and minimum are rounded to half precision after the
codes were chosen."""
CLIPPED = 0.5
"""Of the range of a block: how far beyond its ends a weight may be that was rounded to an end."""
SMALLEST = 2.0**-24
"""Scales below this are stored as zero."""


class GgufFile:
    """An open GGUF file; see `TensorSource`.

    Attributes:
        infos: quantised tensors are float32, see `TensorInfo.quantised`.
        fields: metadata by key, without long arrays; ``llama.attention.head_count``.
        metadata: empty.
    """

    def __init__(self, path: Path, where: str) -> None:
        self._where = where
        with needs_extra(CheckpointError, "gguf", "gguf", f"reading '{where}'"):
            import gguf
        self._gguf = gguf
        self._handle = open_handle(path, self._where)
        self._close = weakref.finalize(self, os.close, self._handle)
        with closed_on_error(self.close), os.fdopen(os.dup(self._handle), "rb") as file:
            try:
                self.fields, self._places = self._header(file)
            except (struct.error, OverflowError, UnicodeDecodeError) as error:
                _refuse(self._where, "its header is damaged or cut short", error)
        self.infos = {name: place.info for name, place in self._places.items()}
        self.metadata: Mapping[str, str] = {}

    def read(self, name: str) -> Tensor:
        """Read one tensor, dequantised to float32."""
        place = self._places[name]
        raw = read_at(self._handle, place.start, place.stop - place.start, self._where)
        if not place.info.quantised:
            return raw.view(getattr(torch, place.info.dtype)).reshape(place.info.shape)
        return self._values(raw.numpy(), place.info)

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Lowest and highest number that the format rounds to each stored one.

        None where a format does not round weights one by one.
        """
        place = self._places[name]
        grid = GRIDS.get(place.info.quantised)
        if grid is None:
            return None
        raw = read_at(self._handle, place.start, place.stop - place.start, self._where).numpy()
        value = self._values(raw, place.info)
        ends = []
        blocks = raw.reshape(-1, self._gguf.GGML_QUANT_SIZES[self._kind(place.info)][1])
        for fill in (grid.lowest, grid.highest):
            for codes in grid.codes:
                blocks[:, codes] = fill
            ends.append(self._values(raw, place.info))
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        span = high - low
        step = span / grid.steps
        half = (0.5 + SLACK) * step + SMALLEST * grid.steps
        half += SCALE_ERROR * torch.maximum(low.abs(), high.abs())
        beyond = torch.maximum(half, CLIPPED * span) if grid.clips else half
        down = torch.where(value <= low, beyond, half)
        up = torch.where(value >= high, beyond, half)
        return value - down, value + up

    def close(self) -> None:
        """Close the file."""
        self._close()

    def _values(self, raw: np.ndarray, info: TensorInfo) -> Tensor:
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)
        with np.errstate(all="ignore"):  # a damaged scale may be infinite, which is reported later
            values = self._gguf.quants.dequantize(rows, self._kind(info))
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(info.shape)

    def _kind(self, info: TensorInfo) -> GGMLQuantizationType:
        return self._gguf.GGMLQuantizationType[info.quantised]

    def _header(self, file: BinaryIO) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
        length = os.fstat(self._handle).st_size
        reader = _Reader(file, length, self._where)
        if file.read(4) != MAGIC:
            _refuse(self._where, "it does not begin with 'GGUF'")
        version, tensors, fields = (reader.number(form) for form in "IQQ")
        if version not in VERSIONS:
            _refuse(self._where, f"version {version} expected one of 2 and 3, little-endian")
        if 24 * tensors + 12 * fields > length:
            _refuse(self._where, f"it claims {tensors} tensors, and ends at byte {length}")
        found: dict[str, Any] = {}
        for _ in range(fields):
            key = reader.text()
            if key in found:
                _refuse(self._where, f"field '{key}' stands in it twice")
            found[key] = reader.value(reader.number("I"))
        if ARCHITECTURE not in found:
            _refuse(self._where, f"it does not state {ARCHITECTURE}")
        if found.get(SPLIT, 0) not in (0, 1):
            _refuse(self._where, f"it is one of {found[SPLIT]} parts: join them first")
        places: dict[str, TensorPlace] = {}
        for _ in range(tensors):
            name = reader.text()
            if name in places:
                _refuse(self._where, f"tensor '{name}' stands in it twice")
            places[name] = self._place(reader, name)
        alignment = found.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            _refuse(self._where, f"alignment expected a number above 0, found {alignment}")
        base = -(-file.tell() // alignment) * alignment
        for name, place in places.items():
            places[name] = TensorPlace(place.info, base + place.start, base + place.stop)
            if places[name].stop > length:
                ends = f"'{name}' ends at byte {places[name].stop}, the file at {length}"
                _refuse(self._where, f"{ends}: it was cut short")
        return found, places

    def _place(self, reader: _Reader, name: str) -> TensorPlace:
        """The next tensor, which starts at a byte after the header."""
        dims = reader.number("I")
        if not 0 < dims <= MAX_DIMS:
            _refuse(self._where, f"'{name}' expected 1 to {MAX_DIMS} axes, found {dims}")
        shape = tuple(reversed([reader.number("Q") for _ in range(dims)]))
        code, offset = reader.number("I"), reader.number("Q")
        try:
            kind = self._gguf.GGMLQuantizationType(code)
        except ValueError as error:
            _refuse(self._where, f"'{name}' has type {code}, which 'gguf' does not know", error)
        if not all(shape) or not self._is_read(kind):
            _refuse(self._where, f"'{name}' {list(shape)} in {kind.name} cannot be dequantised")
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            _refuse(self._where, f"'{name}' has rows of {shape[-1]}, {kind.name} needs {block}")
        info = TensorInfo(shape, "float32", kind.name)
        if kind.name in PLAIN:
            info = TensorInfo(shape, DTYPES[kind.name][0])
        return TensorPlace(info, offset, offset + math.prod(shape) // block * size)

    def _is_read(self, kind: GGMLQuantizationType) -> bool:
        if kind.name in PLAIN:
            return True
        block = np.zeros((1, self._gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            self._gguf.quants.dequantize(block, kind)
        except NotImplementedError:
            return False
        return True


class _Reader:
    """Reads the parts of a header; raises `struct.error` where the file ends."""

    def __init__(self, file: BinaryIO, length: int, where: str) -> None:
        self._file, self._length, self._where = file, length, where

    def number(self, form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._file.read(struct.calcsize(f"<{form}")))
        # 1e-5 in single precision is 9.99999974e-06 in double: the shortest digits are meant.
        return float(str(np.float32(value))) if form == "f" else value

    def text(self, limit: int = LONGEST_TEXT) -> str:
        size = self.number("Q")
        if size > limit:
            self._skip(size)
            return ""
        data = self._file.read(size)
        if len(data) < size:
            raise struct.error
        return data.decode()

    def value(self, kind: int) -> Any:
        """A value of metadata; None for a long array, and for one of text."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            _refuse(self._where, f"its header has a field of unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner == TEXT and 8 * count <= self._length:
            for _ in range(count):
                self._skip(self.number("Q"))
            return None
        if inner not in SCALARS:
            _refuse(self._where, f"its header has an array of type {inner}, {count} long")
        if count > LONGEST_ARRAY:
            self._skip(count * struct.calcsize(f"<{SCALARS[inner]}"))
            return None
        return [self.number(SCALARS[inner]) for _ in range(count)]

    def _skip(self, size: int) -> None:
        if self._file.tell() + size > self._length:
            raise struct.error
        self._file.seek(size, os.SEEK_CUR)


def _refuse(where: str, why: str, error: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"'{where}' is not a readable GGUF file: {why}") from error
