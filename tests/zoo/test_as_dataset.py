"""A zoo is a sequence of networks and accuracies, as PyTorch's loaders take them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from tnfn_command import tnfn
from transformer_nfn.errors import AssetError
from transformer_nfn.zoo import Settings, Zoo, build


def test_a_zoo_says_what_it_is(small_zoo: Zoo) -> None:
    text = repr(small_zoo)
    assert text.startswith(f"Zoo('{small_zoo.path}', digits, {len(small_zoo)} networks of ")
    assert f"{small_zoo.space.num_weights:,} weights each)" in text


def test_items_are_weights_and_accuracy(small_zoo: Zoo) -> None:
    weights, accuracy = small_zoo[2]
    expected = small_zoo.weights([2])
    assert all(torch.equal(weights[name], w[0]) for name, w in expected.items())
    assert weights["blocks.0.W_Q"].shape == small_zoo.space.shapes["blocks.0.W_Q"]
    assert float(accuracy) == pytest.approx(small_zoo.config(2)["test_accuracy"])
    last = small_zoo[-1][0]
    assert torch.equal(last["classifier.b_2"], small_zoo[len(small_zoo) - 1][0]["classifier.b_2"])
    for row in (len(small_zoo), -len(small_zoo) - 1):
        with pytest.raises(IndexError, match=f"row {row} asked of a zoo with"):
            small_zoo[row]


def test_a_loop_meets_every_network(small_zoo: Zoo) -> None:
    seen = [float(accuracy) for _, accuracy in small_zoo]
    assert seen == pytest.approx(small_zoo.table["test_accuracy"].tolist())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_takes_a_zoo_and_parts_of_it(small_zoo: Zoo, workers: int) -> None:
    rows = small_zoo.select(percent=75)
    loader = DataLoader(Subset(small_zoo, rows.tolist()), batch_size=5, num_workers=workers)
    found = list(loader)
    accuracies = torch.cat([accuracy for _, accuracy in found])
    assert accuracies.tolist() == pytest.approx(small_zoo.table["test_accuracy"][rows].tolist())
    assert found[0][0]["blocks.1.W_A"].shape == (5, 32, 64)
    again = pickle.loads(pickle.dumps(small_zoo))
    assert torch.equal(again[0][0]["blocks.1.W_A"], small_zoo[0][0]["blocks.1.W_A"])


def test_a_zoo_opens_by_name_and_by_text() -> None:
    zoo = Zoo.open("mnist-sample")
    assert len(zoo) == len(Zoo.open(str(zoo.path))) == 160
    with pytest.raises(AssetError, match="no zoo of that name; named zoos are"):
        Zoo.open("nowhere")


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_a_zoo_of_few_epochs_has_every_checkpoint(epochs: int, tmp_path: Path) -> None:
    settings = Settings("digits", runs=3, epochs=epochs, samples=64, batch=32)
    zoo = build(tmp_path / "zoo", settings, workers=1)
    runs = len(set(zoo.table["run"].tolist()))
    for percent in (50, 75, 100):
        rows = zoo.select(percent=percent)
        assert len(rows) == runs
        assert set(zoo.table["epoch"][rows].tolist()) == {max(1, -(-epochs * percent // 100))}
        assert not zoo.table["best"][rows].any()
    assert len(zoo.select(percent=33)) == 0


def test_a_predictor_trains_on_a_zoo_of_three_epochs(tmp_path: Path) -> None:
    build(tmp_path / "zoo", Settings("digits", runs=40, epochs=3, samples=64), workers=1)
    words = ["--model", "random_forest", "--seeds", "1", "--out", tmp_path / "run"]
    code, _, err = tnfn("train", tmp_path / "zoo", *words)
    assert code == 0, err
