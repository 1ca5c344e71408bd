"""Zoos as data frames of pandas and in notebooks."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import MixedZoo, ModelZoo, Zoo, ZooError
from transformer_nfn.zoo.store.zoo import write_groups


@pytest.fixture
def own(tmp_path: Path) -> ModelZoo:
    zoo = ModelZoo.create(tmp_path / "own <b>")
    for i in range(2):
        zoo.add(write_example_checkpoint(tmp_path / f"net-{i}", i), loss=2.5 + i, run="a")
    return zoo


@pytest.fixture
def mixed(small_zoo: Zoo, tmp_path: Path) -> MixedZoo:
    group = small_zoo.sizes.group
    shutil.copytree(small_zoo.path, tmp_path / "mixed" / group.name)
    write_groups(tmp_path / "mixed", [group], {"task": "digits", "seeds": "each"})
    return MixedZoo.open(tmp_path / "mixed")


def test_every_zoo_is_a_data_frame(small_zoo: Zoo, mixed: MixedZoo, own: ModelZoo) -> None:
    for zoo in (small_zoo, mixed):
        frame = zoo.to_pandas()
        assert np.array_equal(frame["test_accuracy"], small_zoo.table["test_accuracy"])
        assert list(frame["run"]) == small_zoo.table["run"].tolist()
        assert len(frame) == len(small_zoo)
    assert set(mixed.to_pandas()["kind"]) == {small_zoo.sizes.group.name}
    frame = own.to_pandas()
    assert {name: list(frame[name]) for name in ("network", "family", "loss", "run")} == {
        "network": ["net-0", "net-1"], "family": ["llama"] * 2, "loss": [2.5, 3.5],
        "run": ["a", "a"],
    }  # fmt: skip


def test_every_zoo_shows_itself_in_a_notebook(
    small_zoo: Zoo, mixed: MixedZoo, own: ModelZoo
) -> None:
    assert "<td>digits</td>" in small_zoo._repr_html_()
    assert "<td>36</td>" in mixed._repr_html_()
    assert "<th>llama</th><td>2</td>" in own._repr_html_()
    assert "own &lt;b&gt;" in own._repr_html_()


def test_without_pandas_its_extra_is_named(
    own: ModelZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ZooError, match=r"pip install 'transformer-nfn\[pandas\]'"):
        own.to_pandas()
