"""Locations: what a user typed for files, as a path, a named asset or a hub repository."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from transformer_nfn.errors import CheckpointError, DownloadError
from transformer_nfn.io.assets import NAME, asset_folder
from transformer_nfn.io.checkpoint import (
    ADAPTER,
    CONFIG,
    INDEX,
    MODULES,
    ONNX,
    WEIGHTS,
    Checkpoint,
    choose_weights,
    read_config,
    sentence_modules,
    shard_names,
)
from transformer_nfn.io.hub import Commit, commit_of
from transformer_nfn.io.tensor_files import TensorInfo

HUB = "hf:"
SAFETENSORS = ".safetensors"
LARGE = 4_000_000_000
"""Bytes beyond which weights are fetched for what reads them all, not for their shapes."""
FORM = "hf:org/name@revision:subfolder"
NAMED = re.compile(rf"{HUB}(?P<repository>[^@:]*)(@(?P<revision>[^:]*))?(:(?P<subfolder>.*))?")
_PART = r"[A-Za-z0-9_](?:(?!--|\.\.)[\w.-])*(?<![.-])"
REPOSITORY = re.compile(rf"(?=.{{1,96}}$){_PART}(?:/{_PART})?", re.ASCII)
BARE = re.compile(rf"(?=.{{1,96}}$){_PART}/{_PART}", re.ASCII)
"""An id of a hub without ``hf:``."""
REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][\w./-]*", re.ASCII)
FILE_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$")
"""What a file ends in; ``.5B`` and ``.1`` are the end of a model's name."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True)
class Location:
    """Where files are that a user named.

    Attributes:
        text: what the user typed.
        repository: its id on the hub; None for a path or the name of an asset.
        revision: branch, tag or commit; None for the main branch.
        subfolder: a folder or file in the repository.

    >>> Location.of("hf:org/name@v1:onnx/model.onnx").subfolder
    'onnx/model.onnx'
    >>> Location.of("Qwen/Qwen2.5-0.5B").repository, Location.of("nets/model.pt").repository
    ('Qwen/Qwen2.5-0.5B', None)
    """

    text: str
    repository: str | None = None
    revision: str | None = None
    subfolder: str = ""

    @staticmethod
    def of(text: str | Path | Location) -> Location:
        """Resolve what a user typed: an existing path, an asset, or a hub repository.

        Args:
            text: a path, a name, ``hf:org/name@revision:subfolder``, or ``org/name`` where there
                is no folder ``org`` and ``name`` has no suffix of a file. A `Path` is no
                repository.
        """
        if isinstance(text, Location):
            return text
        if not text:
            raise CheckpointError("expected a path or name, found ''")
        if isinstance(text, Path) or os.path.lexists(text):
            return Location(str(text))
        if text.startswith(HUB):
            return Location.hub(text)
        if ADDRESS.match(text):
            raise CheckpointError(f"'{text}' is an address: expected a path, a name or {FORM}")
        bare = BARE.fullmatch(text) and not FILE_SUFFIX.search(text)
        here = os.path.lexists(text.partition("/")[0])
        return Location(text, text if bare and not here else None)

    @staticmethod
    def hub(text: str) -> Location:
        """The repository that a text with ``hf:`` names."""
        match = NAMED.fullmatch(text)
        if match is None:
            _refuse(text, text.removeprefix(HUB))
        repository, revision, subfolder = match["repository"], match["revision"], match["subfolder"]
        if not REPOSITORY.fullmatch(repository):
            _refuse(text, repository)
        if revision is not None and not REVISION.fullmatch(revision):
            _refuse(text, revision)
        parts = PurePosixPath(subfolder or "").parts
        if subfolder is not None and (
            not parts or ".." in parts or parts[0] == "/" or "\\" in subfolder
            or not subfolder.isprintable()
        ):  # fmt: skip
            _refuse(text, subfolder)
        return Location(text, repository, revision, "/".join(parts))

    def folder(self, kind: str) -> Path:
        """The folder of a ``zoo`` or ``predictor``; the files of an asset are checked first."""
        path = Path(self.text)
        if self.repository is not None or path.exists() or not NAME.fullmatch(self.text):
            return path
        return asset_folder(self.text, kind)

    def checkpoint(self) -> Path:
        """The file or folder of a checkpoint; of a repository what is needed is fetched first."""
        return self.fetch(() if self.repository is None else self.needed())

    def fetch(self, names: Iterable[str]) -> Path:
        """The file or folder on this machine; of a repository with files of these names in it."""
        if self.repository is None:
            return Path(self.text)
        root, _ = self._place
        return self._commit.fetch(f"{root}{name}" for name in names) / self.subfolder

    def missing(self, names: Iterable[str]) -> int:
        """Bytes that `fetch` would bring from the hub."""
        root, _ = self._place
        files = self._commit.missing(f"{root}{name}" for name in names)
        return sum(file.size for file in files.values())

    def files(self) -> list[str]:
        """Names of the files of a folder; of a repository to any depth, or beside the file."""
        if self.repository is not None:
            root, _ = self._place
            files = self._commit.files
            return [name.removeprefix(root) for name in files if name.startswith(root)]
        try:
            return os.listdir(self.text) if os.path.isdir(self.text) else []
        except (OSError, ValueError):
            return []

    @property
    def is_adapter(self) -> bool:
        """Whether this is a folder with an adapter (LoRA) and no model of its own."""
        names = set(self.files())
        file = self.repository is not None and self._place[1]
        return not file and not names.isdisjoint(ADAPTER) and names.isdisjoint(WEIGHTS)

    def needed(self) -> list[str]:
        """Files of a repository that a checkpoint is read from; no pickle beside safetensors."""
        held, (root, file) = self.files(), self._place
        place = f"{HUB}{self.repository}:{root}"
        if file:
            data = [name for name in held if name.startswith((f"{file}_data", f"{file}.data"))]
            config = [CONFIG] if file.endswith(ONNX) and CONFIG in held else []
            return [file, *data, *config, *self._shards(file, held)]
        if self.is_adapter:
            return [name for name in ADAPTER if name in held][:2]
        needed = [name for name in (CONFIG, MODULES) if name in held]
        weights = choose_weights(held, place)
        if weights is None:
            raise CheckpointError(
                f"'{place}' holds no weights that can be read: expected "
                f"{' or '.join(WEIGHTS[:3])}, found {', '.join(sorted(held)[:8])}"
            )
        if MODULES in held:
            for module in sentence_modules(self.fetch([MODULES])):
                beside = [f"{module}/{name}" for name in (CONFIG, *WEIGHTS)]
                needed += [beside[0]] * (beside[0] in held)
                needed += [name for name in beside[1:] if name in held][:1]
        return [*needed, weights, *self._shards(weights, held)]

    @property
    def is_large(self) -> bool:
        """Whether so much would be fetched that the headers of the weights are read instead."""
        if self.repository is None:
            return False
        return self.missing(name for name in self.needed() if name.endswith(SAFETENSORS)) > LARGE

    def outline(self) -> tuple[Checkpoint, Path]:
        """The tensors of a repository by the headers of its files, and its folder without them."""
        needed, (root, file) = self.needed(), self._place
        stored = [n for n in needed if n.endswith(SAFETENSORS) and (file or "/" not in n)]
        folder = self.fetch([name for name in needed if name not in stored])
        source = _Outline(self.text, self._commit.headers(f"{root}{name}" for name in stored))
        return Checkpoint.of(source, {} if file else read_config(folder), self.text), folder

    def _shards(self, index: str, held: Iterable[str]) -> list[str]:
        """The files that an index names; none of another file."""
        if not index.endswith(INDEX):
            return []
        root, file = self._place
        path = self.fetch([index])
        shards = list(dict.fromkeys(shard_names(path if file else path / index).values()))
        if outside := set(shards).difference(held):
            raise CheckpointError(
                f"'{HUB}{self.repository}:{root}{index}' names '{min(outside)}', which is not in "
                "the repository"
            )
        return shards

    @property
    def _commit(self) -> Commit:
        assert self.repository is not None
        try:
            return commit_of(self.repository, self.revision)
        except DownloadError as error:
            if self.text.startswith(HUB):
                raise
            raise DownloadError(f"there is no file '{self.text}', and {error}") from error

    @property
    def _place(self) -> tuple[str, str]:
        """The folder in the repository, empty or with a slash at its end, and the file there."""
        if self.subfolder in self._commit.files:
            folder, slash, file = self.subfolder.rpartition("/")
            return folder + slash, file
        root = f"{self.subfolder}/" if self.subfolder else ""
        if not any(name.startswith(root) for name in self._commit.files):
            raise CheckpointError(
                f"'{self.text}': '{self.repository}' holds no file or folder '{self.subfolder}'"
            )
        return root, ""


class _Outline:
    """Tensors that stay on the hub; see `TensorSource`."""

    def __init__(self, where: str, infos: Mapping[str, TensorInfo]) -> None:
        self._where, self.infos = where, infos
        self.metadata: Mapping[str, str] = {}

    def read(self, name: str) -> NoReturn:
        """Refuses: no weights are read."""
        raise CheckpointError(
            f"'{self._where}': '{name}' is not on this machine, and only the headers of a model of "
            "this size are read from a hub: fetch it first by `hf download`"
        )

    def close(self) -> None:
        """Nothing is open."""


def _refuse(text: str, found: str) -> NoReturn:
    raise CheckpointError(f"'{text}' names no model of a hub: expected {FORM}, found '{found}'")
