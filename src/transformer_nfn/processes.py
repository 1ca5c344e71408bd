"""Worker processes of one thread each."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager

from transformer_nfn.errors import TransformerNFNError


def cores() -> int:
    """Number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def worker_pool(libraries: Sequence[str]) -> Iterator[ProcessPoolExecutor | None]:
    """Processes of one thread each, one for each core; None on one core.

    Args:
        libraries: modules that the workers need. On Linux one process imports them while this one
            goes on, and workers are forked from it; elsewhere every worker imports what it uses.
    """
    if cores() == 1:
        yield None
        return
    # Before any library starts its threads, which do not survive a fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        context = multiprocessing.get_context("forkserver")
        _start_fork_server(libraries)
    else:
        context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(cores(), context, _begin_worker)
    try:
        yield pool
    except BrokenExecutor as error:
        raise TransformerNFNError(
            "a worker process was ended from outside, perhaps for memory; the same command resumes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_fork_server(libraries: Sequence[str]) -> None:
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload(list(libraries))
    # Ctrl-C reaches all processes of a terminal; the server would print where its imports were.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def _begin_worker() -> None:
    # Ctrl-C ends a worker without a message.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Objects of imported libraries stay: they need not be searched for garbage.
    gc.freeze()
