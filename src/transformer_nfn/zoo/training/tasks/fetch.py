"""How data files reach this machine: from a folder the user names, or fetched and checked."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_nfn.errors import missing_extra
from transformer_nfn.zoo.errors import DataError

ATTEMPTS = 4


@dataclass(frozen=True)
class RemoteFile:
    """Where a file lies and what its md5 sum is."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rpartition("/")[2]


def fetch(task: str, file: RemoteFile, folder: Path | None) -> Path:
    """The file from ``folder`` if one is given, else from the user's cache, fetched if needed.

    Either way its md5 sum must be the known one.
    """
    if folder is None:
        return _download(task, file)
    path = folder / file.name
    if not folder.is_dir():
        raise DataError(f"data folder '{folder}' does not exist")
    if not path.is_file():
        raise DataError(f"{path}: missing (task '{task}' needs it)")
    found = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != file.md5:
        raise DataError(f"{path}: corrupt, expected md5 {file.md5}, found {found}")
    return path


def _download(task: str, file: RemoteFile) -> Path:
    try:
        import pooch
    except ImportError as error:
        raise missing_extra(
            DataError,
            "pooch",
            "zoo",
            f"fetching the data of '{task}' (or name a folder with --data)",
        ) from error
    cache = os.environ.get("TNFN_CACHE") or pooch.os_cache("transformer-nfn")
    try:
        found = pooch.retrieve(
            file.url,
            known_hash=f"md5:{file.md5}",
            fname=file.name,
            path=Path(cache) / task,
            downloader=resume_download,
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file.url}: could not be fetched ({error}); name a folder with --data"
        ) from error
    return Path(found)


def resume_download(url: str, output_file: str, _caller: object) -> None:
    """A pooch downloader that tries again and goes on where the last attempt stopped.

    What has arrived stays in ``<file>.part`` in the cache, so even another day's attempt
    continues it; pooch then checks the md5 sum of the whole.
    """
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
