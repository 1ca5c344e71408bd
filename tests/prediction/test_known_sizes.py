"""Sizes that a predictor has not learned from: what is said of them, and how much wider is it?"""

from dataclasses import replace

import pytest
import torch
from made_kinds import DEEP, SIZES, WIDE, kinds

from transformer_nfn.models import WholeNetwork
from transformer_nfn.prediction.known_sizes import COMBINATION, FAR, UNKNOWN, KnownSizes
from transformer_nfn.prediction.widening import MARGIN, measure_widening
from transformer_nfn.zoo import NetworkSizes, SizeGroup, size_groups

TASK = NetworkSizes(tokens=16, classes=10, patch=4)
GRID = tuple(TASK.resized(kind) for kind in size_groups([16, 32], [2, 4], [1, 2]))
MEASURED = {COMBINATION: 1.2, "d_model": 1.5, "d_ff": 1.5, "heads": 1.3, "blocks": 2.0}


def sizes(width, heads, depth, **others):
    return replace(TASK.resized(SizeGroup(width, heads, depth)), **others)


def test_sizes_that_were_seen_are_as_ever():
    known = KnownSizes(GRID, 0.1, MEASURED)
    for kind in GRID:
        assert known.factor(kind) == 1
        assert known.reach(kind) == 0.1
        assert known.warning(kind) is None


@pytest.mark.parametrize(
    ("asked", "factor", "words"),
    [
        (sizes(48, 4, 2), 1.5, "networks of width 48 were"),
        (sizes(32, 8, 1), 1.3, "networks of 8 heads were"),
        (sizes(32, 4, 4), 2.0, "networks of 4 blocks were"),
        (sizes(32, 1, 2), 1.3, "networks of 1 head were"),
        (sizes(48, 4, 3), 3.0, "networks of width 48 and 3 blocks were"),
        (sizes(32, 4, 2, d_ff=100), 1.5, "networks of 100 neurons were"),
    ],
)
def test_a_size_never_seen_is_named_and_its_interval_widened_as_measured(asked, factor, words):
    known = KnownSizes(GRID, 0.1, MEASURED)
    assert known.factor(asked) == pytest.approx(factor)
    assert known.reach(asked) == pytest.approx(0.1 * factor)
    said = known.warning(asked)
    assert said.startswith(words)
    assert f"the interval is {factor:.1f} times as wide, as measured" in said


def test_sizes_that_were_seen_but_never_together():
    known = KnownSizes(GRID[:-1], 0.1, MEASURED)
    assert known.factor(GRID[-1]) == 1.2
    assert "networks of width 32, 4 heads and 2 blocks were never seen" in known.warning(GRID[-1])


def test_of_one_kind_and_far_away_nothing_is_known_and_that_is_said():
    alone = KnownSizes(GRID[:1], 0.1, {})
    for asked in (sizes(32, 2, 1), sizes(48, 4, 3)):
        assert alone.factor(asked) == UNKNOWN
        assert "was not measured" in alone.warning(asked)
        assert f"{UNKNOWN:.1f} times as wide, a rule of thumb" in alone.warning(asked)
    known = KnownSizes(GRID, 0.1, MEASURED)
    assert known.factor(sizes(int(32 * FAR), 4, 2)) == 1.5
    assert known.factor(sizes(int(32 * FAR) + 2, 2, 2)) == UNKNOWN
    assert KnownSizes(GRID, 0.6, MEASURED).reach(sizes(128, 4, 2)) == 1.0


class Read:
    """Reads what `of` says of networks."""

    def __init__(self, of):
        self.features = of


def columns(network):
    """A number that decides the accuracy of made networks of any size, and their depth."""
    scale = torch.stack([w.flatten(1).std(1) for w in network["classifier"].values()]).mean(0)
    depth = torch.full_like(scale, float(len(network["blocks"])))
    return torch.stack([scale, depth], 1)


def test_error_on_sizes_left_out_is_measured():
    data = kinds()
    fair = measure_widening(Read(columns), data, SIZES)
    assert set(fair) == {COMBINATION, "d_model", "d_ff", "heads", "blocks"}
    assert all(1 <= factor < 4 for factor in fair.values())
    lower = {
        name: [
            replace(part, accuracy=part.accuracy - 0.4 * (len(part.network["blocks"]) == 3))
            for part in getattr(data, name)
        ]
        for name in ("train", "val", "test")
    }
    unlike = measure_widening(Read(columns), replace(data, **lower), SIZES)
    assert unlike["blocks"] > 1.5 * fair["blocks"]


def test_widening_is_the_ratio_of_two_quantiles():
    """By hand, where the regression can say nothing but the mean of what it learned from."""
    blind = Read(lambda network: torch.zeros(len(network["classifier"]["b_1"]), 2))
    data = kinds()
    even = {
        name: [
            replace(part, accuracy=torch.full_like(part.accuracy, value))
            for part, value in zip(getattr(data, name), (0.3, 0.5), strict=True)
        ]
        for name in ("train", "val", "test")
    }
    # Left out at random, 64 networks of 0.3 and 44 of 0.5 are told about 0.3815; left out by kind,
    # they are told the accuracy of the others.
    found = measure_widening(blind, replace(data, **even), SIZES)
    assert found[COMBINATION] == pytest.approx(MARGIN * 0.2 / 0.119, rel=0.1)


def test_one_kind_tells_nothing_of_others():
    assert measure_widening(Read(columns), kinds(left_out=(DEEP,)), SIZES) == {}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, None),
        ({"d_model": 64, "heads": 4, "blocks": 7, "d_ff": 12}, None),
        ({"patch": 16}, "expected 4 pixels in a patch, found 16"),
        ({"classes": 4}, "expected 10 classes, found 4"),
        ({"tokens": 49}, "expected 16 tokens, found 49"),
        ({"patch": 0}, "expected networks that read images, found some that read word vectors"),
    ],
)
def test_the_model_of_whole_networks_says_what_it_cannot_read(found, said):
    module = WholeNetwork(TASK.block_space, tokens=16, width=4, classes=10, probes=2, rank=2)
    assert module.misfit(replace(TASK, **found), TASK) == said


def test_networks_that_read_word_vectors_have_the_width_of_these():
    text = NetworkSizes(tokens=20, classes=4, patch=0)
    module = WholeNetwork(
        text.block_space, tokens=20, width=32, classes=4, images=False, probes=2, rank=2
    )
    assert module.misfit(replace(text, blocks=5, heads=4), text) is None
    wider = replace(text, d_model=48)
    assert module.misfit(wider, text) == "expected word vectors of width 32, found 48"


def test_names_of_made_kinds_are_their_sizes():
    assert SIZES[WIDE].d_model != SIZES[DEEP].d_model
    groups = {name: sizes.group for name, sizes in SIZES.items()}
    assert {name: SizeGroup.from_name(name) for name in SIZES} == groups
