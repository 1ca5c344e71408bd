"""Networks to train on: selections, splits by run, subsets, sizes of a mixed zoo."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from transformer_nfn.prediction.data import (
    Selection,
    describe_zoo,
    load_networks,
    load_parts,
    load_rows,
    nested_subset,
)
from transformer_nfn.prediction.runs import RunError
from transformer_nfn.zoo import Zoo

SMALL, WIDE, DEEP = "w16-h4-d1", "w20-h2-d1", "w16-h4-d2"


@pytest.fixture(scope="module")
def zoo():
    """A zoo as builds write it: runs of the largest train fraction first."""
    return Zoo.open("mnist-sample")


def rows_of(zoo, part="train", **options):
    return getattr(load_parts(zoo, Selection(**options)), part).columns["row"].tolist()


def test_parts_share_no_run(zoo):
    parts = load_parts(zoo)
    runs = [set(part.runs) for part in (parts.train, parts.val, parts.test)]
    assert len(set.union(*runs)) == sum(len(names) for names in runs)
    assert sum(parts.counts.values()) == len(zoo.select(percent=75))
    layout = parts.train.network.layout
    assert (layout.part("embedding"), layout.part("classifier")) == (544, 1386)


def test_subsets_are_nested_and_follow_from_the_split(zoo):
    nested = [set(rows_of(zoo, max_train=size)) for size in (8, 32, 112)]
    assert [len(rows) for rows in nested] == [8, 32, 112]
    assert all(small < large for small, large in pairwise(nested))
    assert rows_of(zoo, max_train=32) == rows_of(zoo, max_train=32)
    assert set(rows_of(zoo, max_train=32, split_seed=1)) < set(rows_of(zoo, split_seed=1))
    for part in ("val", "test"):
        assert rows_of(zoo, part, max_train=32) == rows_of(zoo, part)
    assert rows_of(zoo, max_train=500) == rows_of(zoo)


def test_subsets_are_representative(zoo):
    fraction = zoo.table["train_fraction"]
    rows = np.array(rows_of(zoo))
    mean = fraction[rows].mean()
    means = [fraction[nested_subset(rows, 32, seed)].mean() for seed in range(200)]
    # The standard error of a mean over 200 subsets of 32 is a tenth of this.
    assert np.mean(means) == pytest.approx(mean, abs=0.01)
    assert fraction[rows[:32]].mean() > mean + 0.05, "the zoo is ordered"
    # Every network is drawn about as often as any other.
    drawn = np.concatenate([nested_subset(np.arange(20), 5, seed) for seed in range(2000)])
    assert np.bincount(drawn) == pytest.approx(np.full(20, 500), rel=0.2)


def test_what_cannot_be_loaded_is_rejected(zoo, monkeypatch):
    for selection, message in (
        (Selection(max_train=0), "at least 1 network, found 0"),
        (Selection(min_accuracy=1.1), r"not enough networks: 0 have accuracy at least 1\.1"),
        (Selection(percent=33), "no checkpoints at 33 %"),
        (Selection(leave_out=("w8-h2-d1",)), "networks of one size: there is none to leave out"),
    ):
        with pytest.raises(RunError, match=message):
            load_networks(zoo, selection)
    rows = zoo.select(percent=75)[:5]
    damaged = zoo.batch(rows)
    damaged.views["blocks.1.W_A"][3, 0, 0] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr(zoo, "batch", lambda _: damaged)
        with pytest.raises(RunError, match=rf"#{rows[3]}': 'blocks\.1\.W_A' holds values"):
            load_rows(zoo, rows)
    same = dict(zoo.table) | {"test_accuracy": np.full(len(zoo), 0.5)}
    monkeypatch.setattr(zoo, "table", same)
    with pytest.raises(RunError, match=r"in the train part have the same test accuracy, 0\.5"):
        load_parts(zoo)


def test_every_size_is_split_as_its_zoo_alone_would_be(mixed):
    groups = load_networks(mixed, Selection(all_checkpoints=True))
    assert groups.names == (SMALL, WIDE, DEEP)
    for name, ours in groups.parts.items():
        alone = load_parts(mixed.parts[name], Selection(all_checkpoints=True))
        for part in ("train", "val", "test", "more"):
            loaded, expected = getattr(ours, part), getattr(alone, part)
            assert loaded.columns["row"].tolist() == expected.columns["row"].tolist()
            assert torch.equal(loaded.accuracy, expected.accuracy)
    assert groups.train[1].network.views["blocks.0.W_Q"].shape[1:] == (2, 20, 10)
    few = load_networks(mixed, Selection(max_train=5))
    assert [len(data) for data in few.train] == [5, 5, 5]
    assert few.parts[SMALL].more is None


def test_a_size_left_out_is_a_test_set(mixed):
    groups = load_networks(mixed, Selection(leave_out=(WIDE, DEEP)))
    assert groups.names == (SMALL,)
    rows = mixed.parts[WIDE].select(percent=75)
    assert groups.left_out[WIDE].columns["row"].tolist() == rows.tolist()
    assert groups.counts[WIDE] == {"left out": len(rows)}
    assert sum(groups.counts[SMALL].values()) == len(mixed.parts[SMALL].select(percent=75))
    with pytest.raises(RunError, match="'w9-h3-d1'"):
        load_networks(mixed, Selection(leave_out=("w9-h3-d1",)))
    with pytest.raises(RunError, match="no size left to train on: 3 are left out"):
        load_networks(mixed, Selection(leave_out=(SMALL, WIDE, DEEP)))
    with pytest.raises(RunError, match=f"{SMALL}: not enough networks"):
        load_networks(mixed, Selection(min_accuracy=0.99))


def test_a_record_knows_the_zoo(zoo, mixed):
    about = describe_zoo(mixed)
    assert (about["runs"], about["seeds"], about["task"]) == (75, "each", "digits")
    assert about["architectures"][WIDE]["d_ff"] == 40
    assert describe_zoo(zoo)["architecture"] == zoo.sizes.to_json()
