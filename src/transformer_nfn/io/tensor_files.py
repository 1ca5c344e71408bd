"""Tensors in one file: safetensors, and state dicts of ``torch.save``.

Safetensors files are parsed here instead of mapped, which bounds memory by what is read and lets
every defect be reported in one sentence. State dicts are loaded with ``weights_only``, so that no
code in them runs.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import re
import struct
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError
from transformer_nfn.io.files import atomic_file, explained_read, open_regular
from transformer_nfn.io.json_fields import distinct

WEIGHT_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")
}
"""Dtypes of weights; tensors of other dtypes are listed and not read."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor that is not read yet.

    Attributes:
        shape: of the tensor.
        dtype: as torch names it, without ``torch.``; as the file names it where torch has none.
        quantised: format that the numbers were rounded to where that is coarser than the dtype,
            such as ``Q4_1``; its source has `QuantisedSource.interval`.

    >>> str(TensorInfo.of(torch.zeros(2, 3)))
    '[2, 3] in float32'
    """

    shape: tuple[int, ...]
    dtype: str
    quantised: str = ""

    def __str__(self) -> str:
        return f"{list(self.shape)} in {self.quantised or self.dtype}"

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The torch dtype; None if it is no dtype of weights."""
        return WEIGHT_DTYPES.get(self.dtype)

    @staticmethod
    def of(tensor: Tensor) -> TensorInfo:
        """Shape and dtype of a tensor in memory."""
        return TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class TensorSource(Protocol):
    """Interface of a lazy tensor source, which `Checkpoint` makes a mapping of.

    A source raises `CheckpointError` where the bytes do not match its header. `Checkpoint` reads
    only names in ``infos``.
    """

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor by name."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the file."""

    def read(self, name: str) -> Tensor:
        """Read one tensor: contiguous, on the CPU, not shared."""

    def close(self) -> None:
        """Close the files."""


class InMemory:
    """Tensors in memory, such as those of a network of a zoo; see `TensorSource`.

    >>> InMemory({"W": torch.ones(2, 3)}).infos["W"].shape
    (2, 3)
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None):
        self._tensors = tensors
        self.infos = {name: TensorInfo.of(w) for name, w in tensors.items()}
        self.metadata: Mapping[str, str] = {} if metadata is None else metadata

    def read(self, name: str) -> Tensor:
        """A copy of one tensor."""
        return self._tensors[name].contiguous().clone()

    def close(self) -> None:
        """Nothing is open."""


@runtime_checkable
class QuantisedSource(TensorSource, Protocol):
    """A source with tensors that were rounded to a coarser format than their dtype."""

    def interval(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Lowest and highest number that the format rounds to each stored one.

        None where the format does not round weights one by one, or the tensor is not quantised.
        """


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
CODES = {word: code for code, (word, _) in DTYPES.items()}


def byte_count(info: TensorInfo) -> int:
    """Bytes of a tensor in a file."""
    return math.prod(info.shape) * DTYPES[CODES[info.dtype]][1] // 8


class TensorPlace(NamedTuple):
    """A tensor of a file and its byte range."""

    info: TensorInfo
    start: int
    stop: int


@contextmanager
def closed_on_error(close: Callable[[], None]) -> Iterator[None]:
    """Close files where the rest of their opening fails."""
    try:
        yield
    except BaseException:
        close()
        raise


def open_handle(path: Path, where: str) -> int:
    """Descriptor of a regular file; ``where`` is its name in errors."""
    with explained_read(where, CheckpointError):
        return open_regular(path)


class SafetensorsFile:
    """An open safetensors file; see `TensorSource`.

    Args:
        path: the file.
        where: name in errors.
    """

    def __init__(self, path: Path, where: str) -> None:
        self._where = where
        self._handle = open_handle(path, self._where)
        self._close = weakref.finalize(self, os.close, self._handle)
        with closed_on_error(self.close):
            raw, length = raw_header(self._handle, self._where)
            self._parts, self.metadata = parse_header(raw, length, self._where)
        self.infos = {name: part.info for name, part in self._parts.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor, of any dtype that torch has."""
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
    """Read bytes of an open file as a tensor."""
    data = torch.empty(size, dtype=torch.uint8)
    view = data.numpy().data
    done = 0
    while done < size:  # one call reads two gigabytes at most
        with explained_read(where, CheckpointError):
            got = os.preadv(handle, [view[done:]], start + done)
        if got == 0:
            raise CheckpointError(f"'{where}' ends at byte {start + done}: it was cut short")
        done += got
    return data


def raw_header(handle: int, where: str) -> tuple[bytes, int]:
    """Read the header; returns its bytes and the length of the file."""
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
    """Parse a header into byte ranges and metadata; checks that the tensors fill the file."""
    collects = gc.isenabled()
    gc.disable()  # searching the many objects of a large header for garbage takes half of its time
    try:
        return _parse_header(raw, length, where)
    finally:
        if collects:
            gc.enable()


def _parse_header(
    raw: bytes, length: int, where: str
) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=distinct)
        if not isinstance(header, dict):
            raise TypeError(f"it is a {type(header).__name__}")
        "".join(header).encode()  # JSON can spell names that no text can hold
    except UnicodeError as error:
        _refuse(where, f"its header is not UTF-8 ({error})", error)
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        _refuse(where, f"its header is not an object in JSON ({error})", error)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse(where, "its metadata is not text by name")
    base = 8 + len(raw)
    parts: dict[str, TensorPlace] = {}
    known: dict[tuple[Any, ...], tuple[TensorInfo, int | None]] = {}
    for name, entry in header.items():
        try:
            code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            _refuse(where, f"tensor '{name}' has no dtype, shape and two offsets", error)
        listed = type(code) is str and type(shape) is list
        for n in (*shape, start, stop) if listed else (None,):
            if type(n) is not int or not 0 <= n < 2**63:
                _refuse(where, f"tensor '{name}' has a malformed dtype, shape or offset")
        key = (code, *shape)
        if key not in known:
            info = TensorInfo(tuple(shape), DTYPES.get(code, (code, 0))[0])
            known[key] = info, byte_count(info) if code in DTYPES else None
        info, size = known[key]
        if start > stop or base + stop > length:
            lies = f"tensor '{name}' lies at bytes {base + start} to {base + stop}"
            _refuse(where, f"{lies}, the file has {length}")
        if size is not None and size != stop - start:
            of = f"tensor '{name}' of shape {shape} in {info.dtype}"
            _refuse(where, f"{of} expected {size} bytes, found {stop - start}")
        parts[name] = TensorPlace(info, base + start, base + stop)
    _check_tiling(parts, base, length, where)
    return parts, metadata


def _check_tiling(parts: Mapping[str, TensorPlace], base: int, length: int, where: str) -> None:
    """Every byte belongs to one tensor: the format allows neither overlaps nor holes."""
    at, before = base, ""
    spans = [(part.start, part.stop, name) for name, part in parts.items()]
    for start, stop, name in sorted(spans, key=itemgetter(0, 1)):
        if start < at:
            _refuse(where, f"tensors '{before}' and '{name}' overlap at byte {start}")
        if start > at:
            _refuse(where, f"bytes {at} to {start} belong to no tensor")
        at, before = stop, name
    if at != length:
        _refuse(where, f"bytes {at} to {length} belong to no tensor")


def _refuse(where: str, why: str, error: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"'{where}' is not a readable safetensors file: {why}") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read every tensor of a safetensors file, and its metadata."""
    with closing(SafetensorsFile(path, str(path))) as file:
        return {name: file.read(name) for name in file.infos}, file.metadata


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically; see `tensor_bytes`."""
    with atomic_file(path) as beside, beside.open("wb") as file:
        file.writelines(tensor_bytes(tensors, metadata))


def tensor_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces; the same tensors and metadata are always the same bytes.

    The library of the format writes metadata in random order, and a temporary file of its own.

    >>> len(b"".join(tensor_bytes({"W": torch.zeros(2, 3)})))
    96
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    infos = {name: TensorInfo.of(tensors[name]) for name in order}
    header = json.dumps({METADATA: dict(metadata)} if metadata else {}).encode()
    raw, _ = longer_header(header, 8 + len(header), infos)
    yield struct.pack("<Q", len(raw)) + raw
    for name in order:
        yield tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def longer_header(
    raw: bytes, length: int, added: Mapping[str, TensorInfo]
) -> tuple[bytes, int]:
    """A header with tensors at the end, and the length of the file that it describes."""
    if not added:
        return raw, length
    header, end = json.loads(raw), length - 8 - len(raw)
    for name, info in added.items():
        code, span = CODES[info.dtype], [end, end + byte_count(info)]
        header[name] = {"dtype": code, "shape": list(info.shape), "data_offsets": span}
        end = span[1]
    longer = json.dumps(header, separators=(",", ":")).encode()
    longer += b" " * (-len(longer) % 8)  # tensors begin at a multiple of eight bytes
    return longer, 8 + len(longer) + end


# Smaller files are read at once: a map costs more than their bytes.
MAP_FROM = 1 << 20
# A view may show numbers of a file many times over; up to so many bytes it is written out.
REPEATED = 1 << 28
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class StateDict:
    """A plain state dict in a file of ``torch.save``; see `TensorSource`.

    Of a training checkpoint the inner ``state_dict`` is read. A large file is mapped, so that a
    tensor is read on access; the format from before PyTorch 1.6 can only be read at once.
    """

    def __init__(self, path: Path, where: str) -> None:
        self._where = where
        self._state = _load(path, self._where)
        self.infos = {name: TensorInfo.of(w) for name, w in self._state.items()}
        self.metadata: Mapping[str, str] = {}

    def read(self, name: str) -> Tensor:
        """One tensor."""
        stored = self._state[name]
        if stored.layout != torch.strided or stored.is_meta:
            kind = "meta" if stored.is_meta else str(stored.layout).removeprefix("torch.")
            raise CheckpointError(f"'{self._where}': '{name}' is a {kind} tensor, not numbers")
        needed, held = stored.numel() * stored.element_size(), stored.untyped_storage().nbytes()
        if needed > max(held, REPEATED):
            raise CheckpointError(
                f"'{self._where}': '{name}' claims {needed:,} bytes, its file holds {held:,}"
            )
        return stored.detach().clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Release the file."""
        self._state = {}


def write_state_dict(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict with ``torch.save``; an `OSError` where the disk is full."""
    with path.open("wb") as file:
        try:
            torch.save(dict(tensors), file)
        except RuntimeError as error:  # torch reports a full disk as a wrong position
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def _load(path: Path, where: str) -> dict[str, Tensor]:
    refused = f"'{where}' is not a plain state dict"
    try:
        with path.open("rb") as file:  # only the newer format, a zip file, can be mapped
            mapped = path.stat().st_size >= MAP_FROM and file.read(2) == b"PK"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about older formats
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except Exception as error:  # torch raises many types for an invalid file
        raise CheckpointError(f"{refused}: {_reason(error)}") from error
    refused += " of tensors by name"
    if not isinstance(state, dict):
        raise CheckpointError(f"{refused}: it holds a {type(state).__name__}")
    state = _state_in(state, DEEPEST_STATE) or state
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            wrong = value if isinstance(name, str) else name
            what = f"{name!r} is of kind" if wrong is value else f"the name {name!r} is of kind"
            raise CheckpointError(f"{refused}: {what} {type(wrong).__name__}")
    return dict(state)


def _reason(error: Exception) -> str:
    """Why torch rejected a file, without its advice to run the code in it."""
    text = str(error)
    if "TorchScript" in text:
        return "it is a TorchScript program"
    if isinstance(error, pickle.UnpicklingError):
        match = _GLOBAL.search(text)
        what = f"'{match[1]}'" if match else "more than tensors"
        return f"it holds {what}, and nothing in it was run"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RuntimeError):
        return text.split(". ")[0].split("\n")[0][:100]
    return "it is not a file of torch.save"


PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""Prefixes of data-parallel, compiled and Lightning modules."""
ENTRIES = ("state_dict", "model_state_dict", "model")
"""Keys of the weights in a training checkpoint."""
DEEPEST_STATE = 4


def common_wrappers(names: Iterable[str]) -> list[str]:
    """Prefixes that all names share, from none to the longest.

    Which of them is a wrapper is for the caller to decide, because networks have a ``model.`` too.

    >>> common_wrappers(["module.model.x", "module.model.y"])
    ['', 'module.', 'module.model.']
    """
    rest = list(names)
    prefixes = [""]
    while rest:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in rest)), None)
        if prefix is None:
            break
        prefixes.append(prefixes[-1] + prefix)
        rest = [name.removeprefix(prefix) for name in rest]
    return prefixes


def _state_in(stored: Mapping[Any, Any], depth: int) -> Mapping[Any, Any] | None:
    """The state dict inside a training checkpoint; None in anything else."""
    if stored and all(isinstance(w, Tensor) for w in stored.values()):
        return stored
    inner = (stored[entry] for entry in ENTRIES if isinstance(stored.get(entry), dict))
    states = (_state_in(entry, depth - 1) for entry in inner if depth)
    return next((state for state in states if state is not None), None)


def inside(folder: Path, name: str, source: Path) -> Path:
    """A file named by a file of the same folder; never one outside, not even by a link.

    The links of a hub's own cache, from ``snapshots/<revision>`` to ``blobs`` beside
    ``snapshots`` or, for files that repositories share, beside them, are the one exception.
    """
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or not parts.parts:
        raise CheckpointError(f"'{source}': '{name}' leads out of its folder")
    path = folder / name
    if not path.exists():
        raise CheckpointError(f"'{source}' names '{name}', which is missing")
    real, home = path.resolve(), folder.resolve()
    homes = [home]
    if snapshots := [at for at in home.parents if at.name == "snapshots"]:
        repository = snapshots[0].parent
        homes.append(repository / "blobs")
        if repository.name.startswith("models--"):
            homes.append(repository.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in homes):
        raise CheckpointError(f"'{source}': '{name}' is a link that leads out of its folder")
    return path
