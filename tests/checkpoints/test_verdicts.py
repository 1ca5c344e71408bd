"""Verdicts that hold: no edit is called the same, no disguise is called anything else."""

import zlib
from dataclasses import replace

import pytest
import torch
from memory_model import MemoryModel, disguised

from tiny_families import TINY
from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.alignment import Alignment
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint

NO = ("derived", "partly", "embeddings only", "unrelated")


def with_vocabulary(model: MemoryModel, tokens: int) -> MemoryModel:
    """A model with the first tokens only."""
    vocab = model.about.vocab
    tensors = dict(model.tensors)
    tensors["token"] = tensors["token"][:tokens]
    if "head" in tensors and tensors["head"].shape[1] == vocab:
        tensors["head"] = tensors["head"][:, :tokens]
    if "head_bias" in tensors and len(tensors["head_bias"]) == vocab:
        tensors["head_bias"] = tensors["head_bias"][:tokens]
    return MemoryModel(replace(model.about, vocab=tokens), tensors)


@pytest.mark.parametrize("family", [name for name, t in TINY.items() if t.inputs != "pixels"])
def test_a_disguise_is_proved_with_fewer_tokens_than_directions(tiny, family):
    A = with_vocabulary(tiny(family), 8)
    for keep_tie in {False, A.about.tied}:
        relation = relate(A, disguised(A, 5, keep_tie=keep_tie))
        assert relation.verdict == "same", str(relation)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "qwen3", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_condition_that_the_dtype_does_not_carry_is_no_no(tiny, family, dtype):
    A = tiny(family, dtype)
    relation = relate(A, disguised(A, 5, condition=1e5))
    assert relation.verdict not in NO, str(relation)
    assert relation.same_function is not False


def check_agreement(A: MemoryModel, B: MemoryModel, condition: float) -> None:
    """Of a disguise neither `relate` nor a fingerprint nor an alignment says no."""
    relation = relate(A, B)
    assert relation.verdict not in NO, str(relation)
    assert condition > 10 or relation.verdict == "same", str(relation)
    fingerprints = take_fingerprint(A), take_fingerprint(B)
    assert compare_fingerprints(*fingerprints).summary() == "same up to rounding"
    alignment = Alignment(B, A, untie=A.about.tied and not B.about.tied)
    for _ in alignment:
        pass
    assert alignment.distances[1] < (1e-5 if condition <= 10 else 0.1)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama-tied", "qwen3", "t5-v1.1", "vit"])
def test_compare_fingerprint_and_align_agree_on_disguises(tiny, family):
    A = tiny(family)
    A = A if A.about.vocab is None else with_vocabulary(A, 8)
    check_agreement(A, disguised(A, 5, keep_tie=True), 10)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("tokens", [8, 16, 33, 61])
@pytest.mark.parametrize("condition", [10.0, 1e3, 1e5])
def test_they_agree_at_every_condition_and_vocabulary(tiny, family, tokens, condition):
    A = tiny(family)
    A = A if A.about.vocab is None else with_vocabulary(A, tokens)
    for keep_tie in {False, A.about.tied}:
        check_agreement(A, disguised(A, 5, condition=condition, keep_tie=keep_tie), condition)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "vit"])
def test_they_agree_on_strangers(tiny, family):
    A, B = tiny(family), disguised(tiny(family, seed=1), 5, keep_tie=True)
    assert relate(A, B).verdict == "unrelated"
    assert compare_fingerprints(take_fingerprint(A), take_fingerprint(B)).summary() == "nothing"
    alignment = Alignment(B, A)
    for _ in alignment:
        pass
    assert alignment.distances[1] > 0.5


def test_strangers_with_few_tokens_are_unrelated(tiny):
    A, B = (with_vocabulary(tiny("llama", seed=seed), 8) for seed in (0, 1))
    relation = relate(A, disguised(B, 1))
    assert relation.verdict == "unrelated"
    assert "they determine 16 of 32" in " ".join(relation.not_compared)


def edits(tensor: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """A tensor edited in four ways."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    negated = tensor.clone()
    negated[len(tensor) // 2] *= -1
    wide = tensor.double()
    return {
        "times 1.3": wide * 1.3,
        "one row negated": negated,
        "1 % noise": wide * (1 + 0.01 * noise),
        "replaced": noise * wide.std(),
    }


# What no input can show: softmax does not see a key bias without rotary positions.
FREE = {"gpt2": (".b_K",), "bert-class": (".b_K",), "vit": (".b_K",), "llama": ()}


def edited_models(tiny, family, dtype):
    A = tiny(family, dtype)
    for i, (name, tensor) in enumerate(A.tensors.items()):
        for way, edited in edits(tensor, i).items():
            B = A.changed(**{name: edited.to(dtype)})
            if not torch.equal(B.tensors[name], tensor):
                yield A, B, name, way


def check_edit(A, B, name, way, family):
    """An edit is never called the same, unless it is one that no input can show."""
    relation = relate(A, B)
    if name.endswith(FREE[family]):
        assert relation.verdict == "same", (name, way, str(relation))
        return
    assert relation.verdict not in ("same", "unclear"), (name, way, str(relation))
    assert relation.same_function is False, (name, way, str(relation))


@pytest.mark.parametrize("family", FREE)
def test_an_edit_of_any_tensor_alone_is_seen(tiny, family):
    """An eighth of all edits; the nightly test has all of them."""
    for A, B, name, way in edited_models(tiny, family, torch.float32):
        if zlib.crc32(f"{name} {way}".encode()) % 8 == 0:
            check_edit(A, B, name, way, family)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FREE)
@pytest.mark.parametrize("hidden", [False, True])
def test_no_edit_of_any_tensor_in_any_way_is_called_the_same(tiny, family, hidden):
    for A, B, name, way in edited_models(tiny, family, torch.float32):
        check_edit(A, disguised(B, 3) if hidden else B, name, way, family)
