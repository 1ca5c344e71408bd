"""Costs of a call: peak memory of a fresh process, reading from a cold disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_a_process(run: Callable[..., Any], *arguments: Any) -> Any:
    """A call in a fresh process, whose peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


def peak_mib() -> float:
    """The most memory this process has held, libraries included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def drop_from_cache(path: Path) -> None:
    """Ask the system to forget the pages of a file, as after a restart."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
