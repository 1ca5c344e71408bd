"""Import of the authors' published files into a zoo."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError, TransformerNFNError
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.files import atomic_folder, read_regular
from transformer_nfn.known_tasks import HEADS, KNOWN_TASKS, UNKNOWN_SEEDS
from transformer_nfn.zoo.errors import ImportFileError, StoreError, ZooError
from transformer_nfn.zoo.module import HEADS_KEY, from_state_dict, heads_in, to_state_dict
from transformer_nfn.zoo.network_files import check_blocks, zoo_sizes
from transformer_nfn.zoo.sizes import NetworkSizes, SizeGroup
from transformer_nfn.zoo.store.folder import Folder, check_fresh, check_outside_zoos, write_groups
from transformer_nfn.zoo.store.shards import write_shard
from transformer_nfn.zoo.store.zoo import Zoo
from transformer_nfn.zoo.targets import NUMBER, read_csv_rows

_FILE = re.compile(r"(?P<run>.+)_(?P<epoch>best1?|[0-9]+)_(?P<accuracy>[0-9]+)\.pt")
_ACCURACY = ("test_top1_accuracy", "test_accuracy")
# Our columns, and their names in the authors' tables.
_COLUMNS = {
    "optimizer": ("optimizer", "optim"),
    "learning_rate": ("learning_rate", "lr"),
    "l2": ("l2", "weight_decay", "l2_reg"),
    "init_std": ("init_std", "std"),
    "dropout": ("dropout", "dropout_rate"),
    "train_fraction": ("train_fraction", "train_frac", "fraction"),
    "seed": ("seed",),
}
# What Python raises for zips that are damaged, encrypted or oddly compressed.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError,
    OverflowError,
)  # fmt: skip
SHARD_ROWS = 1024
MAX_EPOCH = 1_000_000
MAX_SEED = 2**63 - 1
Table = dict[str, dict[str, str]]
"""Rows of the authors' table by file name, without empty cells."""


@dataclass
class Imported:
    """Report of an import.

    Attributes:
        networks: number of checkpoints read.
        stray: keys that belong to no tensor of the network, with the number of files.
        notes: messages for the user.
    """

    networks: int = 0
    stray: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _File:
    path: Path
    run: str
    epoch: str
    accuracy: float


def import_authors(source: Path, out: Path) -> tuple[Zoo, Imported]:
    """Read a folder or zip in the authors' layout into a new zoo at ``out``.

    The layout is ``<name>/<run>_<epoch>_<accuracy·10000>.pt`` and ``metadata/<name>.csv`` with
    name ``mnist`` or ``ag_news``, at any depth. `zoo.export` uses the same layout for other
    tasks, and a folder per size group, such as ``w16-h2-d1``, for a mixed zoo. Nothing is written
    if any file is invalid.
    """
    check_outside_zoos(out, new=True)
    check_fresh(out)
    if (out / "zoo.json").exists():
        raise StoreError(f"'{out}' holds another zoo: name an empty folder")
    report = Imported()
    with _as_folder(source) as folder, atomic_folder(out) as made:
        groups = _group_folders(folder)
        if groups:
            _import_groups(groups, made, source, report)
        else:
            _import_zoo(folder, made, source, report)
    return Zoo.open(out), report


def _group_folders(folder: Path) -> dict[SizeGroup, Path]:
    """The folders of an exported mixed zoo by size group; empty for one zoo."""
    parents = sorted({path.parent.parent for path in _network_files(folder)})
    try:
        groups = {SizeGroup.from_name(parent.name): parent for parent in parents}
    except ZooError:
        return {}
    return dict(sorted(groups.items())) if len(groups) == len(parents) > 1 else {}


def _import_groups(
    groups: dict[SizeGroup, Path], made: Path, source: Path, report: Imported
) -> None:
    zoos = []
    for group, folder in groups.items():
        zoo = _import_zoo(folder, made / group.name, source, report)
        if zoo.sizes.group != group:
            raise ImportFileError(
                f"'{source}': expected networks of {group} in '{folder.name}', found "
                f"{zoo.sizes.group}"
            )
        zoos.append(zoo)
    tasks = sorted({zoo.metadata["task"]["name"] for zoo in zoos})
    if len(tasks) > 1:
        raise _several_tasks(source, tasks)
    seeds = {zoo.seeds for zoo in zoos}
    shared = UNKNOWN_SEEDS if UNKNOWN_SEEDS in seeds else max(seeds, key=lambda s: s == "each")
    write_groups(made, list(groups), {"task": tasks[0], "seeds": shared})


def _import_zoo(folder: Path, out: Path, source: Path, report: Imported) -> Folder:
    """Import files of networks of equal sizes into a zoo at ``out``."""
    name, files, table = _survey(folder, source)
    first = _open(files[0].path)
    sizes = _network_sizes(first, name)
    positions = _positions(sizes, first)
    shards = [files[i : i + SHARD_ROWS] for i in range(0, len(files), SHARD_ROWS)]
    imported = {"imported": os.fsencode(source.name).decode(errors="backslashreplace")}
    metadata = {
        "origin": "import",
        "task": {"name": name, "samples": None, "provenance": imported},
        "recipe": {"batch": 128, "select": "test"},
        "seeds": _shared_seeds(files, table),
        "dtype": "float32",
        "shards": len(shards),
    }
    if positions is not None:
        metadata["positions"] = base64.b64encode(positions.numpy().tobytes()).decode()
    zoo = Folder.create(out, sizes, metadata)
    for shard, part in zip(zoo.shards, shards, strict=True):
        weights = torch.cat([_network(sizes, file.path, report, positions) for file in part])
        rows = [_row(file, table.get(file.path.name, {})) for file in part]
        write_shard(zoo.shard_path(shard), sizes.row_layout, weights, rows, imported)
        report.networks += len(part)
    unlisted = sum(1 for file in files if file.path.name not in table)
    if unlisted:
        report.notes.append(f"{unlisted} files have no row in metadata/{name}.csv")
    zoo.merge()
    return zoo


def _shared_seeds(files: list[_File], table: Table) -> str:
    """Whether the runs share one seed according to their table."""
    recorded = [table.get(file.path.name, {}).get("seed") for file in files]
    seeds = {_seed(text, "a file") for text in recorded if text}
    if len(seeds) > 1:
        return "each"
    return "one" if all(recorded) else UNKNOWN_SEEDS


def _positions(sizes: NetworkSizes, state: Checkpoint) -> Tensor | None:
    """The positions in a file; they must be the sinusoidal table up to rounding."""
    stored = state.get("embedding.pos_embedding")
    if stored is None or not sizes.patch:
        return None
    expected = sizes.positions()
    if stored.shape != expected.shape or not torch.allclose(stored.float(), expected, atol=1e-4):
        raise ImportFileError(
            f"{state.where}: 'embedding.pos_embedding' is not the fixed sinusoidal table"
        )
    return stored.to(torch.float32).contiguous()


def _network(
    sizes: NetworkSizes, path: Path, report: Imported, positions: Tensor | None
) -> Tensor:
    state = _open(path)
    try:
        named, heads = from_state_dict(sizes, state), heads_in(state) or HEADS
    except TransformerNFNError as error:
        raise ImportFileError(f"{path.name}: {error}") from error
    if heads != sizes.heads:
        raise ImportFileError(f"{path.name}: has other heads than the files before it")
    known = {HEADS_KEY, *to_state_dict(sizes, named)}
    report.stray.update(key for key in state if key not in known)
    stored = _positions(sizes, state)
    if stored is not None and positions is not None and not torch.equal(stored, positions):
        raise ImportFileError(
            f"{path.name}: 'embedding.pos_embedding' differs from that of the other files"
        )
    flat = sizes.row_layout.pack({k: v[None].to(torch.float32) for k, v in named.items()})
    if not bool(flat.isfinite().all()):
        raise ImportFileError(f"{path.name}: holds values that are not finite")
    return flat


def _open(path: Path) -> Checkpoint:
    """Open a plain state dict; files that would run code on loading are rejected."""
    try:
        return Checkpoint.open(path, where=path.name)
    except CheckpointError as error:
        raise ImportFileError(str(error)) from error


def _network_sizes(state: Checkpoint, name: str) -> NetworkSizes:
    """Sizes of a file's network; what it does not state is the task's."""
    usual = NetworkSizes.of(KNOWN_TASKS[name])
    sizes = zoo_sizes(state, usual) or usual
    check_blocks(state.where, state, sizes)
    try:
        return replace(usual, classes=sizes.classes, patch=sizes.patch).resized(sizes.group)
    except TransformerNFNError as error:
        raise ImportFileError(f"{state.where}: {error}") from error


def _row(file: _File, config: dict[str, str]) -> dict[str, Any]:
    """Index row of a file; its table, where there is one, has the exact accuracy."""
    name = file.path.name
    row: dict[str, Any] = {"run": file.run, "crashed": False, "source": name}
    for column, aliases in _COLUMNS.items():
        text = next((config[alias] for alias in aliases if config.get(alias)), None)
        if text is None:
            continue
        if column == "optimizer":
            row[column] = text.strip().lower()
        else:
            row[column] = _seed(text, name) if column == "seed" else _number(column, text, name)
    best = file.epoch.startswith("best")
    # The authors trained a hundred epochs; files exported here record the percentage.
    percent = config.get("percent") or file.epoch
    accuracy = next((config[alias] for alias in _ACCURACY if config.get(alias)), None)
    row |= {
        "best": best,
        "epoch": 0 if best else int(file.epoch),
        "percent": 0 if best else int(_number("percent", percent, name, MAX_EPOCH)),
        "test_accuracy": file.accuracy,
    }
    if accuracy is not None:
        value = _number("accuracy", accuracy, name, 100)
        row["test_accuracy"] = value / 100 if value > 1 else value
    if config:
        row["source"] = json.dumps({"file": name} | config)
    return row


def _network_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.pt")):
        if _FILE.fullmatch(path.name) and path.parent.name in KNOWN_TASKS:
            yield path


def _survey(folder: Path, source: Path) -> tuple[str, list[_File], Table]:
    """The task, its files sorted by run and epoch, and their table."""
    files: dict[str, list[_File]] = {}
    for path in _network_files(folder):
        match = _FILE.fullmatch(path.name)
        assert match is not None
        accuracy, epoch = int(match["accuracy"][:10]) / 10000, match["epoch"]
        if accuracy > 1 or (epoch.isdecimal() and int(epoch[:10]) > MAX_EPOCH):
            raise ImportFileError(
                f"'{path.name}' is named for an accuracy above 1 or an epoch past {MAX_EPOCH}"
            )
        file = _File(path, match["run"], epoch, accuracy)
        files.setdefault(path.parent.name, []).append(file)
    if not files:
        raise ImportFileError(
            f"'{source}' holds no files named mnist/<run>_<epoch>_<accuracy>.pt, or in the folder "
            f"of another task ({', '.join(KNOWN_TASKS)}): networks of your own need --targets TABLE"
        )
    if len(files) > 1:
        raise _several_tasks(source, sorted(files))
    ((name, listed),) = files.items()
    table: Table = {}
    for path in folder.rglob(f"metadata/{name}.csv"):
        table |= _read_table(path)
    return name, listed, table


def _several_tasks(source: Path, names: list[str]) -> ImportFileError:
    return ImportFileError(
        f"'{source}' holds both {' and '.join(names)} files: import one folder at a time"
    )


def _read_table(path: Path) -> Table:
    try:
        _, rows = read_csv_rows(read_regular(path), path.name)
    except OSError as error:
        raise ImportFileError(f"'{path.name}' cannot be read: {error}") from error
    table: Table = {}
    for row in rows:
        if row.get("ckpt_file"):
            key = PurePosixPath(row["ckpt_file"]).name
            table[key] = {k: v for k, v in row.items() if k and v}
    return table


def _number(column: str, text: str, file: str, most: float = math.inf) -> float:
    """Parse a finite number from 0 to ``most``."""
    value = float(text) if NUMBER.fullmatch(text) else math.nan
    if not 0 <= value <= most or math.isinf(value):
        span = "at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise ImportFileError(
            f"the table's '{column}' of {file} expected a number {span}, found '{text[:40]}'"
        )
    return value


def _seed(text: str, file: str) -> int:
    """Parse a whole number of up to 63 bits, also one written as ``3.0``."""
    stripped = text.strip()
    seed = None
    if NUMBER.fullmatch(stripped):
        value = float(stripped)
        if re.fullmatch(r"[+-]?[0-9]{1,20}", stripped):
            seed = int(stripped)
        elif value.is_integer() and abs(value) < 2**53:
            seed = int(value)
    if seed is None or abs(seed) > MAX_SEED:
        raise ImportFileError(
            f"the table's 'seed' of {file} expected a whole number of 63 bits, found '{text[:40]}'"
        )
    return seed


@contextmanager
def _as_folder(source: Path) -> Iterator[Path]:
    if source.is_dir():
        yield source
        return
    if not source.is_file():
        raise ImportFileError(f"'{source}' does not exist")
    if not zipfile.is_zipfile(source):
        raise ImportFileError(f"'{source}' is neither a folder nor a zip file")
    with tempfile.TemporaryDirectory() as scratch:
        _unpack(source, Path(scratch))
        yield Path(scratch)


def _unpack(source: Path, folder: Path) -> None:
    """Unpack a zip into an empty folder; rejects names that lead out of it."""
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            _check_members(members, folder, source)
            archive.extractall(folder)
    except ImportFileError:
        raise
    except NotImplementedError as error:
        raise ImportFileError(f"'{source}': compression is not supported: {error}") from error
    except _ZIP_ERRORS as error:
        raise ImportFileError(f"'{source}' is damaged: {error}") from error


def _check_members(members: list[zipfile.ZipInfo], folder: Path, source: Path) -> None:
    for member in members:
        parts = PurePosixPath(member.filename.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts:
            raise ImportFileError(f"'{source}' holds the unsafe path '{member.filename}'")
        if member.flag_bits & 1:
            raise ImportFileError(f"'{source}' is encrypted: '{member.filename}' needs a password")
    twice = [name for name, times in Counter(m.filename for m in members).items() if times > 1]
    if twice:
        raise ImportFileError(f"'{source}' is damaged: it holds '{twice[0]}' twice")
    size, free = sum(member.file_size for member in members), shutil.disk_usage(folder).free
    if size > free:
        raise ImportFileError(
            f"'{source}' unpacks to {size:,} bytes, more than the {free:,} free at '{folder}'"
        )
