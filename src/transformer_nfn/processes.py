"""Cores, threads and pages of a process, and worker processes of one thread each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformer_nfn.errors import TransformerNFNError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from torch import Tensor

LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Variable by which PyTorch asks Linux for memory in pages of 2 MiB instead of 4 KiB."""


def cores() -> int:
    """Number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_rows(work: Callable[[slice], Tensor], like: Tensor, chunk: int) -> Tensor:
    """Concatenated results of ``work`` on slices of a batch; on a CPU, a thread on each core.

    PyTorch divides each small product among all cores instead: slower alone, and several such
    processes beside each other wait for each other's threads.

    >>> import torch
    >>> rows = torch.arange(5)
    >>> map_rows(lambda cut: rows[cut] * 2, rows, chunk=2)
    tensor([0, 2, 4, 6, 8])

    Args:
        work: results of some rows, computed without gradients.
        like: a tensor of the batch, whose first axis counts the rows.
        chunk: rows at a time.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch

    cuts = [slice(start, start + chunk) for start in range(0, max(len(like), 1), chunk)]
    threads = torch.get_num_threads() if like.is_cpu else 1
    # Each thread has a number of its own, and new threads of any pool take the last one set.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            return torch.cat([*pool.map(torch.no_grad()(work), cuts)])
        finally:
            torch.set_num_threads(threads)


@contextmanager
def worker_pool(
    libraries: Sequence[str], workers: int | None = None
) -> Iterator[ProcessPoolExecutor | None]:
    """Processes of one thread each, one for each core; None on one core.

    Args:
        libraries: modules that the workers need. On Linux one process imports them while this one
            goes on, and workers are forked from it; elsewhere every worker imports what it uses.
        workers: so many of them.
    """
    import multiprocessing
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor

    workers = workers or cores()
    if workers == 1:
        yield None
        return
    # Before any library starts its threads, which do not survive a fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        context = multiprocessing.get_context("forkserver")
        _start_fork_server(libraries)
    else:
        context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin_worker)
    try:
        yield pool
    except BrokenExecutor as error:
        raise TransformerNFNError(
            "a worker process was ended from outside, perhaps for memory; the same command resumes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_fork_server(libraries: Sequence[str]) -> None:
    import signal
    from multiprocessing import forkserver

    forkserver.set_forkserver_preload(list(libraries))
    # Ctrl-C reaches all processes of a terminal; the server would print where its imports were.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def _begin_worker() -> None:
    import gc
    import signal

    # Ctrl-C ends a worker without a message.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Objects of imported libraries stay: they need not be searched for garbage.
    gc.freeze()
