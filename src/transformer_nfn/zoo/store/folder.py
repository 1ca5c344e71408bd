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
import safetensors.torch
import torch
from torch import Tensor

from transformer_nfn import __version__
from transformer_nfn.io.files import foreign_files, read_regular, sweep, write_bytes
from transformer_nfn.io.json_fields import Fields, parse_object, read_object
from transformer_nfn.io.tensor_files import tensor_bytes
from transformer_nfn.known_tasks import SEED_KINDS, UNKNOWN_SEEDS
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.sizes import NetworkSizes, check_sizes
from transformer_nfn.zoo.store.index import Index
from transformer_nfn.zoo.store.shards import DTYPES, read_header

FORMAT = 1
KIND = "transformer-nfn zoo"
MODELS_KIND = "transformer-nfn model zoo"
"""Kind of the ``zoo.json`` of a zoo of any checkpoints; see `store.model_zoo.ModelZoo`."""
GROUPS_FILE = "kinds.json"
"""Marks the folder of a mixed zoo, whose zoos are subfolders; see `store.zoo.MixedZoo`."""
VECTORS_FILE = "vectors.safetensors"
MAX_SHARDS = 99_999
"""Shards have names of five digits."""
_FILES = {"zoo.json", "checksums.json", "index.parquet", VECTORS_FILE, "shards", "claims"}


def sha256(data: bytes) -> str:
    """Checksum of a small file."""
    return hashlib.sha256(data).hexdigest()


class Checksums:
    """``checksums.json``: the SHA-256 sums of the small files of a zoo.

    While a file is replaced, both its old and its new sum are valid, so that a process killed
    between two renames leaves a valid folder.

    >>> from tempfile import mkdtemp
    >>> sums = Checksums(Path(mkdtemp()))
    >>> sums.replace("zoo.json", b"{}")
    >>> sums.read("zoo.json")
    b'{}'
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checksums.json"
        self.folder = folder

    def _read(self) -> dict[str, list[str]]:
        if not self.path.exists():
            return {}
        checksums = read_object(self.path, StoreError)
        for name, sums in checksums.items():
            if not isinstance(sums, list) or not all(isinstance(text, str) for text in sums):
                raise StoreError(f"{self.path}: invalid checksums of '{name}'")
        return checksums

    def replace(self, name: str, data: bytes) -> None:
        """Write the file ``name`` and its sum."""
        new = sha256(data)
        sums = self._read()
        self._write(sums | {name: [*sums.get(name, [])[-1:], new]})
        write_bytes(self.folder / name, data)
        self._write(self._read() | {name: [new]})

    def _write(self, sums: dict[str, list[str]]) -> None:
        write_bytes(self.path, json.dumps(sums, indent=1).encode())

    def read(self, name: str) -> bytes:
        """The file's bytes, after checking their sum."""
        path = self.folder / name
        try:
            data = read_regular(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
        valid = self._read().get(name)
        if not valid:
            raise StoreError(f"{self.path}: holds no checksum of '{name}'")
        if sha256(data) not in valid:
            raise StoreError(
                f"{path}: damaged, expected sha256 {valid[-1][:12]}…, found {sha256(data)[:12]}…"
            )
        return data

    def read_metadata(self, name: str, kind: str, newest: int, what: str) -> dict[str, Any]:
        """Parse a JSON file of metadata.

        Args:
            name: of the file.
            kind: required value of its ``kind``.
            newest: the newest format this version reads.
            what: the kind as errors call it, such as ``a zoo``.
        """
        path = self.folder / name
        metadata = parse_object(self.read(name), str(path), StoreError)
        if metadata.get("kind") != kind:
            raise StoreError(f"{path}: kind {metadata.get('kind')!r} is not {what}")
        if type(metadata.get("format")) is not int:
            raise StoreError(f"{path}: has no format, a whole number")
        if metadata["format"] > newest:
            raise StoreError(
                f"{path}: format {metadata['format']} is newer than this version of "
                f"transformer-nfn ({__version__}) knows ({newest}); update it"
            )
        return metadata

    def write_metadata(self, name: str, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Write a JSON file of metadata that `read_metadata` reads; its content."""
        maker = f"transformer-nfn {__version__}"
        metadata = {"format": FORMAT, "kind": kind, "made_by": maker, **fields}
        self.replace(name, json.dumps(metadata, indent=1).encode())
        return metadata


@dataclass(frozen=True)
class WordVectors:
    """A vocabulary, a vector per word ``[words, width]``, and their source.

    >>> words = WordVectors(("good", "bad"), torch.eye(2), "example")
    >>> WordVectors.from_bytes(words.to_bytes()).vocabulary
    ('good', 'bad')
    """

    vocabulary: tuple[str, ...]
    vectors: Tensor
    source: str

    def to_bytes(self) -> bytes:
        """As a safetensors file; the vocabulary is UTF-8 JSON in a byte tensor."""
        text = json.dumps([self.source, *self.vocabulary], ensure_ascii=False).encode()
        words = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        return b"".join(tensor_bytes({"vectors": self.vectors, "vocabulary": words}))

    @staticmethod
    def from_bytes(data: bytes) -> WordVectors:
        """The inverse of `to_bytes`."""
        try:
            tensors = safetensors.torch.load(data)
            source, *vocabulary = json.loads(tensors["vocabulary"].numpy().tobytes().decode())
            vectors = tensors["vectors"]
            matrix = vectors.is_floating_point() and vectors.ndim == 2
            if not matrix or len(vectors) != len(vocabulary):
                raise ValueError(f"{len(vocabulary)} words, vectors {list(vectors.shape)}")
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{VECTORS_FILE}: holds no word vectors ({error})") from error
        return WordVectors(tuple(vocabulary), vectors, source)


def check_metadata(metadata: dict[str, Any], where: str) -> None:
    """Validate the content of ``zoo.json``, read from the file ``where``."""
    fields = Fields(metadata, where, StoreError)
    fields.whole("shards", 0, MAX_SHARDS)
    check_sizes(fields.inner("architecture"))
    sizes = NetworkSizes.from_json(metadata["architecture"])
    fields.inner("task").text("name")
    for name in ("origin", "made_by"):
        fields.text(name)
    if "seeds" in metadata:
        fields.text("seeds")
    if metadata.get("dtype", "float32") not in DTYPES:
        raise StoreError(
            f"'{where}': 'dtype' expected {' or '.join(DTYPES)}, found {metadata['dtype']!r}"
        )
    if "recipe" in metadata and "batch" in fields.inner("recipe").data:
        fields.inner("recipe").whole("batch", 1)
    if fields.has("positions"):
        _check_positions(fields.text("positions"), sizes, where)


def _check_positions(text: str, sizes: NetworkSizes, where: str) -> None:
    try:
        length = len(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise StoreError(f"'{where}': 'positions' is not base64 ({error})") from error
    if length != (expected := 4 * sizes.tokens * sizes.d_model):
        raise StoreError(f"'{where}': 'positions' expected {expected} bytes, found {length}")


@dataclass(frozen=True)
class Folder:
    """The folder of a zoo; ``metadata`` is the content of ``zoo.json``.

    >>> from tempfile import mkdtemp
    >>> fields = {"origin": "build", "task": {"name": "digits"}, "shards": 2}
    >>> folder = Folder.create(Path(mkdtemp()), NetworkSizes(16, 10, 4), fields)
    >>> folder.shards, folder.finished()
    (['00000', '00001'], [])
    """

    path: Path
    metadata: dict[str, Any]

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of every network."""
        return NetworkSizes.from_json(self.metadata["architecture"])

    @property
    def shards(self) -> list[str]:
        """Names of all shards, finished or not."""
        return [f"{i:05d}" for i in range(self.metadata["shards"])]

    @property
    def seeds(self) -> str:
        """``one`` if all runs share a seed, ``each`` if every run has its own, ``unknown``."""
        default = "each" if self.metadata.get("origin") == "build" else UNKNOWN_SEEDS
        seeds = str(self.metadata.get("seeds", default))
        return seeds if seeds in SEED_KINDS else UNKNOWN_SEEDS

    @property
    def dtype(self) -> torch.dtype:
        """The type in which weights are stored."""
        return DTYPES[self.metadata.get("dtype", "float32")]

    def shard_path(self, shard: str) -> Path:
        """The file of a shard, finished or not."""
        return self.path / "shards" / f"{shard}.safetensors"

    def finished(self) -> list[str]:
        """Names of the shards that are on disk."""
        return [shard for shard in self.shards if self.shard_path(shard).exists()]

    def missing(self) -> list[str]:
        """Names of the shards that are not on disk."""
        return [shard for shard in self.shards if not self.shard_path(shard).exists()]

    def word_vectors(self) -> WordVectors | None:
        """The word vectors of a text zoo."""
        if not (self.path / VECTORS_FILE).exists():
            return None
        return WordVectors.from_bytes(Checksums(self.path).read(VECTORS_FILE))

    @staticmethod
    def open(path: Path | str) -> Folder:
        """Read and validate ``zoo.json``."""
        path = Path(path)
        if (path / GROUPS_FILE).is_file():
            groups = ", ".join(sorted(p.parent.name for p in path.glob("*/zoo.json")))
            raise StoreError(
                f"'{path}' is a mixed zoo: name one of its kinds, as in {path}/KIND ({groups})"
            )
        if not (path / "zoo.json").is_file():
            raise StoreError(f"'{path}' is not a zoo: it has no zoo.json")
        if zoo_kind(path) == MODELS_KIND:
            raise StoreError(
                f"'{path}' holds checkpoints of any family: expected a zoo of small transformers "
                "of one task (tnfn zoo build)"
            )
        metadata = Checksums(path).read_metadata("zoo.json", KIND, FORMAT, "a zoo")
        check_metadata(metadata, str(path / "zoo.json"))
        return Folder(path, metadata)

    @staticmethod
    def create(path: Path, sizes: NetworkSizes, fields: dict[str, Any]) -> Folder:
        """Write ``zoo.json`` into a folder that `check_fresh` accepts."""
        (path / "shards").mkdir(parents=True, exist_ok=True)
        network = {
            "architecture": sizes.to_json(),
            "space": json.loads(sizes.space.to_json()),
        }
        return Folder(path, Checksums(path).write_metadata("zoo.json", KIND, network | fields))

    @contextlib.contextmanager
    def claim(self, name: str, *, wait: bool = False) -> Iterator[bool]:
        """Lock ``name`` in this folder; see `claim`."""
        with claim(self.path, name, wait=wait) as held:
            yield held

    def merge(self) -> None:
        """Write ``index.parquet`` from the shards once all are there."""
        with self.claim("index", wait=True):
            if self.missing():
                return
            with contextlib.suppress(StoreError):
                index = Index.from_parquet(Checksums(self.path).read("index.parquet"), "")
                if set(index.shards) == set(self.shards):
                    return
            Checksums(self.path).replace("index.parquet", self._read_shards().to_parquet())
            sweep(self.path)
            sweep(self.path / "shards")

    def _read_shards(self) -> Index:
        rows: list[dict[str, Any]] = []
        sums: dict[str, int] = {}
        for shard in self.finished():
            header = read_header(self.shard_path(shard))
            rows += [{**row, "shard": shard} for row in header.rows]
            sums[shard] = header.crc32
        return Index.from_rows(rows, sums)

    def index(self) -> Index:
        """The index from its file, or from the finished shards during a build."""
        path = self.path / "index.parquet"
        if path.exists():
            return Index.from_parquet(Checksums(self.path).read(path.name), str(path))
        return self._read_shards()


def zoo_kind(path: Path | str) -> str:
    """The kind that ``zoo.json`` of a folder states; empty where there is none to read."""
    file = Path(path) / "zoo.json"
    try:
        return str(read_object(file, StoreError).get("kind")) if file.is_file() else ""
    except StoreError:
        return ""  # opening the zoo reports why


def check_fresh(path: Path) -> None:
    """Reject a folder that holds anything but the beginning of a zoo."""
    if not path.exists():
        return
    if not path.is_dir():
        raise StoreError(f"'{path}' is a file, not a folder")
    if (path / GROUPS_FILE).is_file():
        raise StoreError(f"'{path}' holds a mixed zoo: name an empty folder")
    foreign = foreign_files(path, _FILES)
    if foreign:
        raise StoreError(f"'{path}' holds other files ('{foreign[0]}'): name an empty folder")


def check_outside_zoos(path: Path) -> None:
    """Reject an output path inside a zoo: a zoo holds only its own files."""
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        if any(os.path.isfile(folder / name) for name in ("zoo.json", GROUPS_FILE)):
            raise StoreError(f"'{path}' lies in the zoo '{folder}': choose another place")


@contextlib.contextmanager
def claim(folder: Path, name: str, *, wait: bool = False) -> Iterator[bool]:
    """Lock ``name`` in ``folder``: whether this process holds it. The lock ends with the process.

    Args:
        wait: until another process releases it, instead of yielding False.
    """
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
