"""How is a zip unpacked that somebody hands in? Inside its folder, whole, and only if it fits."""

from __future__ import annotations

import shutil
import struct
import zipfile
import zlib
from collections import Counter
from pathlib import Path, PurePosixPath

from transformer_nfn.zoo.errors import ImportFileError

DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError,
    OverflowError,
)  # fmt: skip
"""What Python raises for zips that are damaged, encrypted or oddly compressed."""


def unpack(source: Path, folder: Path) -> None:
    """Unpacks a zip into a folder; refuses names that lead out of it.

    Args:
        source: the zip.
        folder: there already, and empty.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            for member in members:
                _check_member(member, source)
            _check_room(members, folder, source)
            archive.extractall(folder)
    except ImportFileError:
        raise
    except NotImplementedError as error:
        raise ImportFileError(
            f"'{source}' is compressed in a way that is not read here: {error}"
        ) from error
    except DAMAGE as error:
        raise ImportFileError(f"'{source}' is damaged: {error}") from error


def _check_member(member: zipfile.ZipInfo, source: Path) -> None:
    parts = PurePosixPath(member.filename.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts:
        raise ImportFileError(f"'{source}' holds the unsafe path '{member.filename}'")
    if member.flag_bits & 1:
        raise ImportFileError(f"'{source}' is encrypted: '{member.filename}' needs a password")


def _check_room(members: list[zipfile.ZipInfo], folder: Path, source: Path) -> None:
    twice = [name for name, times in Counter(m.filename for m in members).items() if times > 1]
    if twice:
        raise ImportFileError(f"'{source}' is damaged: it holds '{twice[0]}' twice")
    size, free = sum(member.file_size for member in members), shutil.disk_usage(folder).free
    if size > free:
        raise ImportFileError(
            f"'{source}' unpacks to {size:,} bytes, more than the {free:,} free at '{folder}'"
        )
