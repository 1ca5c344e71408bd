"""Batches of networks: rows of weights, views of them by name, and what was computed of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.models import Batch, RowLayout
from transformer_nfn.models.batch import paper_layout
from transformer_nfn.spaces import attention_block

SPACE = attention_block(6, 2, 3, 2, 5)
SHAPES = {
    "embedding.W": (4, 6),
    **{f"blocks.{i}.{name}": shape for i in range(2) for name, shape in SPACE.shapes.items()},
    "classifier.W_1": (6, 6),
    "classifier.b_1": (6,),
}


def tensors(
    n: int, seed: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, *shape, generator=draw) for name, shape in shapes.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(
        torch.equal(w, expected[name]) for name, w in found.items()
    )


def test_tensors_come_back_by_name() -> None:
    named = tensors(5)
    batch = Batch.of(named)
    assert len(batch) == 5
    assert same(batch.views, named)
    assert same(batch.named, named)
    assert batch.layout.shapes == SHAPES
    assert batch.layout.width == batch.weights.shape[1] == sum(w[0].numel() for w in named.values())
    assert same(Batch.of_rows(batch.weights, batch.layout).views, named)


def test_a_network_may_have_a_single_number_and_a_batch_none() -> None:
    named = tensors(3, shapes={"scale": (), "W": (2, 3), "empty": (0, 4)})
    batch = Batch.of(named)
    assert batch.weights.shape == (3, 7)
    assert same(batch.views, named)
    none = Batch.of(tensors(0))
    assert (len(none), none.views["embedding.W"].shape) == (0, (0, 4, 6))


def test_parts_and_blocks_are_those_of_their_prefix() -> None:
    named = tensors(3)
    batch = Batch.of(named)
    assert same(batch.part("classifier"), {
        "W_1": named["classifier.W_1"], "b_1": named["classifier.b_1"]
    })  # fmt: skip
    assert batch.part("head") == {}
    for i, block in enumerate(batch.blocks(2)):
        SPACE.check(block)
        assert all(torch.equal(w[:, 0], named[f"blocks.{i}.{k}"]) for k, w in block.items())
    layout = batch.layout
    assert (layout.depth, layout.part("embedding"), layout.part("classifier")) == (2, 24, 42)
    assert layout.part("head") is None
    vector = torch.cat([named["classifier.W_1"].flatten(1), named["classifier.b_1"]], 1)
    assert torch.equal(batch.flat("classifier", 42), vector)


def test_views_are_the_rows_themselves() -> None:
    batch = Batch.of(tensors(6))
    before = batch.weights.clone()
    held = [
        batch.views["embedding.W"], batch.part("classifier")["b_1"], batch.blocks()[1]["W_A"],
        batch[2:4].views["blocks.0.W_Q"], *(part.weights for part in batch.chunks(4)),
    ]  # fmt: skip
    where = batch.weights.untyped_storage().data_ptr()
    assert all(w.untyped_storage().data_ptr() == where for w in held)
    batch.views["blocks.1.W_A"][3] = 7.0
    changed = (batch.weights != before).sum(1)
    assert changed.tolist() == [0, 0, 0, 30, 0, 0]
    assert bool((batch.blocks()[1]["W_A"][3] == 7).all())


@pytest.mark.parametrize(
    "rows",
    [
        slice(1, 4),
        torch.tensor([3, 0, 3]),
        torch.tensor([True, False, True, False, False]),
        torch.tensor([[0, 1, 4], [2, 2, 3]]),
    ],
    ids=["slice", "numbers", "mask", "two axes"],
)
def test_an_index_takes_networks_and_what_was_computed_of_them(rows: Tensor | slice) -> None:
    named, features, inputs = tensors(5), torch.randn(5, 3), {"x": torch.randn(5, 2, 2)}
    batch = Batch.of(named).plus("features", features).plus("input", inputs)[rows]
    assert same(batch.views, {name: w[rows] for name, w in named.items()})
    assert torch.equal(batch.computed["features"], features[rows])
    assert torch.equal(batch.computed["input"]["x"], inputs["x"][rows])


SMALL = {"W": (2, 3), "b": (3,)}
LARGE = {"W": (4, 3), "b": (3,), "c": (2, 2)}


def test_batches_of_several_sizes_are_joined() -> None:
    first, second, third = tensors(2, 0, SMALL), tensors(3, 1, LARGE), tensors(1, 2, SMALL)
    batch = Batch.join([Batch.of(each) for each in (first, second, third)])
    assert [layout.shapes for layout in batch.layouts] == [SMALL, LARGE]
    assert batch.size.tolist() == [0, 0, 1, 1, 1, 0]
    assert batch.weights.shape == (6, 19)
    assert not batch.weights[[0, 1, 5], 9:].any()
    expected = {0: {k: torch.cat([w, third[k]]) for k, w in first.items()}, 1: second}
    for number, (rows, alone) in enumerate(batch.by_size()):
        assert alone.layout is batch.layouts[number]
        assert rows.tolist() == [[0, 1, 5], [2, 3, 4]][number]
        assert alone.size.tolist() == [0] * 3
        assert same(alone.views, expected[number])
    few = batch[torch.tensor([4, 1, 2])]
    found = {
        alone.layout.width: (rows.tolist(), alone.views["W"]) for rows, alone in few.by_size()
    }
    assert {width: rows for width, (rows, _) in found.items()} == {9: [1], 19: [0, 2]}
    assert torch.equal(found[19][1], second["W"][[2, 0]])
    # A size that no network has is passed over, and the others keep their layouts.
    ((rows, alone),) = batch[2:5].by_size()
    assert (alone.layout.shapes, rows.tolist()) == (LARGE, [0, 1, 2])
    assert same(alone.views, second)


def test_a_batch_of_one_size_is_whole() -> None:
    named = tensors(3, 0, SMALL)
    ((rows, alone),) = Batch.of(named).by_size()
    assert (alone.layout.shapes, rows) == (SMALL, slice(None))
    assert same(alone.views, named)
    twice = Batch.join([Batch.of(named), Batch.of(named)])
    assert len(twice.layouts) == 1
    assert same(twice.views, {name: torch.cat([w, w]) for name, w in named.items()})


def test_what_both_batches_have_computed_is_joined() -> None:
    first, second = Batch.of(tensors(2)).plus("x", torch.ones(2, 3)), Batch.of(tensors(1))
    both = Batch.join([first.plus("y", torch.zeros(2)), second.plus("x", torch.zeros(1, 3))])
    assert list(both.computed) == ["x"]
    assert both.computed["x"].sum(1).tolist() == [3, 3, 0]


@pytest.mark.parametrize("count", [0, 1, 256, 600])
def test_functions_are_evaluated_some_networks_at_a_time(count: int) -> None:
    seen = []

    def norms(batch: Batch) -> Tensor:
        seen.append(len(batch))
        return torch.stack([batch.weights.square().sum(1), batch.views["b"][:, 0]])

    batch = Batch.of(tensors(count, shapes=SMALL))
    found = batch.in_chunks(norms)
    assert (sum(seen), max(seen) <= 256) == (count, True)
    assert torch.equal(found, norms(batch))
    assert [len(part) for part in batch.chunks(250)] == {
        0: [0], 1: [1], 256: [250, 6], 600: [250, 250, 100]
    }[count]  # fmt: skip


def test_what_changed_is_named() -> None:
    batch = Batch.of(tensors(3)).plus("features", torch.ones(3, 2))
    batch = batch.plus("input", {"x": torch.ones(3)})
    kept = batch.map(torch.clone)
    assert set(batch.named) == {*SHAPES, "features", "input.x"}
    changes: dict[str, Callable[[], Tensor]] = {
        "blocks.1.b_A": lambda: batch.views["blocks.1.b_A"],
        "features": lambda: batch.computed["features"],
        "input.x": lambda: batch.computed["input"]["x"],
    }
    for name, get in changes.items():
        assert batch.changed(kept) is None
        before = get()[-1].clone()
        get()[-1] += 1
        assert batch.changed(kept) == name
        get()[-1] = before
    several = Batch.join([Batch.of(tensors(1, shapes=each)) for each in (SMALL, LARGE)])
    kept = several.map(torch.clone)
    several.weights[1, 0] += 1
    assert several.changed(kept) == "weights"


def test_numbers_are_given_another_precision() -> None:
    batch = Batch.of(tensors(3)).plus("features", torch.ones(3)).plus("ids", torch.arange(3))
    wide = batch.to(torch.float64)
    assert {w.dtype for w in wide.views.values()} == {torch.float64}
    dtypes = [wide.computed[key].dtype for key in ("features", "ids")] + [wide.size.dtype]
    assert dtypes == [torch.float64, torch.int64, torch.int64]
    assert torch.equal(wide.weights.float(), batch.weights)
    assert batch.to("cpu").changed(batch) is None


def test_some_tensors_are_replaced() -> None:
    named, other = tensors(3), torch.zeros(3, 6)
    batch = Batch.of(named).plus("features", torch.ones(3))
    changed = batch.with_weights({"classifier.b_1": other})
    assert same(changed.views, {**named, "classifier.b_1": other})
    assert changed.computed == {}
    assert same(batch.views, named)


def test_weights_are_dropped_where_what_was_computed_is_enough() -> None:
    batch = Batch.of(tensors(3)).plus("x", torch.arange(3)).plus("y", torch.ones(3))
    few = batch.only("x")
    assert (len(few), few.weights.numel(), list(few.computed)) == (3, 0, ["x"])
    assert few[1:].computed["x"].tolist() == [1, 2]


REFUSED: dict[str, Callable[[], object]] = {
    "tensors with a batch axis in front": lambda: Batch.of({}),
    "a batch axis in front$": lambda: Batch.of({"W": torch.tensor(1.0)}),
    "one batch size, found 2, 3": lambda: Batch.of({"W": torch.ones(2, 4), "b": torch.ones(3)}),
    "networks of one size, found 2 sizes": lambda: (
        Batch.join([Batch.of({"W": torch.ones(1, n)}) for n in (2, 3)]).views
    ),
    "reads 3 blocks, found 2": lambda: Batch.of(tensors(2)).blocks(3),
    r"tensors named 'head\.…', found none": lambda: Batch.of(tensors(2)).flat("head", 3),
    "'classifier' must have 41 numbers .* found 42": lambda: Batch.of(tensors(2)).flat(
        "classifier", 41
    ),
    "'head.W'": lambda: Batch.of(tensors(2)).with_weights({"head.W": torch.ones(2, 3)}),
    "'classifier.b_1'": lambda: Batch.of(tensors(2)).with_weights(
        {"classifier.b_1": torch.ones(2, 7)}
    ),
    "task must be one of": lambda: paper_layout("cifar"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_batch_is_refused(words: str) -> None:
    with pytest.raises(SpaceError, match=words) as error:
        REFUSED[words]()
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("task", "patch", "classes"), [("mnist", 16, 10), ("ag_news", 0, 4)])
def test_networks_of_the_paper_have_its_sizes(task: str, patch: int, classes: int) -> None:
    D, F, heads = 32, 64, 2
    layout = paper_layout(task)
    block = 4 * heads * D * (D // heads) + 2 * D * F + F + D
    last = D * D + D + D * classes + classes
    first = (patch + 1) * D if patch else None
    assert (layout.part("embedding"), layout.part("classifier")) == (first, last)
    assert layout.width == 2 * block + last + (first or 0)
    assert layout.depth == 2


def test_sizes_differ_by_shapes_and_their_order() -> None:
    assert RowLayout({"a": (2,), "b": (3,)}).key == RowLayout({"a": (2,), "b": (3,)}).key
    others = [{"a": (2,), "b": (4,)}, {"b": (3,), "a": (2,)}, {"a": (2,), "c": (3,)}, {"a": (2,)}]
    keys = {RowLayout(each).key for each in ({"a": (2,), "b": (3,)}, *others)}
    assert len(keys) == 5
