"""Is it a file with bytes in it? A pipe under a file's name would be waited for for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_regular(path: str | Path) -> int:
    """A handle on a file, for reading; an `OSError` for a folder, a pipe or a device."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is not a regular file", str(path))
    return handle


def read_regular(path: str | Path) -> bytes:
    """All bytes of a file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()
