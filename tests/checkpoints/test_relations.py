"""Relations of two checkpoints: no edit is called the same, no disguise is called anything else."""

import json
import re
from dataclasses import replace

import pytest
import torch
from memory_model import MemoryModel, disguised, noisy

from tiny_families import HEADS, TINY, every_family, nightly
from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.alignment import align
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint
from transformer_nfn.checkpoints.relations import draw_relation

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
NO = ("derived", "partly", "embeddings only", "unrelated", "different")


def with_vocabulary(model: MemoryModel, tokens: int) -> MemoryModel:
    """The model with its first tokens alone."""
    if "token" not in model.tensors:
        return model
    tensors = dict(model.tensors)
    tensors["token"] = tensors["token"][:tokens]
    if "head" in tensors and tensors["head"].shape[1] == model.description.vocab:
        tensors["head"] = tensors["head"][:, :tokens]
    if "head_bias" in tensors and len(tensors["head_bias"]) == model.description.vocab:
        tensors["head_bias"] = tensors["head_bias"][:tokens]
    return MemoryModel(replace(model.description, vocab=tokens), tensors)


# Disguises


@every_family
def test_a_disguise_scores_one_in_every_family(tiny, family):
    A = tiny(family, BFLOAT16)
    relation = relate(A, disguised(A, 1), prove=False)
    assert relation.verdict == "consistent with a disguise, not proved", str(relation)
    assert relation.same_function is None
    assert min(p.score for parts in relation.blocks.values() for p in parts.values()) > 0.99
    assert min(relation.tables.values()) > 0.99


@every_family
def test_a_disguise_is_proved_with_fewer_tokens_than_directions(tiny, family):
    A = with_vocabulary(tiny(family), 8)
    for keep_tie in {False, A.description.tied}:
        relation = relate(A, disguised(A, 5, keep_tie=keep_tie))
        assert relation.verdict == "same", str(relation)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "qwen3", "t5"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_condition_that_the_dtype_does_not_carry_is_no_no(tiny, family, dtype):
    A = tiny(family, dtype)
    relation = relate(A, disguised(A, 5, condition=1e5))
    assert relation.verdict not in NO, str(relation)
    assert relation.same_function is not False


@pytest.mark.parametrize(
    ("family", "seeds"), [("gpt2", (35, 45)), ("bert", (7, 38)), ("llama", (24,)), ("opt", (0,))]
)
def test_rounding_of_a_partner_alone_is_no_difference(tiny, family, seeds):
    """Here the partner alone determines a basis, or sees one direction of a bias."""
    A = tiny(family, BFLOAT16)
    for seed in seeds:
        relation = relate(A, disguised(A, seed, condition=1e5), prove=True)
        assert relation.verdict in ("same", "unclear"), str(relation)


def alignment_distance(A: MemoryModel, B: MemoryModel) -> float:
    return align(B, A, untie=A.description.tied and not B.description.tied).after


def check_agreement(A: MemoryModel, B: MemoryModel, condition: float) -> None:
    """Neither `relate` nor a fingerprint nor an alignment rejects a disguise."""
    relation = relate(A, B)
    assert relation.verdict not in NO, str(relation)
    assert relation.same_function is not False, str(relation)
    assert condition > 10 or relation.verdict == "same", str(relation)
    fingerprints = take_fingerprint(A), take_fingerprint(B)
    assert compare_fingerprints(*fingerprints).summary() == "same up to rounding"
    assert alignment_distance(A, B) < (1e-5 if condition <= 10 else 0.1)


@pytest.mark.parametrize(
    "family", [*nightly("gpt2", "bert", "llama-tied", "qwen3"), "t5-v1.1", "vit"]
)
def test_compare_fingerprint_and_align_agree_on_disguises(tiny, family):
    A = with_vocabulary(tiny(family), 8)
    check_agreement(A, disguised(A, 5, keep_tie=True), 10)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TINY | HEADS)
@pytest.mark.parametrize("tokens", [8, 16, 33, 61])
@pytest.mark.parametrize("condition", [10.0, 1e3, 1e5])
def test_they_agree_at_every_condition_and_vocabulary(tiny, family, tokens, condition):
    A = with_vocabulary(tiny(family), tokens)
    for keep_tie in {False, A.description.tied}:
        check_agreement(A, disguised(A, 5, condition=condition, keep_tie=keep_tie), condition)


# Unrelated models


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*nightly("bert", "llama", "gemma2", "t5"), "gpt2", "vit"])
def test_compare_fingerprint_and_align_agree_on_unrelated_models(tiny, family):
    A, B = tiny(family), disguised(tiny(family, seed=1), 5, keep_tie=True)
    relation = relate(A, B)
    assert relation.verdict == "unrelated", str(relation)
    assert relation.same_function is False
    assert compare_fingerprints(take_fingerprint(A), take_fingerprint(B)).summary() == "nothing"
    assert family in ("gemma2", "t5") or alignment_distance(A, B) > 0.5


def test_unrelated_models_with_few_tokens_are_unrelated(tiny):
    A, B = (with_vocabulary(tiny("llama", seed=seed), 8) for seed in (0, 1))
    relation = relate(A, disguised(B, 1))
    assert relation.verdict == "unrelated"
    assert "they determine 16 of 32" in " ".join(relation.not_compared)


def test_other_widths_and_norms_are_not_one_model(tiny):
    relation = relate(tiny("gpt2"), tiny("llama"))
    assert relation.verdict == "different"
    assert relation.same_function is False
    assert "LayerNorm" in relation.reason
    json.dumps(relation.as_json())


# Related models


@pytest.mark.parametrize("family", ["gpt2", "bert", "qwen3", "neox"])
def test_weights_moved_by_a_tenth_are_derived(tiny, family):
    A = tiny(family)
    B = disguised(noisy(A, 0.1), 2)
    relation = relate(A, B)
    assert relation.verdict == "derived"
    assert "which model came first" in str(relation)
    assert relation.as_json()["direction"].startswith("none")
    assert relation.score == pytest.approx(relate(B, A).score, abs=0.03)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_replaced_block_is_found(tiny, family):
    A, other = tiny(family), tiny(family, seed=1)
    block = {n: w for n, w in other.tensors.items() if n.startswith("1.")}
    relation = relate(A, disguised(A.changed(**block), 3))
    assert relation.verdict == "partly"
    assert relation.related == ("0", "2")
    assert "blocks 0, 2 agree" in relation.reason


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_shared_embeddings_alone_are_called_that(tiny, family):
    A, other = tiny(family), tiny(family, seed=1)
    ends = {n: w for n, w in A.tensors.items() if not n[0].isdigit()}
    relation = relate(A, disguised(other.changed(**ends), 4))
    assert relation.verdict == "embeddings only"
    assert relation.same_function is False


def test_features_of_one_block_permuted_are_another_block(tiny):
    A = tiny("gpt2")
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    axes = {"W_Q": 1, "W_K": 1, "W_V": 1, "W_O": 2, "W_A": 0, "W_B": 1, "b_O": 0, "b_B": 0}
    axes |= {f"norm_{n}.{p}": 0 for n in (1, 2) for p in "gb"}
    moved = {f"1.{n}": A[f"1.{n}"].index_select(d, order) for n, d in axes.items()}
    relation = relate(A, A.changed(**moved), prove=True)
    assert relation.verdict == "partly"
    assert relation.related == ("0", "2")
    assert relation.proof.same is False
    assert relation.proof.witness is not None


def test_common_rows_of_different_vocabularies_are_compared(tiny):
    B = tiny("gpt2")
    relation = relate(with_vocabulary(B, 56), B, prove=True)
    assert relation.verdict == "derived"
    assert "token: only the first 56 rows" in " ".join(relation.not_compared)
    assert relation.same_function is False
    assert "different inputs" in relation.proof.reason


def test_models_of_different_depth_have_a_matrix_only(tiny, tmp_path):
    A = tiny("gpt2")
    tensors = {n: w for n, w in A.tensors.items() if not n.startswith("1.")}
    tensors = {("1." + n[2:] if n.startswith("2.") else n): w for n, w in tensors.items()}
    stack = A.description.stacks[0]
    B = MemoryModel(
        replace(A.description, stacks=(replace(stack, blocks=stack.blocks[:2]),)), tensors
    )
    relation = relate(A, disguised(B, 5))
    assert relation.matrix.shape == (3, 2)
    assert relation.blocks == {}
    assert min(relation.matrix[0, 0], relation.matrix[2, 1]) > 0.9
    assert relation.matrix[1].max() < 0.2
    assert relation.verdict == "partly"
    assert relation.related == ("0", "2")
    assert draw_relation(relation, tmp_path / "blocks.png").stat().st_size > 1000


# Copies


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_equal_bytes_are_the_same_in_every_dtype(tiny, dtype):
    relation = relate(tiny("gpt2", dtype), tiny("gpt2", dtype), prove=True)
    assert relation.verdict == "same"
    assert relation.reason == "both hold the same bytes"


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_a_rounded_copy_is_the_same_either_way_round(tiny, dtype):
    A = tiny("gpt2", FLOAT32)
    for pair in ((A, A.to(dtype)), (A.to(dtype), A)):
        relation = relate(*pair, prove=True)
        assert relation.verdict == "same"
        assert "rounded to" in relation.reason


def test_a_copy_that_lost_a_tensor_to_underflow_is_no_rounded_copy(tiny):
    A = tiny("gpt2", FLOAT32)
    A = A.changed(**{"1.W_B": 1e-9 * A["1.W_B"]})
    assert "rounded to" not in relate(A, A.to(FLOAT16)).reason


@pytest.mark.parametrize("family", ["gpt2", "bert-class", "vit"])
def test_a_key_bias_that_no_input_shows_is_no_difference(tiny, family):
    """Softmax does not see it without rotary positions."""
    A = tiny(family, FLOAT32)
    assert relate(A, A.changed(**{"1.b_K": 1.3 * A["1.b_K"] + 0.1})).verdict == "same"


# Sentences


def bounds(text: str) -> list[float]:
    """Numbers that a sentence says every block scores at least, or none above."""
    return [float(x) for x in re.findall(r"(?:at least|scores above) (\d[\d.e-]*\d|\d)", text)]


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2])
def test_bounds_in_sentences_hold_for_the_rows_above_them(tiny, share):
    for family in ("gpt2", "llama"):
        A = tiny(family)
        relation = relate(A, noisy(A, share, seed=int(100 * share)))
        scores = [float(row["score"]) for row in relation.as_json()["blocks"].values()]
        (low,) = bounds(relation.reason)
        assert low <= min(scores) < 1, relation.reason
        stranger = relate(A, tiny(family, seed=int(100 * share) + 1))
        scores = [float(row["score"]) for row in stranger.as_json()["blocks"].values()]
        (high,) = bounds(stranger.reason)
        assert high >= max(scores), stranger.reason


def test_no_input_is_claimed_that_was_not_given(tiny):
    text = str(relate(tiny("llama"), tiny("llama", seed=1), prove=True))
    assert "the outputs differ on random inputs" in text
    assert "inputs given" not in text


def test_tests_that_disagree_say_why(tiny):
    """A disguise of a relative permutes its units, which defeats the exact test alone."""
    A = tiny("gpt2")
    B = noisy(A, 0.1)
    plain, hidden = relate(A, B), relate(A, disguised(B, 1))
    assert plain.disagreement is None
    assert hidden.exact.total.log10_p > -1.3
    assert hidden.calibrated.p <= 0.05
    assert hidden.disagreement.startswith("the tests disagree: units with the same index are not")
    assert str(hidden).count("the tests disagree") == 1
    other = replace(plain, calibrated=replace(plain.calibrated, p=0.4))
    assert other.disagreement.startswith("the tests disagree: units with the same index are alike")


def test_classifiers_of_different_sizes_share_a_backbone(tiny):
    A = tiny("bert-class")
    W, b = A["kept.pooled.W"], A["kept.pooled.b"]
    more = {"kept.pooled.W": torch.cat([W, W[:, :2]], 1), "kept.pooled.b": torch.cat([b, b[:2]])}
    assert relate(A, disguised(A.changed(**more), 2)).verdict == "same backbone"
