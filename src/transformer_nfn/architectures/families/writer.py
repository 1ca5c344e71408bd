"""How are changed weights written back? As the source lies: keys, fused parts, dtypes, shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.architectures.families.model import Model
from transformer_nfn.architectures.families.untie import Added, Layout, layout_of
from transformer_nfn.architectures.layout import put
from transformer_nfn.errors import SpaceError
from transformer_nfn.files.errors import WriteError
from transformer_nfn.files.hub_folder import (
    CONFIG,
    INDEX,
    WEIGHTS,
    find_weights,
    inside,
    read_shard_index,
)
from transformer_nfn.files.safetensors_file import DTYPES, parse_header, raw_header, read_at
from transformer_nfn.files.whole import whole_file

# What a folder of a hub holds beside weights: config, tokenizer, its notes.
SMALL = (".json", ".txt", ".model", ".jinja")
LARGEST_SMALL = 64 << 20

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def write_model(model: Model, tensors: Tensors, out: str | Path, *, untied: bool = False) -> Path:
    """Writes a model of the same family and sizes, laid out as ``model`` is in its file.

    Same keys, fused parts, dtypes and shards; config and other small files are copied. Every
    file is written beside and renamed, after the last tensor has come. A safetensors file takes
    the memory of one of its tensors, a ``.bin`` that of all.

    Args:
        model: the source, still open.
        tensors: every tensor by canonical name, a mapping or pairs in any order; those named
            ``kept.…`` may be left out and stay as they are.
        out: a folder if the source is one, else a file.
        untied: a tied model gets an output matrix of its own, ``head`` among the tensors, and its
            config says so.

    Returns:
        ``out``.
    """
    out = Path(out)
    layout = layout_of(model, untied=untied)
    home, weights = _files(model)
    for key, new in layout.added.items():
        next(held for held in weights.values() if new.beside in held).append(key)
    target = out if home is not None else out.parent
    names = {path: path.name if home is not None else out.name for path in weights}
    _check_place(model, out, home, set(names.values()))
    with ExitStack() as stack:
        sinks: dict[str, _Sink] = {}
        shards: list[_Sink] = []
        for path, held in weights.items():
            beside = stack.enter_context(whole_file(target / names[path]))
            make: type[_Sink] = _SafetensorsSink if _is_safetensors(path) else _StateDictSink
            sink = make(
                path, beside, model, {k: layout.added[k] for k in held if k in layout.added}
            )
            stack.callback(sink.close)
            shards.append(sink)
            sinks |= dict.fromkeys(held, sink)
        for key, value in _file_tensors(model, layout, tensors):
            sinks[key].write(key, value)
        for sink in shards:
            sink.finish()
        if home is not None:
            for small in _small_files(home):
                beside = stack.enter_context(whole_file(target / small.name))
                beside.write_bytes(_small_file(small, layout, names, weights))
    return out


def _files(model: Model) -> tuple[Path | None, dict[Path, list[str]]]:
    """The folder of a model, if it is one, and its weight files with the tensors of each."""
    path = model.path
    if path.is_dir():
        home, first = path, find_weights(path)
    elif path.name.endswith(INDEX):
        home, first = path.parent, path
    else:
        return None, {path: list(model.checkpoint)}
    if not first.name.endswith(INDEX):
        return home, {first: list(model.checkpoint)}
    held: dict[Path, list[str]] = {}
    for key, shard in read_shard_index(first).items():
        held.setdefault(shard, []).append(key)
    return home, held


def _check_place(model: Model, out: Path, home: Path | None, written: set[str]) -> None:
    source = home if home is not None else model.path
    if out.exists() and out.resolve() == source.resolve():
        raise WriteError(f"'{out}' is what the weights are read from: choose another place")
    if home is not None:
        if out.exists() and not out.is_dir():
            raise WriteError(f"'{out}' is a file: '{model.where}' is a folder and so is its copy")
        kept = {path.name for path in _small_files(home)}
        for name in WEIGHTS:
            if (out / name).exists() and name not in written | kept:
                raise WriteError(
                    f"'{out}' holds '{name}' of another model, which would be read first: choose "
                    "another place"
                )


def _small_files(home: Path) -> list[Path]:
    found = []
    for path in sorted(home.iterdir()):
        if path.suffix in SMALL and path.is_file() and path.stat().st_size <= LARGEST_SMALL:
            if path.name.endswith(INDEX) and path != find_weights(home):
                continue
            found.append(inside(home, path.name, home))
    return found


def _small_file(
    path: Path, layout: Layout, names: Mapping[Path, str], weights: Mapping[Path, list[str]]
) -> bytes:
    """A small file as it stands, or with what an added tensor changes in it."""
    data = path.read_bytes()
    if path.name == CONFIG and layout.config:
        return json.dumps({**json.loads(data), **layout.config}, indent=2).encode() + b"\n"
    if path.name.endswith(INDEX) and layout.added:
        index = json.loads(data)
        for shard, held in weights.items():
            index["weight_map"] |= {key: names[shard] for key in held if key in layout.added}
        metadata = index.get("metadata")
        if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
            metadata["total_size"] += sum(new.size for new in layout.added.values())
        return json.dumps(index, indent=2).encode() + b"\n"
    return data


def _is_safetensors(path: Path) -> bool:
    return path.suffix not in (".pt", ".pth", ".bin")


def _file_tensors(model: Model, layout: Layout, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file, each as soon as all that it holds has come."""
    binding = layout.binding
    waiting: dict[str, dict[str, Tensor]] = {}
    done: set[str] = set()
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, value in pairs:
        if name in done:
            raise SpaceError(f"'{name}' was given twice to write")
        expected = layout.names.get(name)
        if expected is None or tuple(value.shape) != expected:
            found = f"{list(value.shape)}"
            raise SpaceError(
                f"'{name}' expected shape {list(expected)}, found {found}"
                if expected
                else f"'{model.where}' has no tensor '{name}' {found}"
            )
        done.add(name)
        if name in binding.kept:
            yield binding.kept[name], value
            continue
        for key in binding.holders[name]:
            entry = binding.entries[key]
            parts = waiting.setdefault(key, {})
            parts[name] = value.detach()
            if len(parts) == len(entry.slots):
                given = {n: _stored(model, key, n, w) for n, w in waiting.pop(key).items()}
                yield key, put(binding.sizes, given, entry.slots).reshape(entry.shape)
    missing = [name for name in layout.names if name not in done and name not in binding.kept]
    if missing:
        raise SpaceError(f"'{missing[0]}' {list(layout.names[missing[0]])} was not given to write")
    for name, key in binding.kept.items():
        if name not in done:
            yield key, model.checkpoint[key]


def _stored(model: Model, key: str, name: str, value: Tensor) -> Tensor:
    """A gain as the file stores it; one that did not change to the bit."""
    offset = model.binding.family.gain_offset
    if not offset or not name.endswith(".g"):
        return value
    before = model.checkpoint[key]
    same = before.double() + offset == value.double()
    return torch.where(same, before.double(), value.double() - offset)


class _Sink:
    """A file of weights being written."""

    def __init__(
        self, source: Path, beside: Path, model: Model, added: Mapping[str, Added]
    ) -> None:
        self._model, self._beside, self._added = model, beside, added

    def write(self, key: str, value: Tensor) -> None:
        """One tensor of the file, of its shape, in any dtype."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last tensor."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of the source."""

    def _as_stored(self, key: str, value: Tensor) -> Tensor:
        new = self._added.get(key)
        dtype = self._model.checkpoint.info(key).weight_dtype if new is None else new.dtype
        stored = value.detach().cpu().to(dtype).contiguous()
        if stored.numel() and not all(bool(torch.isfinite(x)) for x in torch.aminmax(stored)):
            raise WriteError(
                f"'{key}' expected numbers that {str(dtype).removeprefix('torch.')} can hold, "
                "found NaN or infinity"
            )
        return stored


class _SafetensorsSink(_Sink):
    """The header of the source, with what is added at its end; each tensor where it says."""

    def __init__(
        self, source: Path, beside: Path, model: Model, added: Mapping[str, Added]
    ) -> None:
        super().__init__(source, beside, model, added)
        self._where = str(source)
        self._from = os.open(source, os.O_RDONLY)
        raw, length = raw_header(self._from, self._where)
        self._source, _ = parse_header(raw, length, self._where)
        self._left = set(self._source)
        raw, length = _longer_header(raw, length, added)
        self._places, _ = parse_header(raw, length, str(beside))
        self._to = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._put(0, len(raw).to_bytes(8, "little") + raw)
        os.truncate(self._to, length)

    def write(self, key: str, value: Tensor) -> None:
        stored = self._as_stored(key, value)
        self._put(self._places[key].start, stored.reshape(-1).view(torch.uint8).numpy().data)
        self._left.discard(key)

    def finish(self) -> None:
        for key in self._left:  # what is no weight goes over byte by byte
            place = self._source[key]
            data = read_at(self._from, place.start, place.stop - place.start, self._where)
            self._put(self._places[key].start, data.numpy().data)

    def close(self) -> None:
        os.close(self._from)
        os.close(self._to)

    def _put(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:  # one call writes two gigabytes at most
            n = os.pwrite(self._to, view, at)
            view, at = view[n:], at + n


def _longer_header(raw: bytes, length: int, added: Mapping[str, Added]) -> tuple[bytes, int]:
    """A header with tensors at the end, and the length of the file that it describes."""
    if not added:
        return raw, length
    header, end = json.loads(raw), length - 8 - len(raw)
    codes = {word: code for code, (word, _) in DTYPES.items()}
    for key, new in added.items():
        code = codes[str(new.dtype).removeprefix("torch.")]
        place = [end, end + new.size]
        header[key] = {"dtype": code, "shape": list(new.shape), "data_offsets": place}
        end += new.size
    longer = json.dumps(header, separators=(",", ":")).encode()
    longer += b" " * (-len(longer) % 8)  # the format wants tensors to begin at a multiple of 8
    return longer, 8 + len(longer) + end


class _StateDictSink(_Sink):
    """A state dict, which only torch writes, and only as a whole."""

    def __init__(
        self, source: Path, beside: Path, model: Model, added: Mapping[str, Added]
    ) -> None:
        super().__init__(source, beside, model, added)
        self._state = torch.load(source, map_location="cpu", weights_only=True, mmap=None)

    def write(self, key: str, value: Tensor) -> None:
        self._state[key] = self._as_stored(key, value)

    def finish(self) -> None:
        torch.save(self._state, self._beside)
