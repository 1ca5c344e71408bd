"""A mixed zoo as data: one data set for each kind, split by run, with kinds left out."""

import pytest
import torch

from transformer_nfn.prediction.dataset import load_parts
from transformer_nfn.prediction.kinds import describe_mixed, load_kinds
from transformer_nfn.prediction.records import RunError
from transformer_nfn.zoo import BuildOptions, SizeGroup, ZooError, build_mixed

SMALL, WIDE = "w16-h4-d1", "w20-h2-d1"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    settings = BuildOptions("digits", runs=50, epochs=4, batch=32, samples=128, workers=1)
    kinds = [SizeGroup.from_name(SMALL), SizeGroup.from_name(WIDE)]
    return build_mixed(tmp_path_factory.mktemp("kinds") / "m", settings, kinds)


def test_every_kind_is_split_as_its_zoo_alone_would_be(mixed):
    kinds = load_kinds(mixed)
    assert kinds.names == (SMALL, WIDE)
    for i, name in enumerate(kinds.names):
        alone = load_parts(mixed[name])
        for part in ("train", "val", "test"):
            ours, theirs = getattr(kinds, part)[i], getattr(alone, part)
            assert ours.columns["row"].tolist() == theirs.columns["row"].tolist()
            assert torch.equal(ours.accuracy, theirs.accuracy)
        runs = [set(sets[i].columns["run"]) for sets in (kinds.train, kinds.val, kinds.test)]
        assert len(set.union(*runs)) == sum(map(len, runs))
    assert kinds.train[0].block_space == mixed[SMALL].block_space
    assert kinds.train[1].network["blocks"][0]["W_Q"].shape[1:] == (1, 2, 20, 10)


def test_a_kind_left_out_is_tested_on_whole(mixed):
    kinds = load_kinds(mixed, leave_out=WIDE)
    assert kinds.names == (SMALL,)
    assert list(kinds.left_out) == [WIDE]
    rows = mixed[WIDE].select(percent=75)
    assert kinds.left_out[WIDE].columns["row"].tolist() == rows.tolist()
    assert kinds.counts[WIDE] == {"left out": len(rows)}
    assert sum(kinds.counts[SMALL].values()) == len(mixed[SMALL].select(percent=75))


def test_other_checkpoints_of_the_training_runs_come_along(mixed):
    kinds = load_kinds(mixed, all_checkpoints=True)
    for i, name in enumerate(kinds.names):
        alone = load_parts(mixed[name], all_checkpoints=True).more
        assert kinds.more[i].columns["row"].tolist() == alone.columns["row"].tolist()
    assert load_kinds(mixed).more == []


def test_fewer_networks_of_each_kind(mixed):
    kinds = load_kinds(mixed, max_train=5)
    assert [len(data) for data in kinds.train] == [5, 5]
    assert len(load_kinds(mixed, percent=None).train[0]) > 3 * 5


def test_what_cannot_be_loaded_is_refused(mixed):
    with pytest.raises(ZooError, match="no networks of the kind 'w9-h3-d1'"):
        load_kinds(mixed, leave_out="w9-h3-d1")
    with pytest.raises(RunError, match="no kind left to train on: 2 are left out"):
        load_kinds(mixed, leave_out=[SMALL, WIDE])
    with pytest.raises(RunError, match=f"{SMALL}: not enough networks"):
        load_kinds(mixed, min_accuracy=0.99)


def test_a_record_knows_the_architectures(mixed):
    about = describe_mixed(mixed)
    assert (about["runs"], about["seeds"], about["task"]) == (50, "each", "digits")
    assert about["architectures"][WIDE]["d_ff"] == 40
