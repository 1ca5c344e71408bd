"""Repositories of a model hub: list and fetch the files of one commit with `huggingface_hub`.

The client keeps files in its own cache and reads its own settings: ``HF_HOME``, ``HF_ENDPOINT``,
``HF_TOKEN``, ``HF_HUB_OFFLINE``. Here every file is also checked against the size and the checksum
that the hub lists for the commit, and a hub that stops sending is given up.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from transformer_nfn.errors import DownloadError, TransformerNFNError, needs_extra
from transformer_nfn.io.downloads import FORBIDDEN, is_offline
from transformer_nfn.io.files import file_sha256, write_text
from transformer_nfn.io.tensor_files import DTYPES, TensorInfo

T = TypeVar("T")
MAIN = "main"
SILENCE = 20.0
"""Seconds without any news from the hub after which it is given up."""
PIECE = 1 << 20
"""Bytes after which a download reports progress; the client's 10 MB take longer than `SILENCE`
on a slow line."""


@dataclass(frozen=True)
class HubFile:
    """Size and checksum of a file as the hub lists them: ``sha256``, or git's ``sha1``."""

    size: int
    sha256: str | None = None
    sha1: str | None = None

    def fault(self, path: Path) -> str | None:
        """What is wrong with the bytes of a file."""
        size = path.stat().st_size
        if size != self.size:
            return f"expected {self.size:,} bytes, found {size:,}"
        if self.sha256 is not None:
            right = file_sha256(path) == self.sha256
        else:
            blob = b"blob %d\0" % size + path.read_bytes()
            right = hashlib.sha1(blob, usedforsecurity=False).hexdigest() == self.sha1
        return None if right else "expected the checksum that the hub lists, found another"


@dataclass(frozen=True)
class Commit:
    """One commit of a repository, and its folder in the client's cache.

    Attributes:
        repository: its id, ``org/name``.
        revision: by which the commit was named.
        sha: of the commit.
        folder: of its files in the cache.
        files: by their path in the repository; offline those that are in the cache.
    """

    repository: str
    revision: str
    sha: str
    folder: Path
    files: Mapping[str, HubFile]

    def missing(self, names: Iterable[str]) -> dict[str, HubFile]:
        """The files that are not in the cache, or there with another size."""
        return {
            name: self.files[name]
            for name in names
            if not (path := self.folder / name).is_file()
            or path.stat().st_size != self.files[name].size
        }

    def fetch(self, names: Iterable[str]) -> Path:
        """Bring files into the cache; returns the folder of the commit."""
        missing = self.missing(names)
        if missing:
            self._check_room(missing)
            size = size_text(sum(file.size for file in missing.values()))
            plural = "s" if len(missing) > 1 else ""
            _say(f"fetching {len(missing)} file{plural} of {self.repository}, {size}")
        for name, file in missing.items():
            with _explained(self.repository, self.sha):
                path = Path(_attended(partial(self._download, name)))
            if path != self.folder / name:
                raise DownloadError(f"the hub sent '{name}' of '{self.repository}' from another "
                                    f"commit than {self.sha[:12]}")  # fmt: skip
            if fault := file.fault(path):
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise DownloadError(f"'{name}' of '{self.repository}': {fault}; fetch it again")
        named = self.folder.parents[1] / "refs" / self.revision  # read without the network
        if self.revision != self.sha and not (named.is_file() and named.read_text() == self.sha):
            named.parent.mkdir(parents=True, exist_ok=True)
            write_text(named, self.sha)
        return self.folder

    def headers(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Shape and dtype of the tensors of safetensors files, of which the headers are fetched."""
        infos = {}
        for name in names:
            with _explained(self.repository, self.sha):
                tensors = _attended(partial(self._header, name))
            for tensor, info in tensors.items():
                dtype = DTYPES.get(info.dtype, (info.dtype, 0))[0]
                infos[tensor] = TensorInfo(tuple(info.shape), dtype)
        return infos

    def _header(self, name: str, _: Callable[[], None]) -> Mapping[str, Any]:
        api = client().HfApi()
        header = api.parse_safetensors_file_metadata(self.repository, name, revision=self.sha)
        tensors: Mapping[str, Any] = header.tensors
        return tensors

    def _download(self, name: str, news: Callable[[], None]) -> str:
        hub = client()

        class Bar(hub.utils.tqdm):  # type: ignore[misc, name-defined]
            def update(self, n: float | None = 1) -> bool | None:
                news()
                shown: bool | None = super().update(n)
                return shown

        path: str = hub.hf_hub_download(
            self.repository, name, revision=self.sha, tqdm_class=Bar,
            force_download=os.path.lexists(self.folder / name), cache_dir=self.folder.parents[2],
        )  # fmt: skip
        return path

    def _check_room(self, missing: Mapping[str, HubFile]) -> None:
        cache_folder = self.folder.parents[2]
        there = next(path for path in (cache_folder, *cache_folder.parents) if path.exists())
        needed, free = sum(file.size for file in missing.values()), shutil.disk_usage(there).free
        if needed > free:
            raise DownloadError(
                f"'{self.repository}' needs {size_text(needed)} in '{cache_folder}', where "
                f"{size_text(free)} are free: make room, or name another folder by HF_HOME"
            )


@cache
def commit_of(repository: str, revision: str | None = None) -> Commit:
    """The commit that a branch, a tag or a checksum names; a process reads one of each name."""
    hub = client()
    folder = Path(hub.constants.HF_HUB_CACHE).expanduser().resolve()
    home = folder / f"models--{repository.replace('/', '--')}" / "snapshots"
    named = revision or MAIN
    if is_offline():
        return _cached_commit(repository, named, home)
    _say(f"asking the hub for {repository}")
    with _explained(repository, named):
        info = _attended(
            lambda _: hub.HfApi().model_info(repository, revision=named, files_metadata=True)
        )
    if info.id.casefold() != repository.casefold():
        raise DownloadError(f"'{repository}' was renamed on the hub: name it '{info.id}'")
    files = {}
    for entry in info.siblings or ():
        at, lfs = PurePosixPath(entry.rfilename), entry.lfs
        if at.is_absolute() or ".." in at.parts or "\\" in entry.rfilename:
            raise DownloadError(f"'{repository}': '{entry.rfilename}' leads out of the repository")
        if type(entry.size) is not int or entry.blob_id is None:
            raise DownloadError(f"'{repository}': the hub lists no size of '{entry.rfilename}'")
        files[entry.rfilename] = HubFile(
            entry.size, None if lfs is None else lfs.sha256, entry.blob_id
        )
    if not isinstance(info.sha, str) or len(info.sha) != 40 or not info.sha.isalnum():
        raise DownloadError(f"'{repository}': the hub names no commit of '{named}'")
    return Commit(repository, named, info.sha, home / info.sha, files)


def _cached_commit(repository: str, revision: str, home: Path) -> Commit:
    """What the client's cache holds of a revision."""
    name = home.parent / "refs" / revision
    sha = name.read_text().strip() if name.is_file() else revision
    folder = home / sha
    files = {
        path.relative_to(folder).as_posix(): HubFile(path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    if not files:
        raise DownloadError(
            f"'{repository}' at '{revision}' is not in '{home.parents[1]}', and {FORBIDDEN}: "
            "fetch it first without that"
        )
    return Commit(repository, revision, sha, folder, files)


def client() -> Any:
    """The module `huggingface_hub`."""
    with needs_extra(DownloadError, "huggingface_hub", "hub", "a model by its name on a hub"):
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils
    huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = PIECE
    return huggingface_hub


def size_text(size: int) -> str:
    """A number of bytes as people read it.

    >>> size_text(900), size_text(1_530_000), size_text(16_100_000_000)
    ('0.9 kB', '1.5 MB', '16.1 GB')
    """
    scale, unit = (1e9, "GB") if size >= 1e9 else (1e6, "MB") if size >= 1e6 else (1e3, "kB")
    return f"{size / scale:,.1f} {unit}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _attended(call: Callable[[Callable[[], None]], T]) -> T:
    """The result of a call of the client, which is given up where it has no news for `SILENCE`.

    The client waits longer, for as long as a server tells it to. It goes on in a thread that ends
    with the process.
    """
    last, results, errors = [time.monotonic()], list[T](), list[BaseException]()

    def news() -> None:
        last[0] = time.monotonic()

    def run() -> None:
        try:
            results.append(call(news))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if time.monotonic() - last[0] > SILENCE:
            raise TimeoutError(f"it sent nothing for {SILENCE:.0f} s")
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    """Convert what the client raises to one sentence with the remedy."""
    from huggingface_hub import errors

    try:
        yield
    except TransformerNFNError:
        raise
    except errors.GatedRepoError as error:
        why = "is gated: accept its licence on its page of the hub and log in by `hf auth login`"
        raise DownloadError(f"'{repository}' {why}") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"'{repository}' is no model on the hub, or a private one: check the name, or log in "
            "by `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(f"'{repository}' has no revision '{revision}' on the hub") from error
    except Exception as error:
        raise DownloadError(f"'{repository}' {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Why the hub did not send a file, by the response that the client got."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be kept in the client's cache: {error.strerror}"
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    responses = (getattr(cause, "response", None) for cause in causes)
    status = next((r.status_code for r in responses if r is not None), None)
    if status in (401, 403):
        return "cannot be read: the hub rejects the token, so log in again by `hf auth login`"
    if status == 429:
        return "cannot be read: the hub wants fewer requests (429), so try again later"
    if status is not None:
        return f"cannot be read: the hub ended with {status}, so try again later"
    words = " ".join(str(causes[-1]).split())[:160] or type(causes[-1]).__name__
    return (
        f"cannot be read from the hub ({words}): check the network, or read what is in the cache "
        "with --offline"
    )
