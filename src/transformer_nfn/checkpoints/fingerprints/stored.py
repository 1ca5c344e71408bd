"""Fingerprint of a checkpoint, and its bytes: under 5 KiB, with a checksum.

Rows of numbers are stored as 16-bit integers times a power of two of their own, so that a row has
its scale, and the numbers of a row one absolute precision.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from transformer_nfn.checkpoints.fingerprints.blocks import CONSTANTS, FEW, NUMBERS, PARTS, SIZES
from transformer_nfn.checkpoints.fingerprints.ends import END_NUMBERS, ENDS
from transformer_nfn.errors import TransformerNFNError

FORMAT = 2
"""Of the bytes and of how their numbers are made: prints of different formats do not compare."""
STEPS = 8
"""Steps of depth: models of any depth have as many numbers, each step a mean of its blocks."""
ROWS = (
    ("sketch", (STEPS, len(PARTS), NUMBERS)),
    ("constants", (STEPS, len(CONSTANTS), FEW)),
    ("ends", (len(ENDS), END_NUMBERS)),
)
"""The arrays of a print whose last axis is a row."""

Array: TypeAlias = "NDArray[np.floating]"

_MAGIC = b"TNFP"
_FIRST = struct.Struct("<4sH")
_HEADER = struct.Struct("<24sIIQ8sI")
_LARGEST = 32767
_SHAPES: tuple[tuple[str, tuple[int, ...], np.dtype[np.generic]], ...] = (
    *((name, shape, np.dtype("<i2")) for name, shape in ROWS),
    *((f"{name} exponent", shape[:-1], np.dtype("i1")) for name, shape in ROWS),
    *((f"{name}_noise", shape[:-1], np.dtype("<f4")) for name, shape in ROWS),
    ("sizes", (STEPS, len(PARTS), SIZES), np.dtype("<f2")),
)
_NUMBERS = sum(int(np.prod(shape)) * dtype.itemsize for _, shape, dtype in _SHAPES)
BYTES = _FIRST.size + _HEADER.size + _NUMBERS + 4
"""Length of every print of this format."""


class PrintError(TransformerNFNError):
    """A fingerprint or a database of them that cannot be read."""


@dataclass(frozen=True, eq=False)
class Print:
    """A checkpoint's fingerprint.

    Attributes:
        family: its architecture, such as ``gpt2``.
        width: of its stream.
        depth: how many blocks, of all stacks together.
        weights: how many numbers the checkpoint has.
        frame: what the vectors it answers to are sums of (``token``, ``patch``, ``head``,
            ``fixed``).
        rows: of that table that were summed. Prints compare where frame and rows agree.
        sketch: ``[STEPS, PARTS, NUMBERS]`` numbers of the parts of blocks, by step of depth.
        constants: ``[STEPS, CONSTANTS, FEW]`` numbers of biases and gains, by step of depth.
        ends: ``[ENDS, END_NUMBERS]`` numbers of embeddings, heads and what else is outside.
        sketch_noise: ``[STEPS, PARTS]`` expected length of the rounding error of each row.
        constants_noise: ``[STEPS, CONSTANTS]``, the same.
        ends_noise: ``[ENDS]``, the same.
        sizes: ``[STEPS, PARTS, SIZES]`` logarithms of sizes of heads and neurons.
    """

    family: str
    width: int
    depth: int
    weights: int
    frame: str
    rows: int
    sketch: Array
    constants: Array
    ends: Array
    sketch_noise: Array
    constants_noise: Array
    ends_noise: Array
    sizes: Array

    def to_bytes(self) -> bytes:
        """The print as ``BYTES`` bytes, the last four a CRC-32 of the others."""
        head = _FIRST.pack(_MAGIC, FORMAT) + _HEADER.pack(
            self.family.encode()[:24], self.width, self.depth, self.weights,
            self.frame.encode(), self.rows,
        )  # fmt: skip
        arrays = {name: getattr(self, name) for name, _, _ in _SHAPES if hasattr(self, name)}
        for name, _ in ROWS:
            arrays[name], arrays[f"{name} exponent"] = _integers(arrays[name])
        body = head + b"".join(arrays[name].astype(t).tobytes() for name, _, t in _SHAPES)
        return body + zlib.crc32(body).to_bytes(4, "little")

    @property
    def checksum(self) -> str:
        """Eight hexadecimal digits, the same for equal prints."""
        return self.to_bytes()[:-5:-1].hex()


def from_bytes(data: bytes, where: str) -> Print:
    """Reads what `Print.to_bytes` wrote.

    Args:
        data: the bytes.
        where: what errors call them.
    """
    if len(data) < _FIRST.size or data[:4] != _MAGIC:
        raise PrintError(f"{where}: not a fingerprint, its first bytes are no 'TNFP'")
    check_format(_FIRST.unpack_from(data)[1], where)
    if len(data) != BYTES:
        raise PrintError(f"{where}: damaged, expected {BYTES} bytes, found {len(data)}")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise PrintError(f"{where}: damaged, its bytes do not match their checksum")
    family, width, depth, weights, frame, rows = _HEADER.unpack_from(data, _FIRST.size)
    at, arrays = _FIRST.size + _HEADER.size, dict[str, Array]()
    for name, shape, dtype in _SHAPES:
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    for name, _ in ROWS:
        arrays[name] = np.ldexp(
            arrays[name].astype(np.float32), arrays.pop(f"{name} exponent")[..., None]
        )
    words = [raw.rstrip(b"\0").decode(errors="replace") for raw in (family, frame)]
    return Print(words[0], width, depth, weights, words[1], rows, **arrays)


def stored_rows(rows: Array) -> Array:
    """Rows as a print stores them: float32, rounded to 16 bits of their largest number."""
    integers, exponents = _integers(rows)
    return np.ldexp(integers.astype(np.float32), exponents[..., None])


def _integers(rows: Array) -> tuple[Array, Array]:
    """Rows ``[..., n]`` as integers of 16 bits times ``2^exponent``, one exponent for each."""
    wide = rows.astype(np.float64)
    largest = np.abs(wide).max(-1) / _LARGEST
    smallest, most = np.iinfo(np.int8).min, np.iinfo(np.int8).max
    exponents = np.ceil(np.log2(np.maximum(largest, 2.0**smallest))).clip(smallest, most)
    return np.rint(np.ldexp(wide, -exponents.astype(int)[..., None])), exponents.astype(int)


def check_format(found: int, where: str) -> None:
    """Refuses prints of another format."""
    if found != FORMAT:
        raise PrintError(
            f"{where}: fingerprints of format {found}, expected {FORMAT}; formats do not compare, "
            "take the fingerprints again with one version of transformer-nfn"
        )
