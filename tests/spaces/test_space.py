"""A weight space is data: it prints, round-trips, derives its products, and explains misfits."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import ALL, SIX, draw
from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Axis, Shift, WeightSpace

BLOCK = SIX["attention_block"]


def test_the_papers_block_has_its_tensors_in_its_order():
    space = spaces.attention_block(d_model=32, heads=2, d_k=16, d_v=16, d_ff=64)
    assert list(space.tensors) == ["W_Q", "W_K", "W_V", "W_O", "W_A", "W_B", "b_A", "b_B"]
    assert space.shapes == {
        "W_Q": (2, 32, 16),
        "W_K": (2, 32, 16),
        "W_V": (2, 32, 16),
        "W_O": (2, 16, 32),
        "W_A": (32, 64),
        "W_B": (64, 32),
        "b_A": (64,),
        "b_B": (32,),
    }
    assert space.num_weights == 4 * 32 * 32 + 2 * 32 * 64 + 64 + 32


def test_products_are_derived_from_the_axes():
    assert [(p.name, p.axes) for p in BLOCK.products] == [
        ("W_Q·W_K", ("head", "input", "input")),
        ("W_V·W_O", ("head", "input", "feature")),
    ]
    biased = [p.name for p in SIX["biased_block"].products]
    assert biased == ["W_Q·W_K", "b_Q·W_K", "W_V·W_O"]
    grouped = SIX["grouped_query_block"].products[0]
    assert grouped.axes == ("group", "query", "input", "input")
    gated = SIX["swiglu_block"].products[-1]
    assert (gated.name, gated.axes) == ("W_U·W_D", ("neuron", "feature", "output"))


@pytest.mark.parametrize("space", ALL.values(), ids=ALL)
def test_round_trips_through_json(space):
    again = WeightSpace.from_json(space.to_json())
    assert again == space
    assert hash(again) == hash(space)
    assert again.products == space.products
    assert json.loads(space.to_json())["name"] == space.name


@pytest.mark.parametrize("space", ALL.values(), ids=ALL)
def test_prints_as_a_table_that_names_everything(space):
    text = str(space)
    for name, shape in space.shapes.items():
        line = next(row for row in text.splitlines() if row.startswith(name + " "))
        assert " × ".join(map(str, shape)) in line
    for axis in space.axes:
        assert axis in text


@given(st.integers(0, 4), st.integers(1, 3))
def test_randn_gives_batch_channels_axes(batch, channels):
    weights = BLOCK.randn(batch, channels, dtype=torch.float64)
    for name, shape in BLOCK.shapes.items():
        assert weights[name].shape == (batch, channels, *shape)
        assert weights[name].dtype == torch.float64
    BLOCK.check(weights)


def without(weights, name):
    return {k: w for k, w in weights.items() if k != name}


U = draw(BLOCK, batch=2)
MISFITS = {
    "missing tensor": (without(U, "W_Q"), "lack 'W_Q'"),
    "extra tensor": ({**U, "W_Z": U["W_Q"]}, "'W_Z', unknown to space 'attention_block'"),
    "wrong size": (
        {**U, "W_K": U["W_K"][..., :2]},
        r"'W_K' axis 'qk': expected 3, found 2 \(shape \[2, 1, 3, 8, 2\]",
    ),
    "wrong rank": (
        {**U, "W_A": U["W_A"][0]},
        r"'W_A' must have shape \[batch, channels, feature=8, neuron=10\], found \[1, 8, 10\]",
    ),
    "other batch": (
        {**U, "b_A": U["b_A"][:1]},
        "'b_A' axis 'batch': expected 2 as in 'W_Q', found 1",
    ),
    "mixed dtypes": ({**U, "b_B": U["b_B"].float()}, "mixed dtypes: 'b_B' is torch.float32"),
    "mixed devices": (
        {**U, "b_B": U["b_B"].to("meta")},
        "mixed devices: 'b_B' is meta, 'W_Q' is cpu",
    ),
    "integers": ({**U, "W_Q": U["W_Q"].long()}, "'W_Q' must hold floating point numbers"),
    "not a tensor": ({**U, "W_Q": [1.0]}, "'W_Q' must be a torch.Tensor, found list"),
    "not a dict": ([U], "weights must be a dict of tensors by name, found list"),
}


@pytest.mark.parametrize(("weights", "message"), MISFITS.values(), ids=MISFITS)
def test_check_explains_the_misfit(weights, message):
    with pytest.raises(SpaceError, match=message):
        BLOCK.check(weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_check_finds_values_that_are_not_finite(value):
    weights = draw(BLOCK, batch=2)
    weights["W_B"][1, 0, 3, 4] = value
    match = f"'W_B' holds 1 values.*first {value} at batch 1, channel 0, neuron 3, output 4"
    with pytest.raises(SpaceError, match=match):
        BLOCK.check(weights)
    BLOCK.check(weights, finite=False)


def test_a_decoder_of_parts_shares_one_stream():
    space = spaces.decoder_stack(2, 6, 2, 3, 4, 5, 7, d_in=5, d_out=3)
    assert space.tensors["0.W_Q"].words() == ["0.group", "0.query", "stream", "0.qk"]
    assert space.axes["1.qk"].form == "complex_halves"
    assert [s.tensor for s in space.shifts] == ["0.b_V", "1.b_V"]  # rotary positions keep b_K
    assert sum("stream" in spec.axes for spec in space.tensors.values()) == 25
    plain = spaces.attention_part("x", "y", heads=2, d_k=3, d_v=3, biases=True)
    assert [s.tensor for s in plain.shifts] == ["b_K", "b_V"]


BAD_SPACES = {
    "parts that disagree": (
        lambda: spaces.compose(
            "s", spaces.axis_part(Axis.free("x", 2)), spaces.axis_part(Axis.perm("x", 2))
        ),
        "two parts of 's' disagree about axis 'x'",
    ),
    "a part twice": (
        lambda: spaces.compose("s", *2 * [spaces.map_part("W", "x", "y")]),
        "two parts of 's' have a tensor 'W'",
    ),
    "unknown axis": (lambda: build({"W": "free q"}), "tensor 'W' carries unknown axis 'q'"),
    "dual of a perm": (lambda: build({"W": "head* free"}), "marks perm axis 'head' as dual"),
    "linear without parent": (lambda: build({"W": "free qk"}), "must carry 'head' once, found 0"),
    "linear twice": (lambda: build({"W": "head qk qk*"}), "carries axis 'qk' twice"),
    "orphan": (lambda: Axis("qk", 3, "linear"), "must say which perm axis it belongs to"),
    "free with parent": (lambda: Axis("x", 3, "free", of="head"), "cannot belong to another axis"),
    "no such parent": (
        lambda: WeightSpace.build("s", [Axis.linear("qk", 3, of="head")], {}),
        "belongs to 'head', which is not a perm axis",
    ),
    "size zero": (lambda: Axis.free("x", 0), "must have a positive size, found 0"),
    "odd complex": (
        lambda: Axis.linear("qk", 3, of="head", form="complex"),
        "even size, found kind linear and size 3",
    ),
    "two axes of one name": (
        lambda: WeightSpace.build("s", [Axis.free("x", 1), Axis.free("x", 2)], {}),
        "two axes named 'x'",
    ),
    "half a shift": (lambda: Shift("b", through="W"), "needs both"),
    "shift of nothing": (
        lambda: WeightSpace.build("s", [Axis.free("x", 1)], {"b": "x"}, shifts=[Shift("c")]),
        "names tensor 'c'",
    ),
    "not JSON": (lambda: WeightSpace.from_json("{"), "must be JSON"),
    "JSON of something else": (lambda: WeightSpace.from_json("[]"), "needs the keys"),
    "JSON of a newer format": (
        lambda: WeightSpace.from_json('{"format": 9, "axes": [], "tensors": {}}'),
        "format 9 is not known here",
    ),
    "JSON with a wrong key": (
        lambda: WeightSpace.from_json('{"axes": [{"nam": "x"}], "tensors": {}}'),
        "malformed",
    ),
    "empty stack": (lambda: spaces.stack(BLOCK, 0), "at least one block"),
    "stack of attention": (
        lambda: spaces.stack(spaces.multi_head(4, 2, 2, 2), 2),
        "no axes 'input' and 'output'",
    ),
}


def build(tensors):
    axes = [Axis.free("free", 2), Axis.perm("head", 2), Axis.linear("qk", 3, of="head")]
    return WeightSpace.build("s", axes, tensors)


@pytest.mark.parametrize(("make", "message"), BAD_SPACES.values(), ids=BAD_SPACES)
def test_a_space_that_contradicts_itself_is_refused(make, message):
    with pytest.raises(SpaceError, match=message):
        make()
