"""`testing.check_zoo` on zoos of every kind, and on one whose weights or split are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from transformer_nfn.testing import check_zoo, write_example_checkpoint
from transformer_nfn.zoo import Zoo


def arrays(path: Path) -> Zoo:
    rng = np.random.default_rng(0)
    loss = np.where(np.arange(12) % 4 == 0, np.nan, rng.uniform(size=12))
    table = {"loss": loss, "run": [f"r{i // 3}" for i in range(12)]}
    return Zoo.from_arrays(path, rng.normal(size=(12, 7)), {"W": (2, 3), "b": (1,)}, table)


def test_zoos_of_arrays_and_checkpoints_keep_what_a_zoo_keeps(tmp_path: Path) -> None:
    check_zoo(arrays(tmp_path / "arrays"))
    zoo = Zoo.create(tmp_path / "checkpoints")
    for seed in range(3):
        zoo.add(write_example_checkpoint(tmp_path / f"net-{seed}", seed), loss=0.5 * seed)
    check_zoo(zoo, rows=2)


def test_damaged_weights_are_found(tmp_path: Path) -> None:
    path = arrays(tmp_path / "arrays").path / "shards" / "00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match=r"intact weights: .*does not match its checksum"):
        check_zoo(tmp_path / "arrays")


def test_a_split_that_divides_a_run_is_found(tmp_path: Path) -> None:
    class ByRow(Zoo):
        def split(self, *args: object, **options: object) -> list[np.ndarray]:
            return [np.arange(0, 12, 2), np.arange(1, 12, 2), np.array([], dtype=np.int64)]

    zoo = arrays(tmp_path / "arrays")
    zoo.__class__ = ByRow
    with pytest.raises(AssertionError, match="no run in two parts"):
        check_zoo(zoo)
