"""Rows of a zoo as a dataset of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_nfn.spaces import Weights
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.store.packed import PackedRows


class ZooDataset(torch.utils.data.Dataset[tuple[Weights, Tensor]]):
    """Rows of a zoo as a map-style dataset; see `Zoo.dataset`."""

    def __init__(self, zoo: Any, rows: np.ndarray, target: str, dtype: torch.dtype) -> None:
        self.zoo, self.rows, self.dtype = zoo, rows, dtype
        values = zoo.table[target][rows]
        if values.dtype == object:
            raise ZooError(f"'{target}' of '{zoo.path}' is text: expected a column of numbers")
        self.values = torch.from_numpy(values.astype(np.float64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Weights, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Weights, Tensor]]:
        """Several rows at once, as a `DataLoader` reads them."""
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        if isinstance(self.zoo.storage, PackedRows):
            named = {name: w.to(self.dtype) for name, w in self.zoo.weights(rows).items()}
            networks = [{name: w[i] for name, w in named.items()} for i in range(len(rows))]
        else:
            networks = []
            for row in rows.tolist():
                with self.zoo.model(row) as model:
                    networks.append(dict(model.read(model.names, self.dtype)))
        values = (self.values[i].to(self.dtype) for i in indices)
        return list(zip(networks, values, strict=True))
