"""Tables of targets: one row per file of a network, one column per property."""

from __future__ import annotations

import csv
import datetime
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_nfn.io.files import import_arrow, read_parquet, read_regular, write_text
from transformer_nfn.io.json_fields import LARGEST, parse_object
from transformer_nfn.zoo.errors import ImportFileError, ZooError

if TYPE_CHECKING:
    import pandas as pd

FILE = "file"
"""The column that names the file or folder of each network."""
RESERVED = ("network", "family", "checksum", "bytes")
"""Columns of the index of a zoo, which no target may be called."""
ARRAY_COLUMNS = ("network", "shard", "row", "checksum")
"""The same of a zoo of arrays."""
LONGEST_NAME = 240
TEST_ACCURACY = "test_accuracy"
"""Column of the accuracies of a built zoo."""
NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,16}\s*")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_NOT_FINITE = re.compile(r"\s*[+-]?(nan|inf|infinity)\s*", re.IGNORECASE)

Value = int | float | str
"""The value of a target for one network: a number, NaN if it is missing, or a text."""
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class TargetTable:
    """Targets of many networks.

    Attributes:
        where: the file of the table.
        files: of each network, relative to the folder of the networks.
        columns: targets by name, a value for each network.
        problems: what is wrong with a row, by its position.

    >>> text = "file,accuracy,optimizer\\na.pt,0.9,adam\\nb.pt,nan,sgd\\n"
    >>> _ = Path("scores.csv").write_text(text)
    >>> table = read_targets("scores.csv")
    >>> table.row(0)
    {'accuracy': 0.9, 'optimizer': 'adam'}
    >>> table.problems
    {1: "'scores.csv', row 2 ('b.pt'), column 'accuracy': expected a finite number, found 'nan'"}
    """

    where: str
    files: list[str]
    columns: dict[str, list[Value]]
    problems: dict[int, str]

    def __len__(self) -> int:
        return len(self.files)

    def row(self, at: int) -> dict[str, Value]:
        """The targets of one network."""
        return {name: values[at] for name, values in self.columns.items()}

    def place(self, at: int) -> str:
        """What errors call a row; rows count from 1 below the header."""
        return f"'{self.where}', row {at + 1} ('{self.files[at][:80]}')"


def read_targets(path: str | Path) -> TargetTable:
    """Read a table in CSV, Parquet or JSON lines, by its suffix.

    A column is of numbers where most of its cells are, else of text; true and false are text. An
    empty cell is a missing target. Cells of another type are problems of their rows; a table that
    is unreadable, names no files or names one twice is refused.
    """
    columns, texts = _read_columns(Path(path))
    return _table(columns, str(path), FILE, texts=texts)


def _read_columns(path: Path) -> tuple[Columns, bool]:
    """Cells of a table by its columns, and whether all are texts that may spell numbers."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ImportFileError(
            f"'{path}': expected a table with the suffix {', '.join(_READERS)}, found "
            f"'{path.suffix}'"
        )
    try:
        data = read_regular(path)
    except OSError as error:
        raise ImportFileError(f"'{path}' cannot be read: {error.strerror or error}") from error
    return reader(data, str(path)), reader is _read_csv


def read_lines(
    table: pd.DataFrame | Mapping[str, Sequence[Any]] | str | Path | None, count: int
) -> TargetTable:
    """The targets of arrays, a line for each in order, without problems.

    Args:
        table: a data frame, columns by name, or a file as `read_targets` takes it, in which a
            column ``network``, else ``file``, names each; None for no targets.
        count: number of arrays.

    >>> read_lines({"loss": [0.5, None]}, 2).columns
    {'loss': [0.5, nan]}
    """
    where, texts = "the table", False
    columns: Columns = {}
    if isinstance(table, str | Path):
        where, (columns, texts) = str(table), _read_columns(Path(table))
    elif isinstance(table, Mapping):
        plain = ((name, getattr(column, "tolist", None)) for name, column in table.items())
        columns = {name: to() if to else list(table[name]) for name, to in plain}
    elif table is not None:
        columns = _frame_columns(table, where)
    for name, cells in columns.items():
        if len(cells) != count:
            raise ImportFileError(
                f"'{where}' expected {count} lines, one for each network, found {len(cells)} in "
                f"column '{name}'"
            )
    files = columns.pop(FILE, [f"{i:05d}" for i in range(count)])
    columns.setdefault(RESERVED[0], files)
    found = _table(columns, where, RESERVED[0], texts=texts)
    if found.problems:
        raise ImportFileError(found.problems[min(found.problems)])
    for name in found.files:
        check_name(name)
    return found


def read_frame(frame: pd.DataFrame, reserved: Sequence[str] = RESERVED) -> TargetTable:
    """The targets in a data frame whose column ``network`` names each network, without problems."""
    where, key = "data frame", reserved[0]
    columns = _frame_columns(frame, where)
    targets = {name: cells for name, cells in columns.items() if name not in reserved[1:]}
    table = _table(targets, where, key, texts=False)
    if table.problems:
        raise ImportFileError(table.problems[min(table.problems)])
    return table


def _frame_columns(frame: pd.DataFrame, where: str) -> Columns:
    import pyarrow as pa

    try:
        return dict(pa.Table.from_pandas(frame, preserve_index=False).to_pydict())
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ImportFileError(f"'{where}' is no table of numbers and texts: {error}") from error


def _table(columns: Columns, where: str, key: str, *, texts: bool) -> TargetTable:
    """Validate columns, of which ``key`` names the networks; ``texts`` may spell numbers."""
    _check_header(list(columns), where, key)
    named = enumerate(columns.pop(key), 1)
    files = [_file_name(cell, f"'{where}', row {i}, column '{key}'") for i, cell in named]
    if not files:
        raise ImportFileError(f"'{where}' has no rows: expected one for each network")
    seen: dict[str, int] = {}
    for number, file in enumerate(files, 1):
        if file in seen:
            raise ImportFileError(
                f"'{where}', row {number}: '{file}' stands in row {seen[file]} already"
            )
        seen[file] = number
    table = TargetTable(where, files, {}, {})
    for name, cells in columns.items():
        table.columns[name] = list(_typed(table, name, cells, texts=texts))
    return table


def plain_targets(targets: dict[str, Any]) -> dict[str, Value]:
    """Targets given in Python as finite numbers and texts; refuses anything else."""
    _check_names(list(targets), "targets")
    out: dict[str, Value] = {}
    for name, value in targets.items():
        value = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
        found = math.nan if value is None else _plain(value)
        if found is None or (not isinstance(found, str) and np.isinf(found)):
            raise ZooError(f"target '{name}' expected a finite number or a text, found {value!r}")
        out[name] = found
    return out


def check_name(name: str) -> None:
    """Refuse the name of a network that is no path below a folder."""
    path = PurePosixPath(name)
    parts = path.parts
    if (
        str(path) != name or path.is_absolute() or not parts or not name.isprintable()
        or len(name.encode()) > LONGEST_NAME or any(part.startswith(".") for part in parts)
    ):  # fmt: skip
        raise ZooError(
            f"a network expected a name such as 'adam/run-3' of at most {LONGEST_NAME} bytes, "
            f"found {name[:80]!r}"
        )


def check_targets(
    targets: Mapping[str, Value], other: Mapping[str, Value], name: str, zoo: Path
) -> None:
    """Refuse targets of other names or types than those of another network of a zoo."""
    expected = [column for column in other if column not in RESERVED]
    if set(targets) != set(expected):
        raise ZooError(
            f"'{name}': expected the targets {', '.join(expected) or 'none'} of '{zoo}', found "
            f"{', '.join(targets) or 'none'}"
        )
    for column in expected:
        text = isinstance(other[column], str)
        if text != isinstance(targets[column], str):
            raise ZooError(
                f"'{name}': target '{column}' expected {'a text' if text else 'a number'} as in "
                f"'{zoo}', found {targets[column]!r}"
            )


def names_accuracy(column: str) -> bool:
    """Whether a column is named as an accuracy: one of its words is accuracy, or acc.

    >>> [names_accuracy(name) for name in ("test_accuracy", "valAcc", "acc@1", "loss", "access")]
    [True, True, True, False, False]
    """
    return not {"accuracy", "acc"}.isdisjoint(word.lower() for word in _WORD.findall(column))


def is_accuracy(column: str, values: np.ndarray) -> bool:
    """Whether a column holds accuracies: it is named so, and its numbers are from 0 to 1."""
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    inside = values.dtype.kind == "f" and bool(((known >= 0) & (known <= 1)).all())
    return inside and names_accuracy(column)


def as_column(values: Sequence[Value]) -> np.ndarray:
    """Targets as an array of text (objects), ``int64`` or ``float64``."""
    if any(isinstance(value, str) for value in values):
        return np.array(values, dtype=object)
    whole = all(isinstance(value, int) for value in values)
    return np.array(values, dtype=np.int64 if whole and values else np.float64)


def write_csv(path: Path, columns: dict[str, Sequence[Any]]) -> None:
    """Write columns as CSV, atomically."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_text(path, text.getvalue())


def read_csv_rows(data: bytes, where: str) -> tuple[list[str], list[dict[str, str]]]:
    """The header of a CSV file, and its rows by column."""
    try:
        text = data.decode("utf-8-sig")  # some programs write a byte-order mark
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        header = list(reader.fieldnames or ())
        rows = list(reader)
    except UnicodeDecodeError as error:
        raise ImportFileError(f"'{where}' is not UTF-8: {error}") from error
    except csv.Error as error:
        raise ImportFileError(f"'{where}' is not a table in CSV: {error}") from error
    for number, row in enumerate(rows, 1):
        if None in row:
            raise ImportFileError(
                f"'{where}', row {number}: expected {len(header)} cells, found "
                f"{len(header) + len(row[None])}"
            )
        if "\0" in "".join(value or "" for value in row.values()):
            raise ImportFileError(f"'{where}', row {number}: a cell holds a NUL character")
    return header, rows


def _read_csv(data: bytes, where: str) -> Columns:
    header, rows = read_csv_rows(data, where)
    _check_once(header, where)
    return {name: [row[name] or None for row in rows] for name in header}


def _read_parquet(data: bytes, where: str) -> Columns:
    pa, _ = import_arrow(ImportFileError, "a table in Parquet")
    try:
        table = read_parquet(data)
        _check_once(table.column_names, where)
        return {name: table.column(name).to_pylist() for name in table.column_names}
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, ImportFileError):
            raise
        raise ImportFileError(f"'{where}' is not a table in Parquet: {error}") from error


def _read_json_lines(data: bytes, where: str) -> Columns:
    lines = [(i, line) for i, line in enumerate(data.splitlines(), 1) if line.strip()]
    rows = [parse_object(line, f"{where}, line {i}", ImportFileError) for i, line in lines]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names or [FILE]}


_READERS: dict[str, Callable[[bytes, str], Columns]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
}


def _check_once(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ImportFileError(f"'{where}' has two columns '{name}'")
        seen.add(name)


def _check_header(names: list[str], where: str, key: str) -> None:
    if key not in names:
        found = ", ".join(map(repr, names))[:200] or "none"
        comma = ": separate columns by commas" if re.search(r"[;\t]", "".join(names)) else ""
        raise ImportFileError(
            f"'{where}' expected a column '{key}' with the {key}s, found {found}{comma}"
        )
    _check_names([name for name in names if name != key], f"'{where}'")


def _check_names(names: list[str], where: str) -> None:
    for name in names:
        if not name.strip() or not name.isprintable():
            raise ImportFileError(f"{where}: expected columns with names, found {name!r}")
        if name in (FILE, *RESERVED):
            raise ImportFileError(
                f"{where}: the column '{name}' is one of the zoo's own: give it another name"
            )


def _file_name(cell: Any, where: str) -> str:
    """The path of a network relative to its folder, without ``./`` and a slash at its end."""
    path = PurePosixPath(cell.strip()) if isinstance(cell, str) else PurePosixPath()
    if path == PurePosixPath():
        raise ImportFileError(f"{where}: expected a file, found {_shown(cell)}")
    long = any(len(part.encode(errors="replace")) > 255 for part in path.parts)
    if path.is_absolute() or ".." in path.parts or long or not str(path).isprintable():
        raise ImportFileError(
            f"{where}: expected a path below the folder of the networks, found "
            f"{str(path)[:80]!r}"
        )
    return str(path)


def _typed(table: TargetTable, name: str, cells: list[Any], *, texts: bool) -> Iterator[Value]:
    """The values of a column; those of another type than most are problems of their rows."""
    plain = [_parse(cell) if texts and cell is not None else _plain(cell) for cell in cells]
    filled = [value for value in plain if value is not None]
    numbers = sum(not isinstance(value, str) for value in filled) * 2 > len(filled)
    for at, (cell, value) in enumerate(zip(cells, plain, strict=True)):
        if cell is None or (isinstance(cell, float) and math.isnan(cell)):
            yield math.nan if numbers else ""
            continue
        if not numbers and texts:
            value = cell
        text = isinstance(value, str)
        if value is not None and text != numbers and (text or np.isfinite(value)):
            yield value
            continue
        expected = "a finite number" if numbers else "a text"
        table.problems.setdefault(
            at, f"{table.place(at)}, column '{name}': expected {expected}, found {_shown(cell)}"
        )
        yield 0 if numbers else ""


def _shown(cell: Any) -> str:
    """What errors call a cell."""
    return "an empty cell" if cell is None or cell == "" else repr(cell)[:60]


def _parse(text: str) -> Value:
    """A cell of text as the number that it spells, where it does."""
    if _WHOLE.fullmatch(text) and abs(int(text)) <= LARGEST:
        return int(text)
    return float(text) if NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text) else text


def _plain(value: Any) -> Value | None:
    """A cell as a number or a text; None where it is neither."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) > LARGEST:
        return float(value) if abs(value) < 10**300 else np.inf
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, str):
        return value if value.encode(errors="ignore").decode() == value else None
    return value if isinstance(value, int | float) else None
