"""Regular files on disk: checked reads, atomic writes, Parquet tables and figures."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import shutil
import stat
import uuid
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_nfn.errors import CheckpointError, TransformerNFNError, WriteError, needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 160
# The name's own ending stays last, because some writers go by it.
_BESIDE = re.compile(r"\.[0-9a-f]{8}\.beside\.(.+)")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Write a file atomically: yields a path beside ``path``, which is renamed on success.

    A reader sees the old file or the new one, also after a power cut: the bytes are on the disk
    before the name is, and the name before this returns. An error leaves the old file and nothing
    else; what a killed process leaves, the next writer of the file removes. A link stays a link,
    and its target is replaced. A new file gets the mode 0666 less the umask, an old one keeps its
    mode.

    Args:
        path: the file; its folder is created if needed. A folder or a device is rejected.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "new" / "notes.txt"
    >>> with atomic_file(path) as beside:
    ...     _ = beside.write_text("done")
    >>> path.read_text()
    'done'
    """
    with explained_write(path):
        old = _regular_mode(path)
        target = Path(os.path.realpath(path))
        with made_folder(target.parent), locked_beside(target.with_name(path.name)) as beside:
            new = stat.S_IMODE(os.stat(beside).st_mode)
            yield beside
            os.chmod(beside, new if old is None else old)  # some writers choose another
            _sync(beside)
            take_name(beside, target)


@contextmanager
def locked_beside(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """An empty temporary file or folder beside ``path``, locked so that `sweep` leaves it alone."""
    sweep(path.parent, path.name)
    while True:
        beside = path.with_name(f".{uuid.uuid4().hex[:8]}.beside.{path.name}")
        if folder:
            beside.mkdir()
        handle = os.open(beside, os.O_RDONLY if folder else os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.lexists(beside):
            break
        os.close(handle)  # it was swept before it was locked
    try:
        yield beside
    finally:
        _remove(beside)
        os.close(handle)


class _TriedError(Exception):
    """Ends a write that was only tried."""


def check_writable(*paths: Path | None) -> None:
    """Reject files that `atomic_file` could not write, before the work that fills them."""
    for path in filter(None, paths):
        with contextlib.suppress(_TriedError), atomic_file(path):
            raise _TriedError


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Fill a folder atomically: yields a folder whose contents move to ``path`` on success.

    Args:
        path: a new or an empty folder.
    """
    # Inside and not beside: ``path`` may be a working directory, or on a disk of its own.
    with (
        explained_write(path),
        made_folder(path),
        locked_beside(path / "folder", folder=True) as scratch,
        explained_write(path, scratch),
    ):
        yield scratch
        for part in sorted(scratch.iterdir()):
            part.rename(path / part.name)
        _sync_folder(path)


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Create a folder and its parents; after an error remove those that are new and empty."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise WriteError(f"'{path}' is not a folder: name a folder to write to")
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        if missing:
            path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def explained_write(path: Path, scratch: Path | None = None) -> Iterator[None]:
    """Convert an `OSError` to a `WriteError` that names ``path`` instead of ``scratch``."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"'{path}' cannot be written: {error.strerror or error}") from error
    except WriteError as error:
        if scratch is None or str(scratch) not in str(error):
            raise
        raise WriteError(str(error).replace(str(scratch), str(path))) from error


def _regular_mode(path: Path) -> int | None:
    """Permissions of a file, None if it does not exist; rejects anything but a regular file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise WriteError(f"'{path}' is a folder: name a file to write")
    if not stat.S_ISREG(mode):
        raise WriteError(f"'{path}' is not a regular file: name a file to write")
    return stat.S_IMODE(mode)


def take_name(beside: Path, path: Path) -> None:
    """Rename a file or folder to ``path``."""
    os.replace(beside, path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with atomic_file(path) as beside:
        beside.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def is_left_over(name: str) -> bool:
    """Whether a name is that of a temporary file which a killed writer left."""
    return _BESIDE.fullmatch(name) is not None


def foreign_files(folder: Path, expected: Container[str] = ()) -> list[str]:
    """Names in a folder other than ``expected`` and those that killed writers left, sorted."""
    names = os.listdir(folder)
    return sorted(name for name in names if name not in expected and not is_left_over(name))


def sweep(folder: Path, name: str = "") -> None:
    """Remove the temporary files and folders of killed writers: those that nobody holds locked.

    Args:
        name: only those that would have become the file of this name; empty for all.
    """
    for left in os.listdir(folder):
        match = _BESIDE.fullmatch(left)
        if match is None or name not in ("", match[1]):
            continue
        with contextlib.suppress(OSError):
            handle = os.open(folder / left, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder / left)
            finally:
                os.close(handle)


def _remove(path: Path) -> None:
    """Remove a temporary file or folder, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading; an `OSError` for a folder, a pipe or a device.

    Reading a pipe under the name of a file would wait forever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is not a regular file", str(path))
    return handle


def read_regular(path: str | Path) -> bytes:
    """All bytes of a file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


@contextmanager
def explained_read(where: object, kind: type[TransformerNFNError]) -> Iterator[None]:
    """Convert an `OSError` to a ``kind`` that names ``where``."""
    try:
        yield
    except OSError as error:
        raise kind(f"'{where}' cannot be read: {error.strerror or error}") from error


def file_sha256(path: Path) -> str:
    """Checksum of a file."""
    with explained_read(path, CheckpointError), os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def import_arrow(kind: type[TransformerNFNError], purpose: str) -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``, or an error that names the extra."""
    with needs_extra(kind, "pyarrow", "zoo", purpose):
        import pyarrow as pa
        import pyarrow.parquet as pq
    return pa, pq


def open_parquet(source: Path | bytes, **options: Any) -> Any:
    """Open a ``pyarrow.parquet.ParquetFile`` on bytes or on a map of a file.

    Given a path, Arrow starts a thread that aborts some processes at exit; given bytes, and
    ``use_threads=False`` for reading, it starts none.

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
    """Read a Parquet file as a ``pyarrow.Table``."""
    return open_parquet(source).read(use_threads=False)


def write_parquet(path: Path, columns: Mapping[str, Any], kind: type[TransformerNFNError]) -> None:
    """Write columns as a Parquet file, atomically; ``kind`` is raised where Arrow is missing."""
    pa, pq = import_arrow(kind, f"writing {path.name}")
    with atomic_file(path) as beside, beside.open("wb") as file:  # Arrow takes only UTF-8 names
        pq.write_table(pa.table(dict(columns)), file)


def blank_figure(
    width: float, height: float, error: type[TransformerNFNError], what: str = "a figure"
) -> Figure:
    """An empty figure, drawn with Agg, which needs no screen.

    Args:
        width: in inches. height: likewise.
        error: raised where matplotlib is missing.
    """
    with needs_extra(error, "matplotlib", "plot", what):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(
    figure: Figure,
    out: Path,
    error: type[TransformerNFNError],
    metadata: Mapping[str, str | None] | None = None,
) -> Path:
    """Write a figure atomically (png, pdf or svg by its name); ``error`` for other formats."""
    try:
        with atomic_file(out) as beside:
            figure.savefig(beside, dpi=DOTS_PER_INCH, metadata=dict(metadata or {}))
    except ValueError as fault:
        if isinstance(fault, TransformerNFNError):
            raise
        raise error(f"'{out}' could not be drawn ({fault})") from fault
    return out
