"""Storage of packed rows: shards that are opened when one of their rows is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.models import RowLayout
from transformer_nfn.zoo.errors import StoreError
from transformer_nfn.zoo.store.shards import ShardReader

# An open shard costs a file handle, and systems allow about a thousand.
OPEN_SHARDS = 256


class PackedRows:
    """Rows of weights in the shards of a zoo.

    Args:
        path: folder of the zoo.
        layout: of a row.
        shards: checksum of the header of each shard.
        table: index of the zoo; ``shard``, ``row`` and ``checksum`` say where a network is.
    """

    def __init__(
        self,
        path: Path,
        layout: RowLayout,
        shards: Mapping[str, int],
        table: Mapping[str, np.ndarray],
    ) -> None:
        self.path, self.layout, self.shards = path, layout, shards
        self._places = {name: table[name] for name in ("shard", "row", "checksum")}
        self._readers: OrderedDict[str, ShardReader] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, such as a `DataLoader` worker: without open files."""
        return {**vars(self), "_readers": OrderedDict()}

    def fetch(self, rows: np.ndarray) -> list[ShardReader]:
        """The readers of some rows, whose pages are being prefetched."""
        readers = [self._reader(shard) for shard in self._places["shard"][rows]]
        for reader, row in zip(readers, self._places["row"][rows].tolist(), strict=True):
            reader.prefetch(row)
        return readers

    def read(self, rows: np.ndarray, readers: Sequence[ShardReader] | None = None) -> Tensor:
        """Rows ``[n, numbers]`` as they are stored, each compared with its checksum."""
        readers = self.fetch(rows) if readers is None else readers
        at, sums = (self._places[name][rows].tolist() for name in ("row", "checksum"))
        dtype = readers[0].dtype if readers else torch.float32
        flat = torch.empty(len(rows), self.layout.width, dtype=dtype)
        out = flat.numpy()
        for i, reader in enumerate(readers):
            reader.read(at[i], sums[i], out[i])
        return flat

    def _reader(self, shard: str) -> ShardReader:
        reader = self._readers.get(shard)
        if reader is None:
            path = self.path / "shards" / f"{shard}.safetensors"
            if not path.exists():
                raise StoreError(f"{path}: missing, but the index lists it")
            reader = ShardReader(path, self.layout, self.shards[shard])
            self._readers[shard] = reader
            if len(self._readers) > OPEN_SHARDS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(shard)
        return reader
