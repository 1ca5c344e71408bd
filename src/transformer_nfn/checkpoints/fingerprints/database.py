"""A database of fingerprints in one Parquet file, and the search for the nearest ones.

Each row also has a coarse copy, a projection of the fingerprint to 512 signed bytes. A search
compares all coarse copies, then reads the fingerprints of the nearest only: a tenth of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_nfn.checkpoints.fingerprints.fingerprint import (
    BYTES,
    FORMAT,
    Fingerprint,
    FingerprintComparison,
    FingerprintError,
    check_format,
    compare_fingerprints,
)
from transformer_nfn.io.files import atomic_file, import_arrow, made_folder, open_parquet

KIND = "transformer-nfn fingerprints"
COARSE = 512
SCALE = 32.0
"""Root mean square of the numbers of a coarse copy, so that few reach 127."""
GROUP = 64
"""Rows that are read together to get at one fingerprint."""
SHORTLIST = 64
"""Fingerprints compared in full, or four times as many as are requested."""


@dataclass(frozen=True)
class Entry:
    """A fingerprint and the name of its model."""

    name: str
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Match:
    """A model of the database, and how it compares."""

    name: str
    fingerprint: Fingerprint
    comparison: FingerprintComparison


class Database:
    """An open file of fingerprints; rows are read on demand.

    Attributes:
        path: of the file.

    >>> from transformer_nfn.checkpoints import open_model
    >>> from transformer_nfn.testing import write_example_checkpoint
    >>> from transformer_nfn.checkpoints.fingerprints import take_fingerprint
    >>> with open_model(write_example_checkpoint("model")) as model:
    ...     fingerprint = take_fingerprint(model)
    >>> add_to_database("known.parquet", [Entry("model", fingerprint)])
    (1, 1)
    >>> with Database("known.parquet") as known:
    ...     (matches,) = search(known, [fingerprint])
    >>> matches[0].name, matches[0].comparison.distance
    ('model', 0.0)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._arrow, _ = _pyarrow()
        if not self.path.is_file():
            raise FingerprintError(f"'{self.path}': no such database of fingerprints")
        with self._errors():
            self._file = open_parquet(self.path, page_checksum_verification=True)
            metadata = self._file.schema_arrow.metadata or {}
        try:
            if metadata.get(b"kind", b"").decode(errors="replace") != KIND:
                raise FingerprintError(
                    f"'{self.path}': a Parquet file, but not a database of fingerprints"
                )
            version = metadata.get(b"format", b"")
            check_format(int(version) if version.isdigit() else 0, f"'{self.path}'")
            if not self._file.schema_arrow.equals(_schema(self._arrow)):
                raise FingerprintError(
                    f"'{self.path}': damaged, its columns are not those of format {FORMAT}"
                )
        except FingerprintError:
            self.close()
            raise

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def coarse(self) -> Iterator[NDArray[np.int8]]:
        """Coarse copies of all fingerprints in order, ``[rows, COARSE]`` at a time."""
        with self._errors():
            batches = self._file.iter_batches(128 * GROUP, columns=["coarse"], use_threads=False)
            for batch in batches:
                yield _bytes_of(batch.column(0), COARSE).view(np.int8)

    def rows(self, wanted: Sequence[int]) -> Iterator[Entry]:
        """The fingerprints of some rows, in that order, each with its checksum verified."""
        metadata = self._file.metadata
        counts = [metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        starts = np.cumsum([0, *counts])
        groups = np.searchsorted(starts, wanted, side="right") - 1
        entries: dict[int, Entry] = {}
        for group in sorted(set(groups.tolist())):
            with self._errors():
                table = self._file.read_row_group(
                    int(group), columns=["name", "print"], use_threads=False
                )
                names = table.column("name")
                stored = _bytes_of(table.column("print").combine_chunks(), BYTES)
                for row in (r for r, g in zip(wanted, groups, strict=True) if g == group):
                    at = int(row - starts[group])
                    name = str(names[at].as_py())
                    where = f"'{self.path}', fingerprint '{name}'"
                    entries[row] = Entry(name, Fingerprint.from_bytes(stored[at].tobytes(), where))
        return (entries[row] for row in wanted)

    def __iter__(self) -> Iterator[Entry]:
        for start in range(0, len(self), GROUP):
            yield from self.rows(range(start, min(start + GROUP, len(self))))

    def without(self, names: Iterable[str]) -> Iterator[Any]:
        """All rows but those of some names, as Arrow tables."""
        replaced = set(names)
        with self._errors():
            for batch in self._file.iter_batches(GROUP, use_threads=False):
                table = self._arrow.Table.from_batches([batch])
                kept = [name not in replaced for name in table.column("name").to_pylist()]
                yield table if all(kept) else table.filter(self._arrow.array(kept))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of Arrow into one sentence that names the file."""
        try:
            yield
        except (self._arrow.ArrowException, OSError, KeyError, ValueError) as error:
            if isinstance(error, FingerprintError):
                raise
            text = " ".join(str(error).split())[:120]
            raise FingerprintError(
                f"'{self.path}': damaged, or no database of fingerprints ({text})"
            ) from error


def write_database(path: str | Path, entries: Iterable[Entry]) -> int:
    """Write a file of fingerprints atomically, and return their number.

    Args:
        path: to write; an older file is replaced.
        entries: any number of them; a few hundred are in memory at a time.
    """
    return _write(Path(path), _tables(entries))


def add_to_database(path: str | Path, entries: Sequence[Entry]) -> tuple[int, int]:
    """Add fingerprints to a database, or create it; an entry replaces one of the same name.

    Concurrent writers wait for each other.

    Returns:
        The number added or replaced, and the number in the database afterwards.
    """
    path = Path(path)
    new = {entry.name: entry for entry in entries}
    with _locked(path.parent):
        if not path.exists():
            return len(new), _write(path, _tables(new.values()))
        with Database(path) as old:
            tables = (t for part in (old.without(new), _tables(new.values())) for t in part)
            return len(new), _write(path, tables)


def search(
    database: Database, fingerprints: Sequence[Fingerprint], most: int = 10
) -> list[list[Match]]:
    """The nearest models of each fingerprint, nearest first.

    Args:
        most: number of matches of each.
    """
    if not fingerprints or len(database) == 0:
        return [[] for _ in fingerprints]
    queries = _coarse_copies(fingerprints).astype(np.float32).T / (COARSE * SCALE**2)
    near = np.concatenate([rows.astype(np.float32) @ queries for rows in database.coarse()])
    count = min(len(near), max(SHORTLIST, 4 * most))
    out = []
    for i, query in enumerate(fingerprints):
        rows = np.argpartition(-near[:, i], count - 1)[:count]
        matches = [
            Match(entry.name, entry.fingerprint, compare_fingerprints(query, entry.fingerprint))
            for entry in database.rows(rows.tolist())
        ]
        out.append(sorted(matches, key=lambda m: (m.comparison.distance, m.name))[:most])
    return out


def _coarse_copies(fingerprints: Sequence[Fingerprint]) -> NDArray[np.int8]:
    """``[fingerprints, COARSE]``; products of coarse copies are nearly mean cosines."""
    rows = np.stack([p.sketch.astype(np.float32) for p in fingerprints])
    length = np.sqrt(np.square(rows).mean(-1, keepdims=True))
    flat = (rows / np.maximum(length, 1e-30)).reshape(len(fingerprints), -1)
    projected = flat @ _projection(flat.shape[1]) * (SCALE / flat.shape[1] ** 0.5)
    copies: NDArray[np.int8] = np.clip(np.rint(projected), -127, 127).astype(np.int8)
    return copies


def _projection(size: int) -> NDArray[np.float32]:
    state = np.random.RandomState(zlib.crc32(b"coarse prints"))
    bits = np.unpackbits(np.frombuffer(state.bytes(size * COARSE // 8), dtype=np.uint8))
    return bits.reshape(size, COARSE).astype(np.float32) * 2 - 1


def _pyarrow() -> tuple[Any, Any]:
    """Arrow and its Parquet, or an error that names the extra to install."""
    return import_arrow(FingerprintError, "a database of fingerprints")


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


def _tables(entries: Iterable[Entry]) -> Iterator[Any]:
    """Fingerprints as Arrow tables of ``GROUP`` rows."""
    pa, _ = _pyarrow()
    remaining = iter(entries)
    while group := list(itertools.islice(remaining, GROUP)):
        prints = [entry.fingerprint for entry in group]
        columns = {
            "name": [entry.name for entry in group],
            "family": [p.family for p in prints],
            "width": [p.width for p in prints],
            "depth": [p.depth for p in prints],
            "weights": [p.weights for p in prints],
            "coarse": [row.tobytes() for row in _coarse_copies(prints)],
            "print": [p.to_bytes() for p in prints],
        }
        yield pa.table(columns, schema=_schema(pa))


def _write(path: Path, tables: Iterable[Any]) -> int:
    """Write tables of any lengths in groups of ``GROUP`` rows."""
    pa, parquet = _pyarrow()
    metadata = {"kind": KIND, "format": str(FORMAT)}
    schema = _schema(pa).with_metadata(metadata)
    count = 0
    with (
        atomic_file(path) as beside,
        beside.open("wb") as file,
        parquet.ParquetWriter(
            file, schema, compression="none", use_dictionary=False, write_page_checksum=True,
            write_statistics=False,
        ) as writer,
    ):
        waiting: list[Any] = []
        for table in tables:
            waiting.append(table.replace_schema_metadata(metadata))
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
def _locked(folder: Path) -> Iterator[None]:
    """One writer in a folder at a time; the system releases the lock when a process dies."""
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
        raise FingerprintError(f"'{folder}' cannot be written: {error.strerror}") from error
