"""Costs of a call: median seconds, peak memory of a fresh process, reading from a cold disk."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median over ``repeats`` calls after one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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
