"""The folder of a zoo: metadata, checksums of its small files, word vectors and lock files."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Container, Iterator, Sequence
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
from transformer_nfn.known_tasks import KNOWN_TASKS, SEED_KINDS, TASKS, UNKNOWN_SEEDS
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.sizes import NetworkSizes, SizeGroup, read_sizes
from transformer_nfn.zoo.store.index import Index
from transformer_nfn.zoo.store.shards import DTYPES, read_header

FORMAT = 1
KIND = "transformer-nfn zoo"
MODELS_KIND = "transformer-nfn model zoo"
"""Kind of the ``zoo.json`` of a zoo of networks of a user: checkpoints of any family, or arrays."""
INDEX = "index.parquet"
GROUPS_FILE, GROUPS_KIND = "kinds.json", "transformer-nfn mixed zoo"
"""Marks the folder of a mixed zoo, whose zoos are subfolders; see `store.zoo.Zoo`."""
VECTORS_FILE = "vectors.safetensors"
MAX_SHARDS = 99_999
"""Shards have names of five digits."""
ORIGINS = ("build", "import", "damage")
"""How the networks of a zoo came about."""
PRECISIONS = ("float32", "tf32", "bf16")
SELECTIONS = ("held", "test")
_RUN = re.compile("0[0-9]{4}|1[0-5][0-9]{3}")
_FILES = {"zoo.json", "checksums.json", INDEX, VECTORS_FILE, "shards", "claims"}


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
        fields = Fields(read_object(self.path, StoreError), str(self.path), StoreError)
        return {name: fields.each(name, Fields.text) for name in fields.data}

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

    def read_metadata(self, name: str, kind: str) -> Fields:
        """Parse a JSON file of metadata, whose ``kind`` has to be this one."""
        path = str(self.folder / name)
        fields = Fields(parse_object(self.read(name), path, StoreError), path, StoreError)
        fields.choice("kind", (kind,))
        fields.text("made_by")
        if fields.whole("format", 1) > FORMAT:
            raise StoreError(
                f"{path}: format {fields.data['format']} is newer than this version of "
                f"transformer-nfn ({__version__}) knows ({FORMAT}); update it"
            )
        return fields

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


def check_metadata(fields: Fields, where: str) -> None:
    """Validate the content of ``zoo.json``, read from the file ``where``."""
    origin = fields.choice("origin", ORIGINS)
    fields.whole("shards", 1, MAX_SHARDS)
    task = fields.inner("task")
    known = KNOWN_TASKS[task.choice("name", KNOWN_TASKS)]
    task.inner("provenance")
    if task.data.get("samples", 0) is not None:
        task.whole("samples", 1)
    architecture = fields.inner("architecture")
    sizes = read_sizes(architecture)
    try:
        expected = NetworkSizes.of(known, sizes.group)
    except ZooError as error:
        raise StoreError(f"'{where}': 'architecture': {error}") from error
    for name, size in expected.to_json().items():
        # Imported networks may have been trained for other classes of their task.
        if size != architecture.data[name] and (origin == "build" or name in ("tokens", "d_ff")):
            architecture.refuse(name, f"{size} for networks on {known.name} of {sizes.group}")
    fields.choice("dtype", DTYPES)
    if origin != "build":
        fields.choice("seeds", (*SEED_KINDS, UNKNOWN_SEEDS))
    elif "seeds" in fields.data:
        fields.choice("seeds", SEED_KINDS)
    recipe = fields.inner("recipe")
    # The authors' files do not state the others.
    stated = recipe.data.keys() & {"epochs", "precision", "percents"}
    check_recipe(recipe, whole=origin == "build" or bool(stated))
    if origin == "build":
        _check_plan(fields)
    if origin == "damage":
        fields.inner("damage")
    if fields.has("positions"):
        table = sizes.positions().numpy().ravel()
        try:
            data = base64.b64decode(fields.text("positions"), validate=True)
            stored = np.frombuffer(data, dtype=np.float32)
        except ValueError:
            stored = np.empty(0, np.float32)
        if stored.size != table.size or not np.allclose(stored, table, atol=1e-4):
            fields.refuse("positions", f"the fixed sinusoids of {sizes.tokens} tokens in base64")


def check_recipe(recipe: Fields, *, whole: bool = True) -> None:
    """Validate the training parameters of a zoo; where not whole, those of imported networks."""
    recipe.whole("batch", 1)
    recipe.choice("select", SELECTIONS)
    if not whole:
        return
    recipe.whole("epochs", 1)
    recipe.choice("precision", PRECISIONS)
    percents = recipe.each("percents", lambda items, name: items.whole(name, 1, 100))
    if "until" in recipe.data and recipe.data["until"] not in percents:
        recipe.refuse("until", f"one of {', '.join(map(str, percents))}")


def _check_plan(fields: Fields) -> None:
    """Validate the fields of a zoo that was built: its seed, and the runs of each shard."""
    fields.whole("seed", 0, 2**63 - 1)
    plan = fields.each("plan", lambda shards, name: shards.each(name, Fields.text))
    if fields.data["shards"] != len(plan):
        fields.refuse("shards", f"{len(plan)}, the length of 'plan'")
    runs = [run for shard in plan for run in shard]
    if fields.whole("runs", 1) != len(runs):
        fields.refuse("runs", f"{len(runs)}, the runs of 'plan'")
    if len(set(runs)) < len(runs) or not all(map(_RUN.fullmatch, runs)):
        fields.refuse("plan", "runs of the grid, 00000 to 15999, each once")


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
        return str(self.metadata.get("seeds", "each"))

    @property
    def dtype(self) -> torch.dtype:
        """The type in which weights are stored."""
        return DTYPES[self.metadata["dtype"]]

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
        """The word vectors of a text zoo; the authors' are not part of their files."""
        imported = self.metadata["origin"] == "import" and not (self.path / VECTORS_FILE).exists()
        if self.sizes.patch or imported:
            return None
        words = WordVectors.from_bytes(Checksums(self.path).read(VECTORS_FILE))
        width = words.vectors.shape[1]
        if width != self.sizes.d_model or not bool(words.vectors.isfinite().all()):
            raise StoreError(
                f"{self.path / VECTORS_FILE}: expected finite vectors of width "
                f"{self.sizes.d_model}, found width {width}"
            )
        return words

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
        fields = Checksums(path).read_metadata("zoo.json", KIND)
        check_metadata(fields, str(path / "zoo.json"))
        return Folder(path, dict(fields.data))

    @staticmethod
    def create(path: Path, sizes: NetworkSizes, fields: dict[str, Any]) -> Folder:
        """Write ``zoo.json`` into a folder that `check_fresh` accepts."""
        (path / "shards").mkdir(parents=True, exist_ok=True)
        network = {
            "architecture": sizes.to_json(),
            "space": json.loads(sizes.space.to_json()),
        }
        return Folder(path, Checksums(path).write_metadata("zoo.json", KIND, network | fields))

    @staticmethod
    def create_once(
        path: Path, sizes: NetworkSizes, fields: dict[str, Any], words: WordVectors | None
    ) -> bool:
        """As `create`, with word vectors; False if another process created the zoo first."""
        with claim(path, "create", wait=True):
            if (path / "zoo.json").exists():
                return False
            if words is not None:
                Checksums(path).replace(VECTORS_FILE, words.to_bytes())
            Folder.create(path, sizes, fields)
        return True

    def merge(self) -> None:
        """Write ``index.parquet`` from the shards once all are there."""
        with claim(self.path, "index", wait=True):
            sweep(self.path)
            sweep(self.path / "shards")
            if self.missing():
                return
            with contextlib.suppress(StoreError):
                if set(self._stored_index().shards) == set(self.shards):
                    return
            Checksums(self.path).replace(INDEX, self._read_shards().to_parquet())

    def check_shards(self) -> Index:
        """Compare the shards on disk with the plan and the index, before a build goes on.

        The index of a zoo that lost a shard is removed, and made again with the shard.
        """
        with claim(self.path, "index", wait=True):
            listed: dict[str, int] = {}
            with contextlib.suppress(StoreError):  # a damaged index is made again
                listed = self._stored_index().shards
            index = self._read_shards()
            for shard, crc32 in index.shards.items():
                if listed.get(shard, crc32) != crc32:
                    raise StoreError(
                        f"{self.shard_path(shard)}: damaged, its header does not match its "
                        f"checksum in {INDEX}; delete it to train it again"
                    )
            if not set(listed) <= set(self.finished()):
                (self.path / INDEX).unlink(missing_ok=True)
            return index

    def read_shard(self, shard: str) -> Index:
        """The rows of a shard on disk, and the checksum of its header; reads no weights."""
        path = self.shard_path(shard)
        header = read_header(path)
        rows = [{**row, "shard": shard} for row in header.rows]
        return Index.from_rows(rows, {shard: header.crc32}, str(path))

    def _read_shards(self) -> Index:
        index = Index.joined([self.read_shard(shard) for shard in self.finished()])
        self._check_runs(index)
        sources = index.columns["source"].tolist()
        if self.metadata["origin"] == "damage" and len(set(sources)) < len(sources):
            twice = sources.index(max(sources, key=sources.count))
            path = self.shard_path(index.columns["shard"][twice])
            raise StoreError(f"{path}: another shard holds the same networks")
        return index

    def _stored_index(self) -> Index:
        """The index from its file, compared with ``zoo.json``."""
        index = Index.from_parquet(Checksums(self.path).read(INDEX), str(self.path / INDEX))
        self._check_runs(index)
        # A build may have grown since its index was written.
        if self.metadata["origin"] != "build" and (found := len(index.shards)) != len(self.shards):
            raise StoreError(
                f"'{self.path / 'zoo.json'}': 'shards' expected {found}, those of {INDEX}, found "
                f"{len(self.shards)}"
            )
        return index

    def _check_runs(self, index: Index) -> None:
        """Compare the runs of every shard with the plan."""
        runs: dict[str, set[str]] = {shard: set() for shard in index.shards}
        columns = (index.columns[name].tolist() for name in ("shard", "run"))
        for shard, run in zip(*columns, strict=True):
            runs.setdefault(shard, set()).add(run)
        if foreign := runs.keys() - set(self.shards):
            raise StoreError(f"'{self.path / INDEX}': zoo.json has no shard '{min(foreign)}'")
        if self.metadata["origin"] != "build":
            return
        planned = dict(zip(self.shards, self.metadata["plan"], strict=True))
        for shard, held in runs.items():
            if odd := held ^ set(planned[shard]):
                verb = "holds" if min(odd) in held else "lacks"
                raise StoreError(
                    f"{self.shard_path(shard)}: {verb} run '{min(odd)}', unlike 'plan' in zoo.json"
                )

    def index(self) -> Index:
        """The index from its file, or from the finished shards during a build."""
        return self._stored_index() if (self.path / INDEX).exists() else self._read_shards()


def zoo_kind(path: Path | str) -> str:
    """The kind that ``zoo.json`` of a folder states; empty where there is none to read."""
    file = Path(path) / "zoo.json"
    try:
        return str(read_object(file, StoreError).get("kind")) if file.is_file() else ""
    except StoreError:
        return ""  # opening the zoo reports why


def is_mixed(path: Path | str) -> bool:
    """Whether a folder is marked as a zoo of several sizes."""
    return (Path(path) / GROUPS_FILE).is_file()


def write_groups(path: Path, groups: Sequence[SizeGroup], fields: dict[str, Any]) -> None:
    """Write ``kinds.json``, which marks a folder as a zoo of several sizes."""
    names = [group.name for group in groups]
    Checksums(path).write_metadata(GROUPS_FILE, GROUPS_KIND, {**fields, "kinds": names})


def read_groups(path: Path) -> tuple[dict[str, Any], tuple[SizeGroup, ...]]:
    """Read and validate ``kinds.json``: its content and the sizes it lists."""
    if not is_mixed(path):
        raise StoreError(f"'{path}' is not a mixed zoo: it has no {GROUPS_FILE}")
    fields = Checksums(path).read_metadata(GROUPS_FILE, GROUPS_KIND)
    fields.choice("task", TASKS)
    fields.choice("seeds", (*SEED_KINDS, UNKNOWN_SEEDS))
    names = fields.each("kinds", Fields.text)
    if not names or len(set(names)) < len(names):
        fields.refuse("kinds", "names of zoos, each once")
    try:
        return dict(fields.data), tuple(map(SizeGroup.from_name, names))
    except ZooError as error:
        raise StoreError(f"'{path / GROUPS_FILE}': 'kinds': {error}") from error


def check_fresh(path: Path, files: Container[str] = _FILES) -> None:
    """Reject a folder with other files than these, by default those a zoo begins with."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"'{path}' is a file, not a folder")
    if path.exists() and (foreign := foreign_files(path, files)):
        what = "a mixed zoo" if GROUPS_FILE in foreign else f"other files ('{foreign[0]}')"
        raise StoreError(f"'{path}' holds {what}: name an empty folder")


def check_outside_zoos(path: Path, *, new: bool = False) -> None:
    """Reject an output path inside a zoo: a zoo holds only its own files.

    Args:
        new: the path itself may be a zoo, or the beginning of one.
    """
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents)[new:]:
        if any(os.path.isfile(folder / name) for name in ("zoo.json", GROUPS_FILE)):
            raise StoreError(f"'{path}' lies in the zoo '{folder}': choose another place")


def _lock(file: int, wait: bool) -> bool:
    """Lock an open file, until it is closed; False where another process holds it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            mode = msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK
            while True:
                try:
                    msvcrt.locking(file, mode, 1)
                    return True
                except OSError:
                    if not wait:  # waiting ends after ten attempts
                        return False
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


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
        yield _lock(file.fileno(), wait)
