"""Settings that weights do not show: what changes the function is never called the same."""

import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import pytest
import torch
from memory_model import MemoryModel, disguised
from test_edits import outputs_of
from weight_edits import CHANGED

from tiny_families import HEADS, QUICK, TINY
from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint
from transformer_nfn.functional.description import Activation, Pooling

OTHERS: dict[str, tuple[Any, ...]] = {
    "activation": get_args(Activation),
    "mlm": get_args(Activation),
    "pooler": ("tanh", *get_args(Activation)),
    "pooling": get_args(Pooling),
    "sinusoids": ("neighbours", "halves"),
}
"""Values to try of settings that are words."""
OPTIONAL = {"softcap": 0.5, "final_softcap": 0.5, "window": 2}
"""Values to try where a setting is None."""
UNTOUCHED = (
    "family", "tensors", "tied", "headless", "inputs", "vocab", "width", "final_norm",
)  # fmt: skip
"""What tensors show."""


def variations(what: Any) -> Iterator[tuple[str, Any]]:
    """A description with one setting changed, for every setting in it."""
    for field in fields(what):
        name, value = field.name, getattr(what, field.name)
        if name in UNTOUCHED:
            continue
        for words, other in _others(name, value):
            yield f"{name}{words}", replace(what, **{name: other})


def _others(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        yield from ((f".{words}", other) for words, other in variations(value))
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            for words, other in variations(part):
                yield f"[{i}].{words}", (*value[:i], other, *value[i + 1 :])
    elif isinstance(value, bool):
        yield f": {not value}", not value
    elif isinstance(value, float):
        for other in (1.3 * value, 1e3 * value):
            yield f": {other}", other
    elif isinstance(value, int):
        step = 2 if name == "rotary" else 1  # pairs
        for other in (value - step, value + step):
            yield f": {other}", other
    elif value is None and name in OPTIONAL:
        yield f": {OPTIONAL[name]}", OPTIONAL[name]
    elif isinstance(value, str) and name in OTHERS:
        for other in OTHERS[name]:
            yield f": {other}", other


def unseen_settings(family: str, model: MemoryModel, one_in: int = 1) -> list[str]:
    """Changed settings that change the outputs, and that a fingerprint or `relate` does not see."""
    before = outputs_of(family, model)(model.tensors)
    narrow, fingerprint, unseen = model.to(torch.float32), take_fingerprint(model), []
    for words, description in variations(model.description):
        if zlib.crc32(words.encode()) % one_in:
            continue
        other = MemoryModel(description, model.tensors)
        try:
            after = outputs_of(family, other)(model.tensors)
        except (RuntimeError, IndexError, ValueError, KeyError, ZeroDivisionError):
            continue  # the tensors do not fit it
        if after.shape != before.shape:
            continue
        if not (after - before).abs().max() > CHANGED * before.abs().max():
            continue
        relation = relate(narrow, other.to(torch.float32))
        if relation.same_function is not False and relation.verdict != "unclear":
            unseen.append(f"{words}: {relation.verdict}")
        if not compare_fingerprints(fingerprint, take_fingerprint(other)).changed:
            unseen.append(f"{words}: same fingerprint")
    return unseen


@pytest.mark.parametrize("family", QUICK)
def test_settings_are_seen(tiny, family):
    """One in forty; all in the nightly test."""
    assert unseen_settings(family, tiny(family, torch.float64), 40) == []


@pytest.mark.nightly
@pytest.mark.parametrize("family", TINY | HEADS)
def test_settings_of_every_family_are_seen(tiny, family):
    assert unseen_settings(family, tiny(family, torch.float64)) == []


@pytest.mark.parametrize(
    ("family", "change", "verdict"),
    [
        ("bert-base", {"pooler": "relu"}, "same backbone"),
        ("vit", {"pooling": "mean"}, "same backbone"),
        ("esm", {"mlm": "relu"}, "same backbone"),
        ("esm", {"dropped_token": 5}, "derived"),
        ("clip-text", {"end_token": 5}, "same backbone"),
        ("bart", {"start_token": 5}, "same backbone"),
    ],
)
def test_settings_outside_the_blocks(tiny, family, change, verdict):
    model = tiny(family)
    other = disguised(MemoryModel(replace(model.description, **change), model.tensors), 1)
    relation = relate(model, other)
    assert (relation.same_function, relation.verdict) == (False, verdict)
    comparison = compare_fingerprints(take_fingerprint(model), take_fingerprint(other))
    assert "settings" in comparison.changed


def test_the_scale_of_scores_is_a_factor_of_queries(tiny):
    """A scale that only one of the two has is a change; moved into the queries it is none."""
    model = tiny("gpt2")
    stack = model.description.stacks[0]
    first, *others = stack.blocks
    doubled = replace(first, attention=replace(first.attention, scale=2 * first.attention.scale))
    description = replace(
        model.description, stacks=(replace(stack, blocks=(doubled, *others)),)
    )
    assert "scale of block 0 is" in relate(model, MemoryModel(description, model.tensors)).reason
    halved = {n: model.tensors[n] / 2 for n in ("0.W_Q", "0.b_Q")}
    for tensors, same in ((model.tensors, False), (model.tensors | halved, True)):
        other = disguised(MemoryModel(description, tensors), 1)
        assert relate(model, other).same_function is same
        comparison = compare_fingerprints(take_fingerprint(model), take_fingerprint(other))
        assert (not comparison.changed) is same
