"""How does a file get to disk whole or not at all? Written beside, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_nfn.files.errors import WriteError

# The name's own ending stays last, because some writers go by it.
_BESIDE = re.compile(r"\.[0-9a-f]{8}\.beside\..+")
_OLDER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Gives a path beside ``path`` to write to; on success it takes the name of ``path``.

    A reader sees the old file or the new one, also after a power cut: the bytes are on the disk
    before the name is, and the name before this returns. Whatever goes wrong leaves the old file
    as it was and nothing beside it; a killed process may leave a file for `sweep`.

    Args:
        path: the file; its folder is made if need be.
        durable: False does not wait for the disk, for thousands of files that can be made again.
    """
    beside = path.with_name(f".{uuid.uuid4().hex[:8]}.beside.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        if durable:
            _sync(beside)
        take_name(beside, path, durable=durable)
    except OSError as error:
        raise WriteError(f"'{path}' cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def take_name(beside: Path, path: Path, *, durable: bool = True) -> None:
    """What was written ``beside``, a file or a folder, becomes ``path``."""
    os.replace(beside, path)
    if durable:
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    with whole_file(path) as beside:
        beside.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    write_bytes(path, text.encode())


def is_left_over(name: str) -> bool:
    """Whether a file of that name is what a killed writer left beside its file."""
    return bool(_BESIDE.fullmatch(name) or _OLDER.fullmatch(name))


def foreign_files(folder: Path, own: Container[str] = ()) -> list[str]:
    """What lies in a folder but for ``own`` names and what killed writers left, in order."""
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if name not in own and not is_left_over(name))


def sweep(folder: Path) -> None:
    """Removes what killed writers left; only where nobody else writes at the same time."""
    for path in folder.glob(".*"):
        if is_left_over(path.name):
            with contextlib.suppress(OSError):
                path.unlink()
