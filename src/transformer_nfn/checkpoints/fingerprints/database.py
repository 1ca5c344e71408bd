"""A database of fingerprints in one Parquet file: names, facts, prints, and coarse copies.

A coarse copy is a projection of a print to 512 signed bytes. All coarse copies are looked through
in a search, prints only of those that came near, so a search reads a tenth of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_nfn.checkpoints.fingerprints.stored import (
    BYTES,
    FORMAT,
    Print,
    PrintError,
    check_format,
    from_bytes,
)
from transformer_nfn.errors import missing_extra
from transformer_nfn.io.files import atomic_file, made_folder, open_parquet

KIND = "transformer-nfn fingerprints"
COARSE = 512
SCALE = 32.0
"""Of a coarse copy: its numbers have this root mean square, so that few reach 127."""
GROUP = 64
"""Rows that are read together: what a search reads to get at one print."""


@dataclass(frozen=True)
class Named:
    """A print and what it is called."""

    name: str
    print: Print


def write_database(path: str | Path, prints: Iterable[Named]) -> int:
    """Writes a file of prints, beside and then renamed; returns how many.

    Args:
        path: to write; an older file is replaced.
        prints: any number of them; a few hundred are in memory at a time.
    """
    return _write(Path(path), _tables(prints))


def add_to_database(path: str | Path, prints: Sequence[Named]) -> tuple[int, int]:
    """Adds prints to a database, or begins one; a print of a name that is there replaces it.

    Whoever else adds at the same time waits for its turn.

    Returns:
        How many were added or replaced, and how many there are now.
    """
    path = Path(path)
    new = {entry.name: entry for entry in prints}
    with _turn(path.parent):
        if not path.exists():
            return len(new), _write(path, _tables(new.values()))
        with Database(path) as old:
            return len(new), _write(path, _joined(old, new))


class Database:
    """An open file of prints; nothing but its end is read before it is asked for.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._arrow, _ = arrow()
        if not self.path.is_file():
            raise PrintError(f"'{self.path}': no such database of fingerprints")
        with self._named():
            self._file = open_parquet(self.path, page_checksum_verification=True)
            facts = self._file.schema_arrow.metadata or {}
        try:
            if facts.get(b"kind", b"").decode(errors="replace") != KIND:
                raise PrintError(
                    f"'{self.path}': a Parquet file, but not a database of fingerprints"
                )
            found = facts.get(b"format", b"")
            check_format(int(found) if found.isdigit() else 0, f"'{self.path}'")
            schema = _schema(self._arrow)
            if not self._file.schema_arrow.equals(schema):
                raise PrintError(
                    f"'{self.path}': damaged, its columns are not those of format {FORMAT}"
                )
        except PrintError:
            self.close()
            raise

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()

    def coarse(self) -> Iterator[NDArray[np.int8]]:
        """Coarse copies of all prints, ``[rows, COARSE]``, some at a time and in order."""
        with self._named():
            batches = self._file.iter_batches(128 * GROUP, columns=["coarse"], use_threads=False)
            for batch in batches:
                yield _bytes_of(batch.column(0), COARSE).view(np.int8)

    def rows(self, wanted: Sequence[int]) -> Iterator[Named]:
        """The prints of some rows, in that order, each with its checksum verified."""
        starts = np.cumsum([0, *(self._rows_of(g) for g in range(self._file.num_row_groups))])
        groups = np.searchsorted(starts, wanted, side="right") - 1
        found: dict[int, Named] = {}
        for group in sorted(set(groups.tolist())):
            with self._named():
                table = self._file.read_row_group(
                    int(group), columns=["name", "print"], use_threads=False
                )
                names = table.column("name")
                stored = _bytes_of(table.column("print").combine_chunks(), BYTES)
                for row in (r for r, g in zip(wanted, groups, strict=True) if g == group):
                    at = int(row - starts[group])
                    name = str(names[at].as_py())
                    where = f"'{self.path}', fingerprint '{name}'"
                    found[row] = Named(name, from_bytes(stored[at].tobytes(), where))
        return (found[row] for row in wanted)

    def __iter__(self) -> Iterator[Named]:
        for start in range(0, len(self), GROUP):
            yield from self.rows(range(start, min(start + GROUP, len(self))))

    def batches(self) -> Iterator[Any]:
        """All of it, as Arrow's batches."""
        with self._named():
            yield from self._file.iter_batches(GROUP, use_threads=False)

    def _rows_of(self, group: int) -> int:
        return int(self._file.metadata.row_group(group).num_rows)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever Arrow finds wrong is one sentence that names the file."""
        try:
            yield
        except (self._arrow.ArrowException, OSError, KeyError, ValueError) as error:
            if isinstance(error, PrintError):
                raise
            found = " ".join(str(error).split())[:120]
            raise PrintError(
                f"'{self.path}': damaged, or no database of fingerprints ({found})"
            ) from error


def coarse_copy(prints: Sequence[Print]) -> NDArray[np.int8]:
    """Coarse copies, ``[prints, COARSE]``; their products are nearly mean cosines of prints."""
    rows = np.stack([p.sketch.astype(np.float32) for p in prints])
    length = np.sqrt(np.square(rows).mean(-1, keepdims=True))
    flat = (rows / np.maximum(length, 1e-30)).reshape(len(prints), -1)
    projected = flat @ _projection(flat.shape[1]) * (SCALE / flat.shape[1] ** 0.5)
    copies: NDArray[np.int8] = np.clip(np.rint(projected), -127, 127).astype(np.int8)
    return copies


def arrow() -> tuple[Any, Any]:
    """Arrow and its Parquet, or the extra to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra(
            PrintError, "pyarrow", "zoo", "a database of fingerprints"
        ) from error
    return pyarrow, pyarrow.parquet


def _projection(size: int) -> NDArray[np.float32]:
    state = np.random.RandomState(zlib.crc32(b"coarse prints"))
    bits = np.unpackbits(np.frombuffer(state.bytes(size * COARSE // 8), dtype=np.uint8))
    return bits.reshape(size, COARSE).astype(np.float32) * 2 - 1


def _schema(pa: Any) -> Any:
    return pa.schema(
        [
            ("name", pa.string()),
            ("family", pa.string()),
            ("width", pa.int32()),
            ("depth", pa.int32()),
            ("weights", pa.int64()),
            ("coarse", pa.binary(COARSE)),
            ("print", pa.binary(BYTES)),
        ]
    )


def _tables(prints: Iterable[Named]) -> Iterator[Any]:
    """Prints as tables of ``GROUP`` rows."""
    waiting: list[Named] = []
    for entry in prints:
        waiting.append(entry)
        if len(waiting) == GROUP:
            yield _table(waiting)
            waiting = []
    if waiting:
        yield _table(waiting)


def _table(entries: Sequence[Named]) -> Any:
    pa, _ = arrow()
    prints = [entry.print for entry in entries]
    columns = {
        "name": [entry.name for entry in entries],
        "family": [p.family for p in prints],
        "width": [p.width for p in prints],
        "depth": [p.depth for p in prints],
        "weights": [p.weights for p in prints],
        "coarse": [row.tobytes() for row in coarse_copy(prints)],
        "print": [p.to_bytes() for p in prints],
    }
    return pa.table(columns, schema=_schema(pa))


def _joined(old: Database, new: dict[str, Named]) -> Iterator[Any]:
    """The old rows but those that are replaced, then the new ones."""
    pa, _ = arrow()
    for batch in old.batches():
        table = pa.Table.from_batches([batch])
        kept = [name not in new for name in table.column("name").to_pylist()]
        yield table if all(kept) else table.filter(pa.array(kept))
    yield from _tables(new.values())


def _write(path: Path, tables: Iterable[Any]) -> int:
    """Writes tables of any lengths in groups of ``GROUP`` rows."""
    pa, parquet = arrow()
    facts = {"kind": KIND, "format": str(FORMAT)}
    schema = _schema(pa).with_metadata(facts)
    count = 0
    with (
        atomic_file(path) as beside,
        parquet.ParquetWriter(
            beside, schema, compression="none", use_dictionary=False, write_page_checksum=True,
            write_statistics=False,
        ) as writer,
    ):
        waiting: list[Any] = []
        for table in tables:
            waiting.append(table.replace_schema_metadata(facts))
            count += len(table)
            if sum(map(len, waiting)) >= GROUP:
                joined = pa.concat_tables(waiting)
                writer.write_table(joined[:GROUP], row_group_size=GROUP)
                waiting = [joined[GROUP:]] if len(joined) > GROUP else []
        if waiting:
            writer.write_table(pa.concat_tables(waiting), row_group_size=GROUP)
    return count


def _bytes_of(column: Any, width: int) -> NDArray[np.uint8]:
    """A column of fixed width as ``[rows, width]``, without a copy."""
    if hasattr(column, "chunk"):  # a chunked array, of one chunk here
        column = column.chunk(0)
    raw = np.frombuffer(column.buffers()[1], dtype=np.uint8)
    start = column.offset * width
    return raw[start : start + len(column) * width].reshape(-1, width)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One writer in a folder at a time; the system lets go when a process dies."""
    try:
        with made_folder(folder):
            handle = os.open(folder, os.O_RDONLY)
            try:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(handle, fcntl.LOCK_EX)
                yield
            finally:
                os.close(handle)
    except OSError as error:
        raise PrintError(f"'{folder}' cannot be written: {error.strerror}") from error
