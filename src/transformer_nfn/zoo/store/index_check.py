"""Can the columns of an index be those of a zoo? Parquet that is whole may still say anything."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from transformer_nfn.zoo.errors import StoreError


def check_columns(
    columns: Mapping[str, np.ndarray], expected: Mapping[str, object], where: str
) -> None:
    """Refuses a column of another type than its default, and accuracies that none can be.

    Args:
        columns: as read.
        expected: a value of each column, for its type.
        where: the file.
    """
    for name, default in expected.items():
        column = columns[name]
        if isinstance(default, str):
            fits = all(isinstance(value, str) for value in column.tolist())
        elif isinstance(default, bool):
            fits = column.dtype == bool
        elif isinstance(default, int):
            fits = np.issubdtype(column.dtype, np.integer)
        else:
            fits = np.issubdtype(column.dtype, np.floating)
        if not fits:
            raise StoreError(
                f"{where}: column '{name}' expected values of type {type(default).__name__}, "
                f"found {column.dtype}"
            )
    for name in ("train_accuracy", "held_accuracy", "test_accuracy"):
        known = columns[name][~np.isnan(columns[name])]
        if len(bad := known[(known < 0) | (known > 1)]):
            raise StoreError(f"{where}: '{name}' expected numbers from 0 to 1, found {bad[0]:g}")


def check_shards(shards: object, columns: Mapping[str, np.ndarray], where: str) -> None:
    """Refuses checksums of shards that are none, and rows in shards without one."""
    if not isinstance(shards, dict) or not all(
        type(crc) is int and 0 <= crc < 2**32 for crc in shards.values()
    ):
        raise StoreError(f"{where}: damaged, its checksums of shards are none")
    alive = ~columns["crashed"]
    missing = set(columns["shard"][alive].tolist()) - set(shards)
    if missing:
        raise StoreError(f"{where}: names the shard {min(missing)!r}, of which it has no checksum")
