"""Fewer networks to train on: a random part of them, the smaller within the larger."""

from itertools import pairwise

import numpy as np
import pytest

from transformer_nfn.io.assets import resolve
from transformer_nfn.prediction.dataset import load_parts, nested_subset
from transformer_nfn.prediction.records import RunError
from transformer_nfn.zoo import Zoo


@pytest.fixture(scope="module")
def zoo():
    """A zoo as builds write it: runs of the largest train fraction first."""
    return Zoo.open(resolve("mnist-sample", "zoo"))


def rows_of(zoo, part="train", **options):
    return getattr(load_parts(zoo, **options), part).columns["row"].tolist()


def test_a_smaller_subset_is_part_of_every_larger_one(zoo):
    found = [set(rows_of(zoo, max_train=size)) for size in (8, 16, 32, 64, 112)]
    assert [len(rows) for rows in found] == [8, 16, 32, 64, 112]
    assert all(small < large for small, large in pairwise(found))


def test_a_subset_follows_from_its_seeds_alone(zoo):
    some = rows_of(zoo, max_train=32)
    assert some == rows_of(zoo, max_train=32)
    other = rows_of(zoo, max_train=32, subset_seed=1)
    assert set(other) != set(some)
    assert set(other) < set(rows_of(zoo)), "another subset of the same training part"
    assert set(rows_of(zoo, max_train=32, split_seed=1)) < set(rows_of(zoo, split_seed=1))


def test_the_other_parts_stay_whole(zoo):
    for part in ("val", "test"):
        assert rows_of(zoo, part, max_train=32) == rows_of(zoo, part)


def test_as_many_as_there_are_is_the_training_part_itself(zoo):
    assert rows_of(zoo, max_train=112) == rows_of(zoo, max_train=500) == rows_of(zoo)


def test_subsets_look_like_the_whole_where_the_first_rows_do_not(zoo):
    fraction = zoo.table["train_fraction"]
    rows = np.array(rows_of(zoo))
    whole = fraction[rows].mean()
    means = [fraction[nested_subset(rows, 32, seed)].mean() for seed in range(200)]
    # The standard error of a mean over 200 subsets of 32 is a tenth of this.
    assert np.mean(means) == pytest.approx(whole, abs=0.01)
    assert fraction[rows[:32]].mean() > whole + 0.05, "the zoo is ordered"
    assert abs(fraction[rows_of(zoo, max_train=32)].mean() - whole) < 0.05
    # Every network is drawn about as often as any other.
    drawn = np.concatenate([nested_subset(np.arange(20), 5, seed) for seed in range(2000)])
    assert np.bincount(drawn) == pytest.approx(np.full(20, 500), rel=0.2)


@pytest.mark.parametrize("size", [0, -3])
def test_a_subset_of_nothing_is_refused(zoo, size):
    with pytest.raises(RunError, match=f"at least 1 network, found {size}"):
        load_parts(zoo, max_train=size)
