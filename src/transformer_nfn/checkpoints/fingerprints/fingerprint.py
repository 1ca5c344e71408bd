"""Fingerprint of a checkpoint: its layout, its bytes (under 5 KiB) and the comparison of two.

Rows of numbers are stored as 16-bit integers times a power of two: each row keeps its scale, and
the numbers of a row share one absolute precision.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transformer_nfn.errors import TransformerNFNError

FORMAT = 6
"""Of the bytes and of how their numbers are computed; different formats do not compare."""
STEPS = 8
"""Steps of depth: each is a mean over its blocks, so that models of any depth have as many."""
PARTS = ("QK", "VO", "MLP")
PART_NUMBERS = 64
CONSTANTS = ("QK biases", "attention bias", "MLP input bias", "MLP bias", "norm gains")
CONSTANT_NUMBERS = 8
HEADS = ("QK with VO",)
HEAD_NUMBERS = 8
ENDS = (
    "embedding", "position", "token type", "input constant", "input norm", "head", "head bias",
    "pooler", "pooler bias", "other tensors",
)  # fmt: skip
"""Rows outside the blocks. ``head`` includes the final norm, and is that norm alone where the
stream is the output."""
END_NUMBERS = 24
QUANTILES = (0.05, 0.35, 0.65, 0.95)
"""Of the sizes of heads and neurons."""
ROWS = (
    ("sketch", (STEPS, len(PARTS), PART_NUMBERS)),
    ("constants", (STEPS, len(CONSTANTS), CONSTANT_NUMBERS)),
    ("ends", (len(ENDS), END_NUMBERS)),
    ("heads", (STEPS, len(HEADS), HEAD_NUMBERS)),
)
"""Arrays of a fingerprint whose last axis is a row."""

TOLERANCE = {"sketch": 3.0, "constants": 6.0, "ends": 3.0, "heads": 3.0}
"""Expected rounding errors that a row may differ by. Disguises of nine families in float32 at
conditions 1e3 and 1e5, twelve seeds of one and six of the others, differ by 1.5 at most, constants
by 3.5: one or two large errors may make up a bias with others folded in."""
STORED = 4.5e-5
"""Rounding of a row to 16 bits, in units of its length: at most that of 64 normal numbers."""
WEIGHTS = {"sketch": 0.8, "constants": 0.1, "ends": 0.1, "heads": 1e-4}
"""Shares of the squared distance: blocks identify a model, heads are replaced in fine-tunes. Which
QK belongs to which VO shows a change and hardly counts: both have their share already."""
NEAR = 0.6
"""A step of depth with at least this cosine agrees: fine-tuned, pruned and averaged models have 0.8
and more, those retrained for as long as they were trained about 0.4."""
FINE_TUNED = 0.5
"""Largest distance attributed to fine-tuning: real fine-tunes have 0.17 to 0.46, small models with
one block of three replaced 0.52 and more."""
HINT = 0.3
"""Least mean cosine of related models: those retrained for as long as they were trained keep 0.32
to 0.45, unrelated models of the same text reach 0.27, most of it in the first block."""
SAME_EMBEDDINGS = 0.9
"""Least cosine of embeddings that were copied."""
LISTED = 4
"""Largest number of changed rows that a summary lists."""
MEANING = (
    "distance 0: same up to rounding; to 0.03: int8, or a few weights edited; to 0.5: fine-tuned, "
    "pruned, averaged; to 0.85: retrained, or a part replaced; above: unrelated, or only "
    "embeddings in common. A fingerprint suggests candidates; `tnfn compare` decides."
)

Array: TypeAlias = "NDArray[np.floating]"

_MAGIC = b"TNFP"
_FIRST = struct.Struct("<4sH")
_HEADER = struct.Struct("<24sIIQ8sI8s")
_LARGEST = 32767
_SHAPES: tuple[tuple[str, tuple[int, ...], np.dtype[np.generic]], ...] = (
    *((name, shape, np.dtype("<i2")) for name, shape in ROWS),
    *((f"{name} exponent", shape[:-1], np.dtype("i1")) for name, shape in ROWS),
    *((f"{name}_noise", shape[:-1], np.dtype("<f4")) for name, shape in ROWS),
    ("sizes", (STEPS, len(PARTS), len(QUANTILES)), np.dtype("<f2")),
)
_NUMBERS = sum(int(np.prod(shape)) * dtype.itemsize for _, shape, dtype in _SHAPES)
BYTES = _FIRST.size + _HEADER.size + _NUMBERS + 4
"""Length of every fingerprint of this format."""


class FingerprintError(TransformerNFNError):
    """A fingerprint or a database of them that cannot be read."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Fingerprint of a checkpoint.

    Attributes:
        family: architecture, such as ``gpt2``.
        width: of the stream.
        depth: number of blocks, all stacks together.
        weights: number of weights of the checkpoint.
        frame: the table whose sums are the input vectors: ``token``, ``patch``, ``head`` or
            ``fixed``.
        rows: of that table that were summed. Fingerprints compare where frame and rows agree.
        settings: digest of whatever decides the function beside the tensors, eight bytes.
        sketch: ``[STEPS, PARTS, PART_NUMBERS]`` numbers of the parts of blocks, by step of depth.
        constants: ``[STEPS, CONSTANTS, CONSTANT_NUMBERS]`` numbers of biases and gains.
        ends: ``[ENDS, END_NUMBERS]`` numbers of embeddings, heads and all else outside the blocks.
        heads: ``[STEPS, HEADS, HEAD_NUMBERS]`` numbers of QK and VO of each head together.
        sketch_noise: ``[STEPS, PARTS]`` expected length of the rounding error of each row.
        constants_noise: ``[STEPS, CONSTANTS]``, the same.
        ends_noise: ``[ENDS]``, the same.
        heads_noise: ``[STEPS, HEADS]``, the same.
        sizes: ``[STEPS, PARTS, QUANTILES]`` logarithms of the sizes of heads and neurons.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> from transformer_nfn.checkpoints.fingerprints import take_fingerprint
    >>> with open_model(write_example_checkpoint("model")) as model:
    ...     data = take_fingerprint(model).to_bytes()
    >>> len(data), Fingerprint.from_bytes(data, "model").family
    (4992, 'llama')
    """

    family: str
    width: int
    depth: int
    weights: int
    frame: str
    rows: int
    settings: bytes
    sketch: Array
    constants: Array
    ends: Array
    heads: Array
    sketch_noise: Array
    constants_noise: Array
    ends_noise: Array
    heads_noise: Array
    sizes: Array

    def to_bytes(self) -> bytes:
        """The fingerprint as ``BYTES`` bytes, the last four a CRC-32 of the others."""
        head = _FIRST.pack(_MAGIC, FORMAT) + _HEADER.pack(
            self.family.encode()[:24], self.width, self.depth, self.weights,
            self.frame.encode(), self.rows, self.settings,
        )  # fmt: skip
        arrays = {name: getattr(self, name) for name, _, _ in _SHAPES if hasattr(self, name)}
        for name, _ in ROWS:
            arrays[name], arrays[f"{name} exponent"] = _integers(arrays[name])
        body = head + b"".join(arrays[name].astype(t).tobytes() for name, _, t in _SHAPES)
        return body + zlib.crc32(body).to_bytes(4, "little")

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Fingerprint:
        """Read what `to_bytes` wrote."""
        if len(data) < _FIRST.size or data[:4] != _MAGIC:
            raise FingerprintError(f"{where}: not a fingerprint, it does not begin with 'TNFP'")
        check_format(_FIRST.unpack_from(data)[1], where)
        if len(data) != BYTES:
            raise FingerprintError(f"{where}: damaged, expected {BYTES} bytes, found {len(data)}")
        if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise FingerprintError(f"{where}: damaged, its bytes do not match their checksum")
        header = _HEADER.unpack_from(data, _FIRST.size)
        at, arrays = _FIRST.size + _HEADER.size, dict[str, Array]()
        for name, shape, dtype in _SHAPES:
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += count * dtype.itemsize
        for name, _ in ROWS:
            exponents = arrays.pop(f"{name} exponent")
            arrays[name] = np.ldexp(arrays[name].astype(np.float32), exponents[..., None])
        family, width, depth, weights, frame, rows, settings = header
        family, frame = (raw.rstrip(b"\0").decode(errors="replace") for raw in (family, frame))
        return Fingerprint(family, width, depth, weights, frame, rows, settings, **arrays)

    @property
    def checksum(self) -> str:
        """Eight hexadecimal digits, the same for equal fingerprints."""
        return self.to_bytes()[:-5:-1].hex()


@dataclass(frozen=True)
class FingerprintComparison:
    """Comparison of two fingerprints.

    Attributes:
        distance: root mean square distance of all rows beyond what rounding explains, each in
            units of both rows' length: 0 for disguises of one model, about 1 for unrelated ones.
        changed: rows that differ by more than rounding explains, each with its distance; and
            settings, such as an activation, at distance 1.
        unchanged: share of all rows that do not.
        score: mean cosine of all parts at all steps of depth: 1 for disguises, about 0 for
            unrelated models.
        parts: mean cosine of each part over the depth.
        depth: mean cosine of each step of depth over the parts.
        embedding: cosine of the numbers of the embeddings; None where they do not compare, or have
            fewer rows than the width: nearly orthogonal rows are similar in unrelated models too.
        sizes: root mean square difference of the logarithms of sizes: 0 for disguises.
        comparable: whether both sum as many rows of the same table. Where they do not, a distance
            near 1 means nothing.
    """

    distance: float
    changed: Mapping[str, float]
    unchanged: float
    score: float
    parts: Mapping[str, float]
    depth: tuple[float, ...]
    embedding: float | None
    sizes: float
    comparable: bool

    def summary(self) -> str:
        """Summary of what agrees."""
        if not self.comparable:
            return "not comparable: other vocabulary or inputs"
        if not self.changed:
            return "same up to rounding"
        if len(self.changed) <= LISTED and self.unchanged >= 0.5:
            return f"same but for {', '.join(self.changed)}"
        near = [step for step, score in enumerate(self.depth) if score >= NEAR]
        if len(near) == STEPS:
            near_enough = self.distance <= FINE_TUNED
            return "all blocks" + (", as near as fine-tunes were" if near_enough else "")
        if near:
            return f"blocks at {_ranges(near)} of the depth"
        if self.score >= HINT:
            return "distantly related"
        if self.embedding is not None and self.embedding >= SAME_EMBEDDINGS:
            return "embeddings only"
        return "nothing"

    def as_json(self) -> dict[str, Any]:
        """All fields and the summary, as JSON values."""
        return {**asdict(self), "alike": self.summary()}


def compare_fingerprints(a: Fingerprint, b: Fingerprint) -> FingerprintComparison:
    """Compare two fingerprints.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> from transformer_nfn.checkpoints.fingerprints import take_fingerprint
    >>> a, b = (write_example_checkpoint(f"model-{seed}", seed) for seed in (0, 1))
    >>> with open_model(a) as A, open_model(b) as B:
    ...     compare_fingerprints(take_fingerprint(A), take_fingerprint(B)).summary()
    'nothing'
    """
    comparable = a.frame == b.frame and a.rows == b.rows
    squares = _distances(a, b)
    present = np.concatenate([x[~np.isnan(x)] for x in squares.values()])
    cosines = (_units(a.sketch) * _units(b.sketch)).sum(-1)
    embedding = None
    if comparable and a.frame != "fixed" and a.rows >= max(a.width, b.width):
        embedding = float((_units(a.ends[0]) * _units(b.ends[0])).sum())
    changed = _changed(squares)
    if a.settings != b.settings:
        changed["settings"] = 1.0
    return FingerprintComparison(
        _joined(squares),
        changed,
        float((present == 0).mean()) if len(present) else 1.0,
        float(cosines.mean()),
        {part: float(x) for part, x in zip(PARTS, cosines.mean(0), strict=True)},
        tuple(float(x) for x in cosines.mean(1)),
        embedding,
        float(np.sqrt(np.square(a.sizes.astype(np.float64) - b.sizes).mean())),
        comparable,
    )


def stored_rows(rows: Array) -> Array:
    """Rows as a fingerprint stores them: float32, rounded to 16 bits of their largest number."""
    integers, exponents = _integers(rows)
    return np.ldexp(integers.astype(np.float32), exponents[..., None])


def check_format(version: int, where: str) -> None:
    """Raise an error for fingerprints of another format."""
    if version != FORMAT:
        raise FingerprintError(
            f"{where}: fingerprints of format {version}, expected {FORMAT}; take the fingerprints "
            "again with one version of transformer-nfn"
        )


def _integers(rows: Array) -> tuple[Array, Array]:
    """Rows ``[..., n]`` as integers of 16 bits times ``2^exponent``, one exponent for each."""
    wide = rows.astype(np.float64)
    largest = np.abs(wide).max(-1) / _LARGEST
    smallest, most = np.iinfo(np.int8).min, np.iinfo(np.int8).max
    exponents = np.ceil(np.log2(np.maximum(largest, 2.0**smallest))).clip(smallest, most)
    return np.rint(np.ldexp(wide, -exponents.astype(int)[..., None])), exponents.astype(int)


def _distances(a: Fingerprint, b: Fingerprint) -> dict[str, Array]:
    """Squared distances of rows beyond rounding, in units of both; NaN where both are zero."""
    out = {}
    for name, _ in ROWS:
        x, y = (getattr(p, name).astype(np.float64) for p in (a, b))
        noise = sum(np.square(getattr(p, f"{name}_noise").astype(np.float64)) for p in (a, b))
        length = np.square(x).sum(-1) + np.square(y).sum(-1)
        explained = TOLERANCE[name] ** 2 * (noise + STORED**2 * length)
        beyond = np.maximum(np.square(x - y).sum(-1) - explained, 0.0)
        out[name] = beyond / np.where(length > 0, length, np.nan)
    return out


def _joined(squares: Mapping[str, Array]) -> float:
    """One distance from the squared distances of all rows."""
    total = weight = 0.0
    for name, x in squares.items():
        present = x[~np.isnan(x)]
        if len(present):
            total += WEIGHTS[name] * float(present.mean())
            weight += WEIGHTS[name]
    return float((total / max(weight, 1e-300)) ** 0.5)


def _changed(squares: Mapping[str, Array]) -> dict[str, float]:
    """Rows that differ beyond rounding, by name and depth."""
    out = {}
    for name, names in (("sketch", PARTS), ("heads", HEADS), ("constants", CONSTANTS)):
        for i, part in enumerate(names):
            steps = [int(step) for step in np.flatnonzero(squares[name][:, i] > 0)]
            if steps:
                at = f"{part} at {_ranges(steps)} of the depth"
                out[at] = float(np.sqrt(np.nanmax(squares[name][:, i])))
    ends = zip(ENDS, squares["ends"], strict=True)
    return out | {name: float(np.sqrt(x)) for name, x in ends if x > 0}


def _units(x: Array) -> Array:
    wide = x.astype(np.float64)
    length = np.sqrt(np.square(wide).sum(-1, keepdims=True))
    units: Array = wide / np.maximum(length, 1e-300)
    return units


def _ranges(steps: list[int]) -> str:
    """``0-25 %, 50-100 %`` for steps 0, 1, 4, 5, 6, 7."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step:
            ranges[-1][1] = step + 1
        else:
            ranges.append([step, step + 1])
    percent = 100 / STEPS
    return ", ".join(f"{start * percent:.0f}-{stop * percent:.0f} %" for start, stop in ranges)
