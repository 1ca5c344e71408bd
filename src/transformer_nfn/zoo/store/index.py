"""The index of a zoo: one row per checkpoint, as columns in Parquet."""

from __future__ import annotations

import io
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from transformer_nfn.errors import needs_extra
from transformer_nfn.io.files import import_arrow, read_parquet
from transformer_nfn.io.json_fields import Fields, parse_object
from transformer_nfn.zoo.errors import StoreError, ZooError
from transformer_nfn.zoo.targets import ARRAY_COLUMNS, RESERVED, as_column, check_name

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: dict[str, Any] = {
    "run": "",
    "optimizer": "",
    "learning_rate": float("nan"),
    "l2": float("nan"),
    "init_std": float("nan"),
    "dropout": float("nan"),
    "train_fraction": float("nan"),
    "seed": 0,
    "epoch": 0,
    "percent": 0,
    "best": False,
    "crashed": False,
    "train_accuracy": float("nan"),
    "held_accuracy": float("nan"),
    "test_loss": float("nan"),
    "test_accuracy": float("nan"),
    "shard": "",
    "row": -1,
    "checksum": 0,
    "source": "",
}
"""Columns with their default (for crashed runs and imported files), which fixes their type."""
KINDS: dict[type, str] = {str: "O", bool: "b", int: "iu", float: "f"}
"""Kinds of arrays that hold each type."""

Rows = Sequence[int] | np.ndarray | Tensor
CONFIGURATION = ("optimizer", "learning_rate", "l2", "init_std", "dropout", "train_fraction")
"""Columns of a run's training configuration."""


def arrow() -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``."""
    return import_arrow(StoreError, "the index of a zoo")


class IndexedRows:
    """What all zoos do with their index.

    Attributes:
        table: the index as columns (NumPy arrays), one row per network.
    """

    table: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.table.values())))

    def to_pandas(self) -> pd.DataFrame:
        """The index as a data frame, a line for each network; needs ``pandas``."""
        return to_frame(self.table)

    def config(self, row: int) -> dict[str, Any]:
        """The index entry of one row, as plain values."""
        (row,) = self._rows([row])
        values = {name: column[row] for name, column in self.table.items()}
        return {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}

    def _rows(self, rows: Rows | None) -> np.ndarray:
        """Numbers of the chosen rows, of all by default; refuses those that are not there."""
        chosen = np.arange(len(self)) if rows is None else np.asarray(rows)
        if chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64).reshape(-1)
        bad = chosen[(chosen < 0) | (chosen >= len(self))]
        if len(bad):
            raise ZooError(f"row {bad[0]} of a zoo with {len(self)} rows")
        return chosen

    def _at(self, row: int) -> int:
        """The number of a row that may count from the end, as in a list."""
        at = operator.index(row)
        if not -len(self) <= at < len(self):
            raise IndexError(f"row {at} of a zoo with {len(self)} rows")
        return at % len(self)


def to_frame(columns: Mapping[str, Any]) -> pd.DataFrame:
    """Columns as a ``pandas.DataFrame``."""
    with needs_extra(ZooError, "pandas", "pandas", "a data frame of a zoo"):
        import pandas as pd
    return pd.DataFrame(dict(columns))


def split_rows(
    rows: np.ndarray, labels: np.ndarray, fractions: Sequence[float], seed: int
) -> list[np.ndarray]:
    """Split rows at random into parts, so that no label has rows in two of them.

    Args:
        rows: to split.
        labels: of each row, as text.
        fractions: the share of the labels in each part; they add up to 1.
        seed: of the random split.
    """
    if any(f < 0 for f in fractions) or abs(sum(fractions) - 1) > 1e-6:
        raise ZooError(f"split fractions must add up to 1, found {list(fractions)}")
    names, which = np.unique(labels, return_inverse=True)
    place = np.random.default_rng(seed).permutation(len(names))
    edges = np.rint(np.cumsum([0.0, *fractions]) * len(names)).astype(int)
    side = np.searchsorted(edges, place[which], side="right") - 1
    return [rows[side == i] for i in range(len(fractions))]


@dataclass(frozen=True)
class Index:
    """The columns as arrays, and the CRC-32 of each shard's header.

    >>> index = Index.from_rows([{"run": "00007", "shard": "00000", "row": 0}], {"00000": 1})
    >>> again = Index.from_parquet(index.to_parquet(), "index.parquet")
    >>> len(again), again.columns["run"][0], again.shards
    (1, '00007', {'00000': 1})
    """

    columns: dict[str, np.ndarray]
    shards: dict[str, int]

    def __len__(self) -> int:
        return len(self.columns["run"])

    @staticmethod
    def from_rows(
        rows: Sequence[Mapping[str, Any]], shards: Mapping[str, int], where: str = ""
    ) -> Index:
        """An index of rows, read from the file ``where``; missing values take the default."""
        columns = {}
        for name, default in COLUMNS.items():
            dtype = object if isinstance(default, str) else np.array(default).dtype
            try:
                columns[name] = np.array([row.get(name, default) for row in rows], dtype=dtype)
            except (TypeError, ValueError, OverflowError) as error:
                raise StoreError(f"{where}: damaged, '{name}' of its rows: {error}") from error
        _check_columns(columns, where)
        return Index(columns, dict(shards))

    @staticmethod
    def joined(parts: Sequence[Index]) -> Index:
        """One index of several, in order."""
        parts = [Index.from_rows([], {}), *parts]
        columns = {name: np.concatenate([p.columns[name] for p in parts]) for name in COLUMNS}
        return Index(columns, {shard: crc for p in parts for shard, crc in p.shards.items()})

    def to_parquet(self) -> bytes:
        """The bytes of a Parquet file."""
        pa, pq = arrow()
        table = pa.table({name: pa.array(column) for name, column in self.columns.items()})
        table = table.replace_schema_metadata({"shards": json.dumps(self.shards)})
        out = io.BytesIO()
        pq.write_table(table, out, compression="zstd")
        return out.getvalue()

    @staticmethod
    def from_parquet(data: bytes, where: str) -> Index:
        """The inverse of `to_parquet`; ``where`` is the file, for errors."""
        pa, _ = arrow()
        try:
            table = read_parquet(data)
            shards = parse_object(table.schema.metadata[b"shards"], where, StoreError)
            columns = {name: _values(table.column(name), COLUMNS[name]) for name in COLUMNS}
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{where}: damaged, not an index of a zoo ({error})") from error
        _check_columns(columns, where)
        _check_shards(shards, columns, where)
        return Index(columns, shards)


def _values(column: Any, default: Any) -> np.ndarray:
    """A column as an array. Arrow's own conversion would first import pandas, if it is there."""
    if isinstance(default, str | bool):
        return np.array(column.to_pylist(), dtype=object if isinstance(default, str) else None)
    return np.from_dlpack(column.combine_chunks()).copy()


def _check_columns(columns: Mapping[str, np.ndarray], where: str) -> None:
    """Check the type of every column and the range of accuracies."""
    for name, default in COLUMNS.items():
        column = columns[name]
        valid = column.dtype.kind in KINDS[type(default)]
        if not valid or (default == "" and not all(isinstance(x, str) for x in column.tolist())):
            raise StoreError(
                f"{where}: column '{name}' expected values of type {type(default).__name__}, "
                f"found {column.dtype}"
            )
    for name in ("train_accuracy", "held_accuracy", "test_accuracy"):
        known = columns[name][~np.isnan(columns[name])]
        if len(bad := known[(known < 0) | (known > 1)]):
            raise StoreError(f"{where}: '{name}' expected numbers from 0 to 1, found {bad[0]:g}")


def _check_shards(shards: object, columns: Mapping[str, np.ndarray], where: str) -> None:
    """Check the shards' checksums, and that every row lies in a shard that has one."""
    fields = Fields(shards, where, StoreError, "shards")
    for shard in fields.data:
        fields.whole(shard, most=2**32 - 1)
    missing = set(columns["shard"][~columns["crashed"]].tolist()) - set(fields.data)
    if missing:
        raise StoreError(f"{where}: shard {min(missing)!r} has no checksum")


def whole(name: str, reserved: Sequence[str]) -> bool:
    """Whether a column of the zoo's own holds whole numbers; checksums of checkpoints are text."""
    return name in ("bytes", "row") or (name == "checksum" and "shard" in reserved)


def table_bytes(table: Mapping[str, np.ndarray], reserved: Sequence[str] = RESERVED) -> bytes:
    """The index of a zoo of a user as the bytes of a Parquet file; see `read_table`."""
    pa, pq = arrow()
    columns = {}
    for name, column in table.items():
        kind = pa.string() if name in reserved or column.dtype == object else None
        kind = pa.int64() if name in reserved and whole(name, reserved) else kind
        columns[name] = pa.array(column.tolist(), kind)
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out, compression="zstd")
    return out.getvalue()


def read_table(data: bytes, where: str) -> dict[str, np.ndarray]:
    """Read and check what `table_bytes` wrote; ``where`` is the file, for errors."""
    pa, _ = arrow()
    try:
        read = read_parquet(data)
        table = {}
        for field in read.schema:
            values = read.column(field.name).to_pylist()
            text = pa.types.is_string(field.type)
            if not (text or pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
                raise ValueError(f"column '{field.name}' of {field.type}")
            table[field.name] = np.array(values, dtype=object) if text else as_column(values)
    except (pa.ArrowException, OSError, TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"{where}: damaged, not an index of a zoo ({error})") from error
    reserved = ARRAY_COLUMNS if tuple(table)[: len(ARRAY_COLUMNS)] == ARRAY_COLUMNS else RESERVED
    if tuple(table)[: len(reserved)] != reserved:
        raise StoreError(f"{where}: expected the columns {', '.join(RESERVED)} first")
    for name, column in table.items():
        text = column.dtype == object and all(isinstance(v, str) for v in column.tolist())
        number = column.dtype != object and not bool(np.isinf(column).any())
        valid = text or number
        if name in reserved and len(column):
            valid = column.dtype == np.int64 if whole(name, reserved) else text
        if not valid:
            raise StoreError(f"{where}: column '{name}' expected numbers, or text, of one type")
    names = table["network"].tolist()
    if len(set(names)) < len(names):
        raise StoreError(f"{where}: column 'network' holds '{max(names, key=names.count)}' twice")
    for name in names:  # an export makes folders of these names
        try:
            check_name(name)
        except ZooError as error:
            raise StoreError(f"{where}: column 'network': {error}") from error
    return table
