"""Zoos as data frames of pandas and in notebooks."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import Zoo, ZooError
from transformer_nfn.zoo.store.folder import write_groups


@pytest.fixture
def own(tmp_path: Path) -> Zoo:
    zoo = Zoo.create(tmp_path / "own <b>")
    for i in range(2):
        zoo.add(write_example_checkpoint(tmp_path / f"net-{i}", i), loss=2.5 + i, run="a")
    return zoo


@pytest.fixture
def mixed(small_zoo: Zoo, tmp_path: Path) -> Zoo:
    group = small_zoo.sizes.group
    shutil.copytree(small_zoo.path, tmp_path / "mixed" / group.name)
    write_groups(tmp_path / "mixed", [group], {"task": "digits", "seeds": "each"})
    return Zoo.open(tmp_path / "mixed")


def test_every_zoo_is_a_data_frame(small_zoo: Zoo, mixed: Zoo, own: Zoo) -> None:
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


def test_every_zoo_shows_itself_in_a_notebook(small_zoo: Zoo, mixed: Zoo, own: Zoo) -> None:
    assert "<td>digits</td>" in small_zoo._repr_html_()
    assert "<td>36</td>" in mixed._repr_html_()
    assert "<th>llama</th><td>2</td>" in own._repr_html_()
    assert "own &lt;b&gt;" in own._repr_html_()


def test_an_edited_frame_becomes_the_targets(own: Zoo) -> None:
    frame = own.to_pandas()
    frame["loss"] *= 2
    frame["good"] = frame["loss"] < 6
    edited = frame.drop(columns=["run", "family"]).iloc[::-1]
    own.set_targets(edited)
    again = Zoo.open(own.path)
    assert {name: column.tolist() for name, column in again.targets.items()} == {
        "loss": [5.0, 7.0], "good": ["true", "false"],
    }  # fmt: skip
    assert again.verify() == []
    same = again.to_pandas()
    again.set_targets(same)
    assert again.to_pandas().equals(same)
    assert Zoo.open(own.path).to_pandas().equals(same)
    own.set_targets(same.assign(loss=[np.nan, 7.0]))
    assert Zoo.open(own.path).dataset(target="loss").rows.tolist() == [1], "missing is allowed"


def test_rows_are_chosen_by_a_frame(small_zoo: Zoo, own: Zoo) -> None:
    frame = small_zoo.to_pandas()
    best = frame[frame["test_accuracy"] > frame["test_accuracy"].median()]
    weights = small_zoo.weights(best.index)
    assert all(len(w) == len(best) for w in weights.values())
    assert {*best.index} == {*np.concatenate(small_zoo.split(best.index)).tolist()}
    loud = own.to_pandas().query("loss > 3")
    assert own.select(network=loud["network"]).tolist() == loud.index.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.assign(loss=[1.0, -np.inf]), r"row 2 \('net-1'\), column 'loss': expected"),
        (lambda f: f.assign(loss=[np.inf, 1.0]), "expected a finite number, found inf"),
        (lambda f: f.assign(loss=[1, "x"]), "no table of numbers and texts"),
        (lambda f: f.assign(loss=[[1], [2]]), "expected a text, found"),
        (lambda f: f.iloc[:1], "'net-1' has no line"),
        (lambda f: f.iloc[[0, 1, 1]], "'net-1' stands in row 2 already"),
        (lambda f: f.assign(network=["net-0", "net-7"]), "'net-1' has no line"),
        (lambda f: f.assign(checksum="0"), "another column 'checksum'"),
        (lambda f: f.drop(columns="network"), "expected a column 'network'"),
        (lambda f: f.assign(file="x"), "the column 'file' is one of the zoo's own"),
    ],
)
def test_a_frame_that_does_not_fit_changes_nothing(
    own: Zoo, change: Callable[[Any], Any], message: str
) -> None:
    before = own.to_pandas()
    with pytest.raises(ZooError, match=message):
        own.set_targets(change(before.copy()))
    assert own.to_pandas().equals(before)
    assert Zoo.open(own.path).to_pandas().equals(before)


def test_without_pandas_its_extra_is_named(own: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ZooError, match=r"pip install 'transformer-nfn\[pandas\]'"):
        own.to_pandas()
