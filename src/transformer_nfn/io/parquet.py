"""How is a Parquet file read? By the thread that asks: Arrow's own abort some processes at exit.

Given a path, or a map that Arrow makes itself, Arrow starts a thread whatever it is told; given
bytes and ``use_threads=False`` it starts none.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from transformer_nfn.io.regular import open_regular


def open_parquet(source: Path | bytes, **options: Any) -> Any:
    """A ``pyarrow.parquet.ParquetFile`` on bytes, or on a map of a file.

    Args:
        source: the file or what it holds.
        options: of ``ParquetFile``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if isinstance(source, bytes):
        return pq.ParquetFile(pa.BufferReader(source), **options)
    with os.fdopen(open_regular(source), "rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(held)), **options)


def read_parquet(source: Path | bytes) -> Any:
    """All of it, as a ``pyarrow.Table``."""
    return open_parquet(source).read(use_threads=False)
