"""Write a checkpoint with other numbers in the layout of its source, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.errors import WriteError
from transformer_nfn.io.checkpoint import (
    CONFIG,
    INDEX,
    STATE_DICTS,
    WEIGHTS,
    Checkpoint,
    find_weights,
    read_shard_index,
    reader_of,
    sentence_modules,
)
from transformer_nfn.io.files import atomic_file, atomic_folder, foreign_files
from transformer_nfn.io.tensor_files import (
    StateDict,
    TensorInfo,
    byte_count,
    inside,
    longer_header,
    parse_header,
    raw_header,
    read_at,
    write_state_dict,
    write_tensors,
)

# What a folder of a hub holds beside weights: config, tokenizer, its notes.
SMALL = (".json", ".txt", ".model", ".jinja", ".md")
LARGEST_SMALL = 64 << 20
MODULE_WEIGHTS = (".safetensors", ".bin")

EMPTY_HEADER = b'{"__metadata__":{"format":"pt"}}'

Write = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Additions:
    """Tensors and config fields that the source of a checkpoint does not have.

    Attributes:
        tensors: by name.
        beside: the tensor of the source whose file they go to the end of.
        config: fields of ``config.json`` that change.
    """

    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    beside: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def rewritten(
    checkpoint: Checkpoint, path: Path, out: Path, additions: Additions
) -> Iterator[Write]:
    """Rewrite a checkpoint: yields a function that takes new tensors by name, in any order.

    Names, shapes, dtypes, order and shards stay; tensors that are not written again are copied, as
    are the config and other small files of a folder. Writing is atomic. A safetensors file takes
    the memory of one of its tensors, a state dict that of all. A source of another format, such as
    GGUF, becomes a folder of one safetensors file and a config.

    Args:
        checkpoint: the source, open.
        path: where it was opened from; no file for tensors in memory, see `write_network`.
        out: a new or empty folder if the source is one, else a file.
        additions: to the source.
    """
    if not path.exists():
        new: dict[str, Tensor] = {}
        yield lambda name, value: new.update({name: _as_stored(name, value, checkpoint.info(name))})
        whole = {name: new[name] if name in new else checkpoint[name] for name in checkpoint}
        write_network(out, whole, checkpoint.metadata)
        return
    if checkpoint.converted:
        with _as_folder(checkpoint, path, out, additions) as write:
            yield write
        return
    home, weights = _files(checkpoint, path)
    names = {file: file.name if home is not None else out.name for file in weights}
    _check_place(path if home is None else home, home, out)
    with ExitStack() as stack:
        target = out.parent if home is None else stack.enter_context(atomic_folder(out))
        sinks: dict[str, _Sink] = {}
        shards: list[_Sink] = []
        for file, held in weights.items():
            beside = stack.enter_context(atomic_file(target / names[file]))
            added = additions.tensors if additions.beside in held else {}
            shard: _Sink
            if reader_of(file) is StateDict:
                shard = _StateDictSink(beside, file, added)
            else:
                shard = stack.enter_context(_copying_sink(beside, file, added))
            shards.append(shard)
            sinks |= dict.fromkeys([*held, *added], shard)

        def write(name: str, value: Tensor) -> None:
            info = additions.tensors.get(name) or checkpoint.info(name)
            sinks[name].write(name, _as_stored(name, value, info))

        yield write
        for each in shards:
            each.finish()
        if home is not None:
            folders, files = _beside_weights(home)
            for folder in folders:  # empty ones too
                (target / folder).mkdir(parents=True, exist_ok=True)
            for small in files:
                beside = stack.enter_context(atomic_file(target / small))
                beside.write_bytes(_with_additions(home / small, home, additions))


def write_network(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to one new file, atomically.

    Args:
        path: ``.pt``, ``.pth`` and ``.bin`` become a state dict of ``torch.save``, which holds no
            metadata; anything else safetensors.
        tensors: by name.
        metadata: of the file.
    """
    if path.suffix not in STATE_DICTS:
        write_tensors(path, tensors, metadata)
        return
    with atomic_file(path) as beside:
        write_state_dict(beside, {name: w.detach().clone() for name, w in tensors.items()})


def write_folder(checkpoint: Checkpoint, out: Path, config: Mapping[str, Any]) -> None:
    """Write an open checkpoint as a new folder: one safetensors file of its weights, and a config.

    Args:
        checkpoint: of any format; its buffers, which are no weights, stay behind.
        out: a new or empty folder.
        config: fields of ``config.json`` that the checkpoint's lacks or that change.
    """
    with _as_folder(checkpoint, Path(checkpoint.where), out, Additions(config=config)):
        pass


@contextmanager
def _as_folder(
    checkpoint: Checkpoint, path: Path, out: Path, additions: Additions
) -> Iterator[Write]:
    """A new folder for tensors that do not stand in the source as they are."""
    _check_place(path, path, out)
    held = {**checkpoint.infos, **additions.tensors}
    infos = {name: info for name, info in held.items() if info.weight_dtype is not None}
    with (
        atomic_folder(out) as target,
        atomic_file(target / CONFIG) as config,
        atomic_file(target / WEIGHTS[0]) as weights,
    ):
        with open(weights, "r+b", buffering=0) as file:
            header = EMPTY_HEADER, 8 + len(EMPTY_HEADER)
            sink = _SafetensorsSink(file, *header, infos, checkpoint.__getitem__)
            yield lambda name, value: sink.write(name, _as_stored(name, value, infos[name]))
            sink.finish()
        config.write_bytes(_as_json({**checkpoint.config, **additions.config}))


def _with_additions(path: Path, home: Path, additions: Additions) -> bytes:
    """A small file, with additions if it is the config or the index."""
    data = path.read_bytes()
    if path == home / CONFIG and additions.config:
        return _as_json({**json.loads(data), **additions.config})
    if path.parent == home and path.name.endswith(INDEX) and additions.tensors:
        index = json.loads(data)
        shard = index["weight_map"][additions.beside]
        index["weight_map"] |= dict.fromkeys(additions.tensors, shard)
        metadata = index.get("metadata")
        if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
            metadata["total_size"] += sum(byte_count(info) for info in additions.tensors.values())
        return _as_json(index)
    return data


def _as_json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=2).encode() + b"\n"


def _files(checkpoint: Checkpoint, path: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """The folder of a checkpoint, if it is one, and its weight files with the tensors of each."""
    first = find_weights(path, str(path)) if path.is_dir() else path
    if not first.name.endswith(INDEX):
        return path if path.is_dir() else None, {first: list(checkpoint)}
    held: dict[Path, list[str]] = {}
    for name, shard in read_shard_index(first).items():
        held.setdefault(shard, []).append(name)
    return path if path.is_dir() else path.parent, held


def _check_place(source: Path, home: Path | None, out: Path) -> None:
    place = Path(os.path.realpath(out))
    if out.exists() and place == source.resolve():
        raise WriteError(f"'{out}' is what the weights are read from: choose another place")
    if home is not None and home.resolve() in place.parents:
        raise WriteError(f"'{out}' lies in the folder that weights are read from: name another")
    if home is None or not out.exists():
        return
    if not out.is_dir():
        raise WriteError(f"'{out}' is a file: '{source}' is a folder, and so is what is written")
    # Another model's weights, config or tokenizer would be taken for this one's, or be lost.
    foreign = foreign_files(out)
    if foreign:
        raise WriteError(f"'{out}' holds other files ('{foreign[0]}'): name an empty folder")


def _beside_weights(home: Path) -> tuple[list[Path], list[Path]]:
    """The folders below a model's, and the small files in all of them, relative to it.

    Weights below it belong to other checkpoints and stay behind, but for those of the modules
    that ``modules.json`` names, which a sentence transformer runs after the model. Linked and
    hidden folders stay behind too.
    """
    folders: list[Path] = []
    files: list[Path] = []
    modules = {Path(module) for module in sentence_modules(home)}
    for where, inner, names in os.walk(home):
        at = Path(where)
        inner[:] = sorted(
            name for name in inner if not name.startswith(".") and not (at / name).is_symlink()
        )
        folder = at.relative_to(home)
        folders += [folder / name for name in inner]
        suffixes = SMALL + MODULE_WEIGHTS if folder in modules else SMALL
        for name in sorted(names):
            path = at / name
            if path.suffix not in suffixes or not path.is_file():
                continue
            if path.stat().st_size > LARGEST_SMALL:
                continue
            if not name.endswith(INDEX) or path == find_weights(home, str(home)):
                files.append(inside(home, (folder / name).as_posix(), home).relative_to(home))
    return folders, files


def _as_stored(name: str, value: Tensor, info: TensorInfo) -> Tensor:
    assert info.weight_dtype is not None
    assert value.shape == info.shape, name
    stored = value.detach().cpu().to(info.weight_dtype).contiguous()
    if stored.numel() and not all(bool(torch.isfinite(x)) for x in torch.aminmax(stored)):
        raise WriteError(
            f"'{name}' expected numbers that {info.dtype} can hold, found NaN or infinity"
        )
    return stored


class _SafetensorsSink:
    """A file with each tensor where its header says.

    Args:
        file: to write, open.
        raw: header of a file of ``length`` bytes.
        added: tensors that go to its end.
        rest: reads a tensor that is not given, or its bytes.
    """

    def __init__(
        self,
        file: FileIO,
        raw: bytes,
        length: int,
        added: Mapping[str, TensorInfo],
        rest: Callable[[str], Tensor],
    ) -> None:
        raw, length = longer_header(raw, length, added)
        self._places, _ = parse_header(raw, length, str(file.name))
        self._file, self._rest, self._left = file, rest, set(self._places)
        file.truncate(length)
        self._put(0, len(raw).to_bytes(8, "little") + raw)

    def write(self, name: str, value: Tensor) -> None:
        """Take one tensor, as it is stored."""
        self._put(self._places[name].start, value.reshape(-1).view(torch.uint8).numpy().data)
        self._left.discard(name)

    def finish(self) -> None:
        """After the last tensor: what was not given comes from the source."""
        for name in sorted(self._left):
            self.write(name, self._rest(name))

    def _put(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:  # one call writes two gigabytes at most
            n = os.pwrite(self._file.fileno(), view, at)
            view, at = view[n:], at + n


@contextmanager
def _copying_sink(
    beside: Path, source: Path, added: Mapping[str, TensorInfo]
) -> Iterator[_SafetensorsSink]:
    """A file with the header of another, from which the bytes come that are not given."""
    with open(source, "rb") as old, open(beside, "r+b", buffering=0) as new:
        handle, where = old.fileno(), str(source)
        raw, length = raw_header(handle, where)
        places, _ = parse_header(raw, length, where)

        def stored(name: str) -> Tensor:
            place = places[name]
            return read_at(handle, place.start, place.stop - place.start, where)

        yield _SafetensorsSink(new, raw, length, added, stored)


class _StateDictSink:
    """A state dict, which torch writes as a whole."""

    def __init__(self, beside: Path, source: Path, added: Mapping[str, TensorInfo]) -> None:
        self._beside, self._old = beside, StateDict(source, str(source))
        self._names = [*self._old.infos, *added]
        self._new: dict[str, Tensor] = {}

    def write(self, name: str, value: Tensor) -> None:
        self._new[name] = value

    def finish(self) -> None:
        old, new = self._old, self._new
        whole = {name: new[name] if name in new else old.read(name) for name in self._names}
        write_state_dict(self._beside, whole)


_Sink = _SafetensorsSink | _StateDictSink
