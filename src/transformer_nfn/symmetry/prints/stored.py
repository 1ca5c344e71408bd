"""What is a fingerprint of a checkpoint, and how is it kept? Under 4 KiB, with its own checksum."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.symmetry.prints.blocks import NUMBERS, PARTS, SIZES

FORMAT = 1
"""Of the bytes and of how their numbers are made: prints of different formats do not compare."""
STEPS = 8
"""Steps of depth: models of any depth have as many numbers, each step a mean of its blocks."""
EMBEDDING = 64

Array: TypeAlias = "NDArray[np.floating]"

_MAGIC = b"TNFP"
_FIRST = struct.Struct("<4sH")
_HEADER = struct.Struct("<24sIIQ8sI")
_SHAPES: tuple[tuple[str, tuple[int, ...], np.dtype[np.floating]], ...] = (
    ("sketch", (STEPS, len(PARTS), NUMBERS), np.dtype("<f2")),
    ("embedding", (EMBEDDING,), np.dtype("<f2")),
    ("sizes", (STEPS, len(PARTS), SIZES), np.dtype("<f4")),
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
        sketch: ``[STEPS, PARTS, NUMBERS]`` answers by step of depth, each row of length √NUMBERS.
        embedding: ``[EMBEDDING]`` numbers of the Gram matrix of the frame's table.
        sizes: ``[STEPS, PARTS, SIZES]`` logarithms of sizes of heads and neurons.
    """

    family: str
    width: int
    depth: int
    weights: int
    frame: str
    rows: int
    sketch: Array
    embedding: Array
    sizes: Array

    def to_bytes(self) -> bytes:
        """The print as ``BYTES`` bytes, the last four a CRC-32 of the others."""
        head = _FIRST.pack(_MAGIC, FORMAT) + _HEADER.pack(
            self.family.encode()[:24], self.width, self.depth, self.weights,
            self.frame.encode(), self.rows,
        )  # fmt: skip
        numbers = (getattr(self, name).astype(dtype).tobytes() for name, _, dtype in _SHAPES)
        body = head + b"".join(numbers)
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
    words = [raw.rstrip(b"\0").decode(errors="replace") for raw in (family, frame)]
    return Print(words[0], width, depth, weights, words[1], rows, **arrays)


def check_format(found: int, where: str) -> None:
    """Refuses prints of another format."""
    if found != FORMAT:
        raise PrintError(
            f"{where}: fingerprints of format {found}, expected {FORMAT}; formats do not compare, "
            "take the fingerprints again with one version of transformer-nfn"
        )
