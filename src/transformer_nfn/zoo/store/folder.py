"""The folder of a zoo: metadata, checksums of its small files, word vectors and lock files."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from transformer_nfn import __version__
from transformer_nfn.io.files import foreign_files, read_regular, sweep, write_bytes
from transformer_nfn.io.json_fields import Fields, parse_object, read_object
from transformer_nfn.seed_kinds import SEED_KINDS, UNKNOWN
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store.index import Index
from transformer_nfn.zoo.store.shards import read_header


def sha256(data: bytes) -> str:
    """The checksum the store uses for whole files."""
    return hashlib.sha256(data).hexdigest()


class Checksums:
    """``checksums.json``: what the small files of a zoo must hash to.

    A file that is being replaced may match its old or its new sum, so that a process killed
    between two renames leaves a folder that still checks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checksums.json"
        self.folder = folder

    def _read(self) -> dict[str, list[str]]:
        if not self.path.exists():
            return {}
        found = read_object(self.path, StoreError)
        for name, sums in found.items():
            if not isinstance(sums, list) or not all(isinstance(text, str) for text in sums):
                raise StoreError(f"{self.path}: what stands at '{name}' are no checksums")
        return found

    def replace(self, name: str, data: bytes) -> None:
        """Writes the file ``name`` and its sum."""
        new = sha256(data)
        sums = self._read()
        self._write(sums | {name: [*sums.get(name, [])[-1:], new]})
        write_bytes(self.folder / name, data)
        self._write(self._read() | {name: [new]})

    def _write(self, sums: dict[str, list[str]]) -> None:
        write_bytes(self.path, json.dumps(sums, indent=1).encode())

    def read(self, name: str) -> bytes:
        """The file's bytes, checked."""
        path = self.folder / name
        try:
            data = read_regular(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
        known = self._read().get(name)
        if not known:
            raise StoreError(f"{self.path}: holds no checksum of '{name}'")
        if sha256(data) not in known:
            raise StoreError(
                f"{path}: damaged, expected sha256 {known[-1][:12]}…, found {sha256(data)[:12]}…"
            )
        return data


VECTORS_FILE = "vectors.safetensors"


@dataclass(frozen=True)
class WordVectors:
    """A vocabulary and a vector for each word, ``[words, width]``, with where they came from."""

    vocabulary: tuple[str, ...]
    vectors: Tensor
    source: str

    def to_bytes(self) -> bytes:
        """As a safetensors file; the vocabulary is UTF-8 JSON in a byte tensor."""
        text = json.dumps([self.source, *self.vocabulary], ensure_ascii=False).encode()
        return safetensors.torch.save(
            {
                "vectors": self.vectors.contiguous(),
                "vocabulary": torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()),
            }
        )

    @staticmethod
    def from_bytes(data: bytes) -> WordVectors:
        """Reads what `to_bytes` wrote."""
        try:
            tensors = safetensors.torch.load(data)
            source, *vocabulary = json.loads(tensors["vocabulary"].numpy().tobytes().decode())
            found = WordVectors(tuple(vocabulary), tensors["vectors"], source)
            whole = found.vectors.is_floating_point() and found.vectors.ndim == 2
            if not whole or len(found.vectors) != len(vocabulary):
                raise ValueError(f"{len(vocabulary)} words, vectors {list(found.vectors.shape)}")
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{VECTORS_FILE}: holds no word vectors ({error})") from error
        return found


MOST_SHARDS = 99_999
"""As many as their names of five digits can tell apart."""
DTYPES = ("float32", "float16")


def read_about(path: Path, kind: str, newest: int, what: str) -> dict[str, Any]:
    """What a signed description says; refuses another kind, and what a newer version wrote.

    Args:
        path: of the file.
        kind: that it must be of.
        newest: the newest format that is known.
        what: the kind in words, ``a zoo``.
    """
    data = Checksums(path.parent).read(path.name)
    about = parse_object(data, str(path), StoreError)
    if about.get("kind") != kind:
        raise StoreError(f"{path}: kind {about.get('kind')!r} is not {what}")
    if type(about.get("format")) is not int:
        raise StoreError(f"{path}: has no format, a whole number")
    if about["format"] > newest:
        raise StoreError(
            f"{path}: format {about['format']} is newer than this version of transformer-nfn "
            f"({__version__}) knows ({newest}); update it"
        )
    return about


def check_about(about: dict[str, Any], where: str) -> None:
    """Refuses a description whose fields cannot be those of a zoo.

    Args:
        about: what ``zoo.json`` says.
        where: its path.
    """
    fields = Fields(about, where, StoreError)
    fields.whole("shards", 0, MOST_SHARDS)
    arch = NetworkSizes.from_json(fields.inner("architecture").data)
    fields.inner("task").text("name")
    for name in ("origin", "made_by"):
        fields.text(name)
    if "seeds" in about:
        fields.text("seeds")
    if about.get("dtype", "float32") not in DTYPES:
        raise StoreError(
            f"'{where}': 'dtype' expected {' or '.join(DTYPES)}, found {about['dtype']!r}"
        )
    if "recipe" in about and "batch" in fields.inner("recipe").data:
        fields.inner("recipe").whole("batch", 1)
    if fields.has("positions"):
        _check_positions(fields.text("positions"), arch, where)


def _check_positions(text: str, arch: NetworkSizes, where: str) -> None:
    try:
        size = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"'{where}': 'positions' is not base64 ({error})") from error
    if size != (expected := 4 * arch.tokens * arch.d_model):
        raise StoreError(f"'{where}': 'positions' expected {expected} bytes, found {size}")


FORMAT = 1
KIND = "transformer-nfn zoo"
KINDS_FILE = "kinds.json"
"""In the folder of a mixed zoo, whose zoos lie in folders below it; see `store.mixed`."""
_OWN = {"zoo.json", "checksums.json", "index.parquet", VECTORS_FILE, "shards", "claims"}


@dataclass(frozen=True)
class Folder:
    """A zoo on disk; ``about`` is what ``zoo.json`` says."""

    path: Path
    about: dict[str, Any]

    @property
    def arch(self) -> NetworkSizes:
        """The network every row is."""
        return NetworkSizes.from_json(self.about["architecture"])

    @property
    def shards(self) -> list[str]:
        """The names of all shards there will be."""
        return [f"{i:05d}" for i in range(self.about["shards"])]

    @property
    def seeds(self) -> str:
        """``one`` if all runs share a seed, ``each`` if every run has its own, ``unknown``."""
        # Builds from before there was a choice gave every run its own.
        default = "each" if self.about.get("origin") == "build" else UNKNOWN
        kind = str(self.about.get("seeds", default))
        return kind if kind in SEED_KINDS else UNKNOWN

    def shard_path(self, shard: str) -> Path:
        """Where a shard lies, or will lie."""
        return self.path / "shards" / f"{shard}.safetensors"

    def finished(self) -> list[str]:
        """The shards that are there."""
        return [shard for shard in self.shards if self.shard_path(shard).exists()]

    def word_vectors(self) -> WordVectors | None:
        """The word vectors a text zoo keeps."""
        if not (self.path / VECTORS_FILE).exists():
            return None
        return WordVectors.from_bytes(Checksums(self.path).read(VECTORS_FILE))

    @staticmethod
    def open(path: Path | str) -> Folder:
        """Reads ``zoo.json``; refuses what is no zoo, a newer one, or a damaged one."""
        path = Path(path)
        if (path / KINDS_FILE).is_file():
            kinds = ", ".join(sorted(p.parent.name for p in path.glob("*/zoo.json")))
            raise StoreError(
                f"'{path}' is a mixed zoo: name one of its kinds, as in {path}/KIND ({kinds})"
            )
        if not (path / "zoo.json").is_file():
            raise StoreError(f"'{path}' is not a zoo: it has no zoo.json")
        about = read_about(path / "zoo.json", KIND, FORMAT, "a zoo")
        check_about(about, str(path / "zoo.json"))
        return Folder(path, about)

    @staticmethod
    def create(path: Path, arch: NetworkSizes, about: dict[str, Any]) -> Folder:
        """Writes ``zoo.json`` into a folder that `check_fresh` found fit."""
        whole = {
            "format": FORMAT,
            "kind": KIND,
            "made_by": f"transformer-nfn {__version__}",
            "architecture": arch.to_json(),
            "space": json.loads(arch.space.to_json()),
            **about,
        }
        (path / "shards").mkdir(parents=True, exist_ok=True)
        Checksums(path).replace("zoo.json", json.dumps(whole, indent=1).encode())
        return Folder(path, whole)

    @contextlib.contextmanager
    def claim(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Whether this process now holds ``name``; the system lets go when it dies."""
        with claim(self.path, name, wait=wait) as mine:
            yield mine

    def merge(self) -> None:
        """Writes ``index.parquet`` from the shards, once all are there."""
        with self.claim("index", wait=True):
            if len(self.finished()) < len(self.shards):
                return
            with contextlib.suppress(StoreError):
                index = Index.from_parquet(Checksums(self.path).read("index.parquet"), "")
                if set(index.shards) == set(self.shards):
                    return
            Checksums(self.path).replace("index.parquet", self.read_shards().to_parquet())
            sweep(self.path)
            sweep(self.path / "shards")

    def read_shards(self) -> Index:
        """The index as the finished shards give it."""
        rows: list[dict[str, Any]] = []
        sums: dict[str, int] = {}
        for shard in self.finished():
            header = read_header(self.shard_path(shard))
            rows += [{**row, "shard": shard} for row in header.rows]
            sums[shard] = header.crc32
        return Index.from_rows(rows, sums)

    def index(self) -> Index:
        """The index from its file, or from the shards while the zoo is being built."""
        if (self.path / "index.parquet").exists():
            where = str(self.path / "index.parquet")
            return Index.from_parquet(Checksums(self.path).read("index.parquet"), where)
        return self.read_shards()


def check_fresh(path: Path) -> None:
    """Refuses a folder that holds anything but the beginnings of a zoo."""
    if not path.exists():
        return
    if not path.is_dir():
        raise StoreError(f"'{path}' is a file, not a folder")
    if (path / KINDS_FILE).is_file():
        raise StoreError(f"'{path}' holds a mixed zoo: name an empty folder")
    foreign = foreign_files(path, _OWN)
    if foreign:
        raise StoreError(f"'{path}' holds other files ('{foreign[0]}'): name an empty folder")


def check_outside_zoos(path: Path) -> None:
    """Refuses a place to write to that is a zoo, or in one: a zoo holds its own files only."""
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        if any(os.path.isfile(folder / name) for name in ("zoo.json", KINDS_FILE)):
            raise StoreError(f"'{path}' lies in the zoo '{folder}': choose another place")


@contextlib.contextmanager
def claim(folder: Path, name: str, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process now holds ``name`` in ``folder``; see `Folder.claim`."""
    claims = folder / "claims"
    try:
        claims.mkdir(parents=True, exist_ok=True)
        file = (claims / f"{name}.lock").open("a")
    except OSError as error:
        raise StoreError(f"{claims}: cannot be written ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
