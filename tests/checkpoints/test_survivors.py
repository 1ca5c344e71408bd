"""Cut models are related to the model they were cut from, with the map of what is left."""

from dataclasses import replace

import pytest
import torch
from memory_model import MemoryModel, disguised, noisy

from transformer_nfn.checkpoints import diff, relate
from transformer_nfn.functional.description import axes_of

NEURONS, GROUP = (0, 3, 4, 7, 9, 15, 21, 22, 30, 38), 1
STREAM = tuple(range(0, 32, 3)) + tuple(range(1, 32, 3))


def cut(
    model: MemoryModel,
    neurons: tuple[int, ...] | None = None,
    groups: tuple[int, ...] | None = None,
    stream: tuple[int, ...] | None = None,
) -> MemoryModel:
    """The model with some neurons, groups of heads and coordinates of the stream alone."""
    (stack,) = model.description.stacks
    share = stack.blocks[0].attention.heads // stack.blocks[0].attention.groups
    heads = None if groups is None else tuple(g * share + i for g in groups for i in range(share))
    kept = {"neuron": neurons, "group": groups, "head": heads, "D": stream}
    tensors = {}
    for name, w in model.tensors.items():
        for dim, axis in enumerate(axes_of(name)):
            if kept.get(axis) is not None:
                w = w.index_select(dim, torch.tensor(kept[axis]))
        tensors[name] = w
    blocks = []
    for block in stack.blocks:
        if neurons is not None:
            block = replace(block, mlp=replace(block.mlp, neurons=len(neurons)))
        if heads is not None and groups is not None:
            fewer = replace(block.attention, heads=len(heads), groups=len(groups))
            block = replace(block, attention=fewer)
        blocks.append(block)
    description = replace(
        model.description,
        stacks=(replace(stack, blocks=tuple(blocks)),),
        width=model.description.width if stream is None else len(stream),
    )
    return MemoryModel(description, tensors)


@pytest.mark.parametrize("stream", [None, STREAM])
def test_surviving_units_are_named(tiny, stream):
    A = tiny("llama")
    B = noisy(cut(A, NEURONS, (GROUP,), stream), 0.02)
    relation = relate(A, B)
    assert (relation.verdict, relation.same_function) == ("derived", False), str(relation)
    for units in relation.units:
        assert units.source == units.block
        assert units.heads[""] == (4, (2, 3))
        assert units.neurons == (40, NEURONS)
    hidden = disguised(B, 4)
    relation = relate(A, hidden)
    assert relation.verdict == "derived", str(relation)
    for units in relation.units:
        assert sorted(units.heads[""][1]) == [2, 3]
        assert tuple(sorted(units.neurons[1])) == NEURONS
    assert "block 1 is block 1 of A: 2 of 4 heads, 10 of 40 neurons" in str(relation)
    stored = relation.as_json()["units"]["1"]
    assert stored["source"] == "1"
    assert len(stored["neurons"]) == 10


def test_the_wider_model_may_come_second(tiny):
    A = tiny("llama")
    relation = relate(disguised(cut(A, NEURONS, None, STREAM), 4), A)
    assert relation.verdict == "derived"
    known = [n for n in relation.units[0].neurons[1] if n is not None]
    assert sorted(known) == list(range(10))
    assert "30 neurons are new" in str(relation)


def test_a_stranger_of_another_width_stays_one(tiny):
    A = tiny("llama")
    stranger = cut(tiny("llama", seed=1), NEURONS, None, STREAM)
    relation = relate(A, stranger)
    assert relation.verdict == "unrelated", str(relation)
    assert relation.units == ()


def test_models_of_one_shape_have_no_map(tiny):
    A = tiny("llama")
    assert relate(A, noisy(A, 0.02)).units == ()


def test_what_is_left_of_a_cut_model_is_compared(tiny):
    A = tiny("llama")
    W_Q = A.tensors["1.W_Q"]
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(32, 1, generator=generator), torch.randn(4, 1, 8, generator=generator)
    B = disguised(cut(A.changed(**{"1.W_Q": W_Q + 0.05 * left @ right}), NEURONS, (GROUP,)), 4)
    found = diff(A, B)
    assert {c.name: c.rank for c in found.changes if c.kind != "unchanged"} == {"1.W_Q": 1}
    assert "Every block of B has 2 of 4 heads, 10 of 40 neurons of A." in found.summary()
    narrow = diff(A, cut(A, stream=STREAM))
    assert narrow.summary()[-1].startswith("Tensors are not compared")


def upcycled(model: MemoryModel, experts: int) -> MemoryModel:
    """A mixture that starts from copies of each MLP, with a random router."""
    (stack,) = model.description.stacks
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, w in model.tensors.items():
        block, _, tensor = name.partition(".")
        if tensor in ("W_G", "W_A", "W_B"):
            tensors |= {f"{block}.expert.{e}.{tensor}": w.clone() for e in range(experts)}
        else:
            tensors[name] = w
    for i in range(len(stack.blocks)):
        tensors[f"{i}.router"] = torch.randn(32, experts, generator=generator)
    blocks = tuple(
        replace(b, mlp=replace(b.mlp, experts=experts, active=2, normalised=True))
        for b in stack.blocks
    )
    return MemoryModel(
        replace(model.description, stacks=(replace(stack, blocks=blocks),)), tensors
    )


def test_an_upcycled_mixture_is_related_to_its_dense_parent(tiny):
    A = tiny("llama")
    B = disguised(noisy(upcycled(A, 3), 0.05), 2)
    relation = relate(A, B)
    assert relation.verdict == "derived", str(relation)
    for units in relation.units:
        assert len(units.neurons[1]) == 3 * 40
        for expert in range(3):
            assert sorted(units.neurons[1][expert * 40 : (expert + 1) * 40]) == list(range(40))
    assert "block 0 is block 0 of A: 4 of 4 heads, 40 of 40 neurons" in str(relation)
    assert not [c for c in diff(A, B).changes if c.kind in ("replaced", "unchanged")]
