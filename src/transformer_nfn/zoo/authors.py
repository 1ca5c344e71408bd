"""Import of the authors' published files into a zoo."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.errors import CheckpointError, TransformerNFNError
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.files import atomic_folder
from transformer_nfn.known_tasks import BLOCKS, HEADS, KNOWN_TASKS, WIDTH
from transformer_nfn.seed_kinds import UNKNOWN
from transformer_nfn.zoo.errors import ImportFileError, StoreError, ZooError
from transformer_nfn.zoo.module import HEADS_KEY, from_state_dict, heads_in, to_state_dict
from transformer_nfn.zoo.sizes import Kind, NetworkSizes
from transformer_nfn.zoo.store import (
    Folder,
    MixedZoo,
    Zoo,
    check_fresh,
    check_outside_zoos,
    open_zoo,
    write_shard,
)
from transformer_nfn.zoo.store.zoo import write_kinds

DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError,
    OverflowError,
)  # fmt: skip
"""What Python raises for zips that are damaged, encrypted or oddly compressed."""


def unpack(source: Path, folder: Path) -> None:
    """Unpacks a zip into a folder; refuses names that lead out of it.

    Args:
        source: the zip.
        folder: there already, and empty.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            for member in members:
                _check_member(member, source)
            _check_room(members, folder, source)
            archive.extractall(folder)
    except ImportFileError:
        raise
    except NotImplementedError as error:
        raise ImportFileError(
            f"'{source}' is compressed in a way that is not read here: {error}"
        ) from error
    except DAMAGE as error:
        raise ImportFileError(f"'{source}' is damaged: {error}") from error


def _check_member(member: zipfile.ZipInfo, source: Path) -> None:
    parts = PurePosixPath(member.filename.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts:
        raise ImportFileError(f"'{source}' holds the unsafe path '{member.filename}'")
    if member.flag_bits & 1:
        raise ImportFileError(f"'{source}' is encrypted: '{member.filename}' needs a password")


def _check_room(members: list[zipfile.ZipInfo], folder: Path, source: Path) -> None:
    twice = [name for name, times in Counter(m.filename for m in members).items() if times > 1]
    if twice:
        raise ImportFileError(f"'{source}' is damaged: it holds '{twice[0]}' twice")
    size, free = sum(member.file_size for member in members), shutil.disk_usage(folder).free
    if size > free:
        raise ImportFileError(
            f"'{source}' unpacks to {size:,} bytes, more than the {free:,} free at '{folder}'"
        )


_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
LARGEST_SEED = 2**63 - 1


def read_table(path: Path) -> dict[str, dict[str, str]]:
    """The rows of a table by the file they speak of, without empty cells."""
    if not path.is_file():
        raise ImportFileError(f"'{path.name}' is not a file")
    try:
        # Some programs put a mark before the text that is no part of its first word.
        text = path.read_bytes().decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except UnicodeDecodeError as error:
        raise ImportFileError(f"'{path.name}' is not UTF-8: {error}") from error
    except (csv.Error, OSError) as error:
        raise ImportFileError(f"'{path.name}' is not a table in CSV: {error}") from error
    table: dict[str, dict[str, str]] = {}
    for number, row in enumerate(rows, 1):
        if None in row or "\0" in "".join(value or "" for value in row.values()):
            raise ImportFileError(f"'{path.name}', row {number}: more cells than columns, or a NUL")
        if row.get("ckpt_file"):
            key = PurePosixPath(row["ckpt_file"]).name
            table[key] = {k: v for k, v in row.items() if k and v}
    return table


def number(column: str, text: str, file: str, most: float = math.inf) -> float:
    """A finite number that is not negative.

    Args:
        column: of the table, for messages.
        text: what stands in it.
        file: of which it speaks.
        most: the largest that it can be.
    """
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value <= most or math.isinf(value):
        span = "at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise ImportFileError(
            f"the table's '{column}' of {file} expected a number {span}, found '{text[:40]}'"
        )
    return value


def seed(text: str, file: str) -> int:
    """A whole number, also one that a table wrote as ``3.0``; seeds have up to 63 bits."""
    stripped = text.strip()
    whole = None
    if _NUMBER.fullmatch(stripped):
        value = float(stripped)
        if re.fullmatch(r"[+-]?[0-9]{1,20}", stripped):
            whole = int(stripped)
        elif value.is_integer() and abs(value) < 2**53:
            whole = int(value)
    if whole is None or abs(whole) > LARGEST_SEED:
        raise ImportFileError(
            f"the table's 'seed' of {file} expected a whole number of 63 bits, found '{text[:40]}'"
        )
    return whole


def fraction(accuracy: float) -> float:
    """An accuracy between 0 and 1, also one in percent."""
    return accuracy / 100 if accuracy > 1 else accuracy


_FILE = re.compile(r"(?P<run>.+)_(?P<epoch>best1?|[0-9]+)_(?P<accuracy>[0-9]+)\.pt")
_ACCURACY = ("test_top1_accuracy", "test_accuracy")
# What their tables may call what ours calls otherwise.
_COLUMNS = {
    "optimizer": ("optimizer", "optim"),
    "learning_rate": ("learning_rate", "lr"),
    "l2": ("l2", "weight_decay", "l2_reg"),
    "init_std": ("init_std", "std"),
    "dropout": ("dropout", "dropout_rate"),
    "train_fraction": ("train_fraction", "train_frac", "fraction"),
    "seed": ("seed",),
}
SHARD_ROWS = 1024
LAST_EPOCH = 1_000_000


@dataclass
class Imported:
    """What an import did.

    Attributes:
        networks: checkpoints read.
        stray: keys that belong to no tensor of the network, and in how many files each was.
        notes: what a user should know, a sentence each.
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


def import_authors(source: Path, out: Path) -> tuple[Zoo | MixedZoo, Imported]:
    """Reads a folder or zip in the authors' layout into a new zoo at ``out``.

    Their layout is ``<name>/<run>_<epoch>_<accuracy·10000>.pt`` and ``metadata/<name>.csv``
    with name ``mnist`` or ``ag_news``, at any depth; what `export_authors` writes of another task
    bears its name, and of a mixed zoo each kind is in a folder such as ``w16-h2-d1``, which gives
    a mixed zoo again. Nothing is written if any file is wrong.
    """
    check_outside_zoos(out.parent)
    check_fresh(out)
    if (out / "zoo.json").exists():
        raise StoreError(f"'{out}' holds another zoo: name an empty folder")
    report = Imported()
    with _as_folder(source) as folder, atomic_folder(out) as made:
        kinds = _kinds(folder)
        if kinds:
            zoos = [_import_kind(at, made, kind, source, report) for kind, at in kinds.items()]
            tasks = sorted({zoo.about["task"]["name"] for zoo in zoos})
            if len(tasks) > 1:
                raise _several_tasks(source, tasks)
            seeds = {zoo.seeds for zoo in zoos}
            seed = UNKNOWN if UNKNOWN in seeds else max(seeds, key=lambda s: s == "each")
            write_kinds(made, list(kinds), {"task": tasks[0], "seeds": seed})
        else:
            _import_one(folder, made, source, report)
    return open_zoo(out), report


def _kinds(folder: Path) -> dict[Kind, Path]:
    """The folders of an exported mixed zoo by their kind; empty for files of one kind."""
    homes = sorted(
        {
            path.parent.parent
            for path in folder.rglob("*.pt")
            if _FILE.fullmatch(path.name) and path.parent.name in KNOWN_TASKS
        }
    )
    try:
        kinds = {Kind.named(home.name): home for home in homes}
    except ZooError:
        return {}
    return dict(sorted(kinds.items())) if len(kinds) == len(homes) > 1 else {}


def _import_kind(
    folder: Path, made: Path, kind: Kind, source: Path, report: Imported
) -> Folder:
    zoo = _import_one(folder, made / kind.name, source, report)
    if zoo.arch.kind != kind:
        raise ImportFileError(
            f"'{source}': expected networks of {kind} in '{folder.name}', found {zoo.arch.kind}"
        )
    return zoo


def _import_one(folder: Path, out: Path, source: Path, report: Imported) -> Folder:
    """Reads files of one kind into a zoo at ``out``."""
    name, files, table = _survey(folder, source)
    first = _open(files[0].path)
    try:
        arch = _architecture(first, name)
    except IndexError as error:
        raise ImportFileError(
            f"{files[0].path.name}: a tensor that tells its sizes has too few axes"
        ) from error
    _check_depth(first, arch, files[0].path)
    return _write(out, arch, name, files, table, report, source, first)


def _write(
    out: Path,
    arch: NetworkSizes,
    name: str,
    files: list[_File],
    table: dict[str, dict[str, str]],
    report: Imported,
    source: Path,
    first: Checkpoint,
) -> Folder:
    groups = [files[i : i + SHARD_ROWS] for i in range(0, len(files), SHARD_ROWS)]
    about = {
        "origin": "import",
        "task": {"name": name, "samples": None, "provenance": {"imported": source.name}},
        "recipe": {"batch": 128, "select": "test"},
        "seeds": _seeds(files, table),
        "dtype": "float32",
        "shards": len(groups),
    }
    positions = _positions(arch, first, files[0].path)
    if positions is not None:
        about["positions"] = base64.b64encode(positions.numpy().tobytes()).decode()
    folder = Folder.create(out, arch, about)
    for shard, group in zip(folder.shards, groups, strict=True):
        rows, weights = [], []
        for file in group:
            weights.append(_network(arch, file.path, report, positions))
            rows.append(_row(file, table.get(file.path.name, {})))
        path = folder.shard_path(shard)
        write_shard(path, arch, torch.cat(weights), rows, {"imported": source.name})
        report.networks += len(group)
    unknown = sum(1 for file in files if file.path.name not in table)
    if unknown:
        report.notes.append(f"{unknown} files have no row in metadata/{name}.csv")
    folder.merge()
    return folder


def _seeds(files: list[_File], table: dict[str, dict[str, str]]) -> str:
    """Whether the runs share one seed, as far as their table tells."""
    recorded = [table.get(file.path.name, {}).get("seed") for file in files]
    seeds = {seed(text, "a file") for text in recorded if text}
    if len(seeds) > 1:
        return "each"
    return "one" if all(recorded) else UNKNOWN


def _positions(arch: NetworkSizes, state: Checkpoint, path: Path) -> Tensor | None:
    """The table of positions in a file; it must be the sinusoidal one but for rounding."""
    found = state.get("embedding.pos_embedding")
    if found is None or not arch.patch:
        return None
    ours = arch.positions()
    if found.shape != ours.shape or not torch.allclose(found.float(), ours, atol=1e-4):
        raise ImportFileError(
            f"{path.name}: 'embedding.pos_embedding' is not the fixed sinusoidal table"
        )
    return found.to(torch.float32).contiguous()


def _network(
    arch: NetworkSizes, path: Path, report: Imported, positions: Tensor | None
) -> Tensor:
    state = _open(path)
    try:
        named = from_state_dict(arch, state)
    except TransformerNFNError as error:
        raise ImportFileError(f"{path.name}: {error}") from error
    known = {HEADS_KEY, *to_state_dict(arch, named)}
    if (heads_in(state) or HEADS) != arch.heads:
        raise ImportFileError(f"{path.name}: has other heads than the files before it")
    report.stray.update(key for key in state if key not in known)
    mine = _positions(arch, state, path)
    if mine is not None and positions is not None and not torch.equal(mine, positions):
        raise ImportFileError(
            f"{path.name}: 'embedding.pos_embedding' differs from that of the other files"
        )
    flat = arch.from_named({k: v[None].to(torch.float32) for k, v in named.items()})
    if not bool(flat.isfinite().all()):
        raise ImportFileError(f"{path.name}: holds values that are not finite")
    return flat


def _open(path: Path) -> Checkpoint:
    """A plain state dict; anything that would run code on loading is refused."""
    try:
        return Checkpoint.open(path, where=path.name)
    except CheckpointError as error:
        raise ImportFileError(str(error)) from error


def _architecture(state: Checkpoint, name: str) -> NetworkSizes:
    """What the first file says of the network; tokens, which no shape tells, are the task's."""
    bias, conv = "classifier.fc2.bias", "embedding.conv1.weight"
    classes = state.info(bias).shape[0] if bias in state else KNOWN_TASKS[name].classes
    patch = math.prod(state.info(conv).shape[1:]) if conv in state else 0
    arch = NetworkSizes(KNOWN_TASKS[name].tokens, classes, patch=patch)
    try:
        return arch.resized(_kind(state))
    except ZooError as error:
        raise ImportFileError(f"{state.where}: {error}") from error


def _kind(state: Checkpoint) -> Kind:
    """The sizes by which a file differs from the paper's; its tensors are checked later."""
    queries = "attention.queries.weight"
    found = state.info(f"encoder.0.{queries}").shape if f"encoder.0.{queries}" in state else ()
    depth = sum(name.endswith(queries) for name in state)
    return Kind(found[0] if found else WIDTH, heads_in(state) or HEADS, depth or BLOCKS)


def _check_depth(state: Checkpoint, arch: NetworkSizes, path: Path) -> None:
    """Refuses a file with parts of more blocks than it has whole: it lacks a tensor."""
    for key in state:
        match = re.match(r"encoder\.([0-9]{1,9})\.", key)
        if match and int(match[1]) >= arch.blocks:
            raise ImportFileError(
                f"{path.name}: holds '{key}', but the queries of {arch.blocks} blocks only"
            )


def _row(file: _File, config: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"run": file.run, "crashed": False, "source": file.path.name}
    for column, names in _COLUMNS.items():
        value = next((config[n] for n in names if config.get(n)), None)
        if value is not None:
            row[column] = _value(column, value, file.path.name)
    best = file.epoch.startswith("best")
    row |= {"best": best, "epoch": 0 if best else int(file.epoch)}
    # Theirs have a hundred epochs; what was exported here says of how many each was.
    percent = config.get("percent") or file.epoch
    row["percent"] = 0 if best else int(number("percent", percent, file.path.name, most=LAST_EPOCH))
    said = next((config[n] for n in _ACCURACY if config.get(n)), None)
    # The file's name carries four digits; the table, where there is one, carries them all.
    name = file.path.name
    recorded = None if said is None else number("accuracy", said, name, most=100)
    row["test_accuracy"] = file.accuracy if recorded is None else fraction(recorded)
    if config:
        row["source"] = json.dumps({"file": file.path.name} | config)
    return row


def _value(column: str, text: str, file: str) -> str | float | int:
    if column == "optimizer":
        return text.strip().lower()
    return seed(text, file) if column == "seed" else number(column, text, file)


def _survey(
    folder: Path, source: Path
) -> tuple[str, list[_File], dict[str, dict[str, str]]]:
    """Which files there are, sorted by run and epoch, and the rows of their table by file."""
    found: dict[str, list[_File]] = {}
    for path in sorted(folder.rglob("*.pt")):
        match = _FILE.fullmatch(path.name)
        if match and path.parent.name in KNOWN_TASKS:
            accuracy, epoch = int(match["accuracy"][:10]) / 10000, match["epoch"]
            late = epoch.isdecimal() and int(epoch[:10]) > LAST_EPOCH
            if accuracy > 1 or late:
                raise ImportFileError(
                    f"'{path.name}' is named for an accuracy above 1 or an epoch past {LAST_EPOCH}"
                )
            file = _File(path, match["run"], epoch, accuracy)
            found.setdefault(path.parent.name, []).append(file)
    if not found:
        raise ImportFileError(
            f"'{source}' holds no files named mnist/<run>_<epoch>_<accuracy>.pt, or so in a folder "
            f"of another task ({', '.join(KNOWN_TASKS)})"
        )
    if len(found) > 1:
        raise _several_tasks(source, sorted(found))
    ((name, files),) = found.items()
    table: dict[str, dict[str, str]] = {}
    for path in folder.rglob(f"metadata/{name}.csv"):
        table |= read_table(path)
    return name, files, table


def _several_tasks(source: Path, names: list[str]) -> ImportFileError:
    return ImportFileError(
        f"'{source}' holds both {' and '.join(names)} files: import one folder at a time"
    )


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
        unpack(source, Path(scratch))
        yield Path(scratch)
