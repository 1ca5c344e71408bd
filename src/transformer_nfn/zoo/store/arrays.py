"""Writes a zoo of arrays: rows of weights of one layout, with a table of targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.io.files import atomic_folder
from transformer_nfn.models import RowLayout
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.store.folder import (
    INDEX,
    MODELS_KIND,
    Checksums,
    check_fresh,
    check_outside_zoos,
)
from transformer_nfn.zoo.store.index import table_bytes
from transformer_nfn.zoo.store.shards import DTYPES, write_shard
from transformer_nfn.zoo.targets import ARRAY_COLUMNS, as_column, read_lines

if TYPE_CHECKING:
    import pandas as pd

SHARD_BYTES = 1 << 28
"""Numbers of arrays are stored in shards of this size."""


def array_layout(layout: Mapping[str, Sequence[int]]) -> RowLayout:
    """The layout of arrays, checked: names that are texts, and shapes of whole numbers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in layout.items():
        sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else None
        whole = sizes is not None and all(type(n) is int and 0 < n < 1 << 31 for n in sizes)
        if not isinstance(name, str) or not name.isprintable() or not name or not whole:
            raise ZooError(
                f"a layout expected names of tensors with shapes such as [3, 4], found "
                f"{str(name)[:40]!r}: {str(shape)[:40]}"
            )
        shapes[name] = sizes or ()
    if not shapes:
        raise ZooError("a layout expected the names and shapes of tensors, found none")
    return RowLayout(shapes)


def as_rows(weights: np.ndarray | Tensor) -> Tensor:
    """Weights as a tensor on the CPU, in float16 or float32."""
    tensor = torch.as_tensor(weights).detach().cpu()
    if not tensor.is_floating_point():
        raise ZooError(f"weights expected floating-point numbers, found {tensor.dtype}")
    return tensor if tensor.dtype == torch.float16 else tensor.float()


def write_arrays(
    path: Path,
    weights: Tensor,
    layout: RowLayout,
    table: pd.DataFrame | Mapping[str, Sequence[Any]] | str | Path | None,
    *,
    skip: bool = False,
) -> None:
    """Write a zoo of arrays into a new or empty folder, see `Zoo.from_arrays`.

    Args:
        path: the folder.
        weights: a row for each network.
        layout: of a row.
        table: targets of the networks, see `read_lines`.
        skip: leave out networks whose weights are not finite.
    """
    check_outside_zoos(path)
    check_fresh(path, ())
    if weights.ndim != 2 or weights.shape[1] != layout.width or not len(weights):
        raise ZooError(
            f"weights expected [networks, {layout.width}] as the layout says, found "
            f"{list(weights.shape)}"
        )
    given = read_lines(table, len(weights))
    finite = weights.isfinite().all(1)
    if not bool(finite.all()) and not skip:
        row = int((~finite).nonzero()[0])
        raise ZooError(f"'{given.files[row]}' (row {row}): its weights are not all finite")
    kept = finite.nonzero().squeeze(1)
    if not len(kept):
        raise ZooError("no network has weights that are all finite")
    columns = {
        name: as_column([values[i] for i in kept]) for name, values in given.columns.items()
    }
    names = np.array([given.files[i] for i in kept], dtype=object)
    with atomic_folder(path) as made:
        (made / "shards").mkdir()
        dtype = str(weights.dtype).removeprefix("torch.")
        count = max(1, SHARD_BYTES // max(1, layout.width * weights.element_size()))
        places: dict[str, list[Any]] = {"shard": [], "row": [], "checksum": []}
        shards = {}
        for number, rows in enumerate(kept.split(count)):
            shard = f"{number:05d}"
            entries = write_shard(
                made / "shards" / f"{shard}.safetensors", layout, weights[rows],
                [{"crashed": False} for _ in rows], {}, DTYPES[dtype],
            )  # fmt: skip
            shards[shard] = entries.crc32
            places["shard"] += [shard] * len(rows)
            for name in ("row", "checksum"):
                places[name] += [entry[name] for entry in entries.rows]
        index = {
            "network": names,
            **{name: as_column(values) for name, values in places.items()},
            **columns,
        }
        Checksums(made).replace(INDEX, table_bytes(index, ARRAY_COLUMNS))
        Checksums(made).write_metadata(
            "zoo.json", MODELS_KIND,
            {"origin": "arrays", "shards": shards, "dtype": dtype,
             "layout": {name: list(shape) for name, shape in layout.shapes.items()}},
        )  # fmt: skip
