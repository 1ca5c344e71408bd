"""The user's cache, and downloads into it: resumed, checked against a checksum, and kept."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_nfn.errors import DownloadError, TransformerNFNError, needs_extra

ATTEMPTS = 4
FORBIDDEN = "the network is forbidden (--offline, HF_HUB_OFFLINE)"
CACHE_VARIABLE = "TNFN_CACHE"
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
"""Forbids the network, also to the client of the hub; ``--offline`` sets it."""


def is_offline() -> bool:
    """Whether the network is forbidden."""
    return os.environ.get(OFFLINE_VARIABLE, "").upper() in ("1", "ON", "YES", "TRUE")


def cache_folder(*parts: str) -> Path:
    """A folder of the cache; it may not exist yet.

    The cache is the folder in ``TNFN_CACHE``, else ``transformer-nfn`` in the system's
    place for caches.

    Args:
        parts: folders within the cache, such as ``compiled``, ``assets``, ``mnist``.

    >>> cache_folder("assets").name
    'assets'
    """
    named = os.environ.get(CACHE_VARIABLE)
    root = Path(named) if named else _system_caches() / "transformer-nfn"
    return root.joinpath(*parts)


def _system_caches() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if cache.is_absolute():  # the standard says to ignore a relative one
        return cache
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


@dataclass(frozen=True)
class RemoteFile:
    """Address and md5 sum of a file."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


def fetch(task: str, file: RemoteFile, folder: Path | None) -> Path:
    """A file of a task's data: from ``folder`` if one is given, else from the cache.

    Fetched if the cache does not hold it. Either way its md5 sum must be the known one.
    """
    if folder is None:
        try:
            return download(file.url, cache_folder(task) / file.name, f"md5:{file.md5}")
        except DownloadError as error:
            raise DownloadError(f"{error}; name a folder with --data") from error
    path = folder / file.name
    if not folder.is_dir():
        raise DownloadError(f"data folder '{folder}' does not exist")
    if not path.is_file():
        raise DownloadError(f"{path}: missing (task '{task}' needs it)")
    digest = file_md5(path)
    if digest != file.md5:
        raise DownloadError(f"{path}: corrupt, expected md5 {file.md5}, found {digest}")
    return path


def file_md5(path: Path) -> str:
    """The md5 sum of a file."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def download(
    url: str, path: Path, checksum: str, kind: type[TransformerNFNError] = DownloadError
) -> Path:
    """Download a file to ``path``, unless it is there with the right checksum.

    Args:
        checksum: what it must hash to, as ``md5:…`` or ``sha256:…``; a file that is there and
            hashes to something else is fetched again.
        kind: class of the error where it cannot be fetched.
    """
    with needs_extra(kind, "pooch", "zoo", f"fetching {url}"):
        import pooch
    pooch.get_logger().setLevel("WARNING")  # the bar says what is fetched
    try:
        pooch.retrieve(
            url,
            known_hash=checksum,
            fname=path.name,
            path=path.parent,
            downloader=resume_download,
        )
    except OSError as error:
        raise kind(f"{url}: could not be fetched ({_reason(error)})") from error
    except ValueError as error:
        name, _, expected = checksum.partition(":")
        raise kind(f"{url}: corrupt, its {name} is not {expected[:12]}… as it must be") from error
    return path


def _reason(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:160] or type(error).__name__


def resume_download(url: str, output_file: str, _caller: object) -> None:
    """A pooch downloader that retries and resumes where the last attempt stopped.

    What has arrived stays in ``<file>.part`` in the cache, so even another day's attempt
    continues it; pooch then checks the sum of the whole.
    """
    if is_offline():
        raise OSError(FORBIDDEN)
    import requests
    from rich.console import Console
    from rich.progress import Progress

    part = Path(output_file).with_name(url.rpartition("/")[2] + ".part")
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"fetching {part.stem}", total=None)
        for attempt in range(ATTEMPTS):
            try:
                _continue(url, part, lambda done, total: progress.update(
                    bar, completed=done, total=total))
                break
            except requests.RequestException:
                if attempt == ATTEMPTS - 1:
                    raise
    part.replace(output_file)


def _continue(url: str, part: Path, report: Any) -> None:
    import requests

    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
        if answer.status_code == 416:  # nothing is left to send: the part is the whole
            return
        answer.raise_for_status()
        if answer.status_code != 206:
            have = 0  # the server sends everything again
        size = int(answer.headers.get("Content-Length", 0)) + have
        with part.open("ab" if have else "wb") as out:
            for chunk in answer.iter_content(1 << 16):
                out.write(chunk)
                report(out.tell(), size or None)
        if size and part.stat().st_size < size:
            raise requests.ConnectionError(f"stopped after {part.stat().st_size} of {size} bytes")


def get_text(url: str) -> str:
    """Fetch the text at an address, without caching it."""
    with needs_extra(DownloadError, "requests", "zoo", f"fetching {url}"):
        import requests
    if is_offline():
        raise DownloadError(f"{url}: {FORBIDDEN}")
    try:
        answer = requests.get(url, timeout=30)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise DownloadError(f"{url}: could not be fetched ({_reason(error)})") from error
    text: str = answer.content.decode("utf-8", errors="replace")
    return text
