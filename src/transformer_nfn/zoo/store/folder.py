"""The folder of a zoo: its description, its lock files, and when it is finished."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_nfn import __version__
from transformer_nfn.io.files import foreign_files, sweep
from transformer_nfn.seed_kinds import SEED_KINDS, UNKNOWN
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.store.about import check_about, read_about
from transformer_nfn.zoo.store.files import Checksums
from transformer_nfn.zoo.store.index import Index
from transformer_nfn.zoo.store.shards import read_header
from transformer_nfn.zoo.word_vectors import VECTORS_FILE, WordVectors

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
