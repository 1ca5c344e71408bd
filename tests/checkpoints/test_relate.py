"""What two checkpoints are to each other, whatever disguise the second one wears."""

import json

import pytest
import torch
from memory_model import MemoryModel, disguised, noisy

from tiny_families import TINY
from transformer_nfn.checkpoints import relate
from transformer_nfn.checkpoints.relations import draw_relation

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def with_block(model, other, block):
    """A model with one block of another."""
    prefix = f"{block}."
    taken = {n: w for n, w in other.tensors.items() if n.startswith(prefix)}
    return model.changed(**taken)


@pytest.mark.parametrize("family", TINY)
def test_a_disguise_scores_one_in_every_family(tiny, family):
    A = tiny(family, BFLOAT16)
    relation = relate(A, disguised(A, 1), prove=False)
    assert relation.verdict == "consistent with a disguise, not proved", str(relation)
    assert relation.same_function is None
    assert min(p.score for parts in relation.blocks.values() for p in parts.values()) > 0.99
    assert min(relation.tables.values()) > 0.99


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "gemma2", "t5", "vit"])
def test_strangers_are_unrelated(tiny, family):
    relation = relate(tiny(family), disguised(tiny(family, seed=1), 1))
    assert relation.verdict == "unrelated", str(relation)
    assert relation.same_function is False


@pytest.mark.parametrize("family", ["gpt2", "bert", "qwen3", "neox"])
def test_weights_moved_by_a_tenth_are_derived(tiny, family):
    A = tiny(family)
    relation = relate(A, disguised(noisy(A, 0.1), 2))
    assert relation.verdict == "derived"
    assert "which of the two came first" in str(relation)
    assert relation.as_json()["direction"].startswith("none")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_replaced_block_is_found(tiny, family):
    A, other = tiny(family), tiny(family, seed=1)
    relation = relate(A, disguised(with_block(A, other, 1), 3))
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
    A = tiny("gpt2")
    more = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    B = A.changed(token=torch.cat([A["token"], more]))
    B = MemoryModel(B.about.__class__(**{**B.about.__dict__, "vocab": 66}), B.tensors)
    relation = relate(A, B, prove=True)
    assert relation.verdict == "derived"
    assert "token: only the first 61 rows" in " ".join(relation.not_compared)
    assert relation.same_function is False
    assert "different inputs" in relation.proof.reason


def test_models_of_different_depth_have_a_matrix_only(tiny, tmp_path):
    from dataclasses import replace

    A = tiny("gpt2")
    tensors = {n: w for n, w in A.tensors.items() if not n.startswith("1.")}
    tensors = {("1." + n[2:] if n.startswith("2.") else n): w for n, w in tensors.items()}
    stack = A.about.stacks[0]
    B = MemoryModel(replace(A.about, stacks=(replace(stack, blocks=stack.blocks[:2]),)), tensors)
    relation = relate(A, disguised(B, 5))
    assert relation.matrix.shape == (3, 2)
    assert relation.blocks == {}
    assert relation.matrix[0, 0] > 0.9
    assert relation.matrix[2, 1] > 0.9
    assert relation.matrix[1].max() < 0.2
    assert relation.verdict == "partly"
    assert relation.related == ("0", "2")
    assert draw_relation(relation, tmp_path / "blocks.png").stat().st_size > 1000


def test_other_widths_and_norms_are_not_one_model(tiny):
    relation = relate(tiny("gpt2"), tiny("llama"))
    assert relation.verdict == "unclear"
    assert relation.same_function is False
    assert "LayerNorm" in relation.reason
    json.dumps(relation.as_json())


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16, FLOAT32])
def test_equal_bytes_are_the_same_in_every_dtype(tiny, dtype):
    relation = relate(tiny("gpt2", dtype), tiny("gpt2", dtype), prove=True)
    assert relation.verdict == "same"
    assert relation.reason == "both hold the same bytes"


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_a_rounded_copy_is_the_same_either_way_round(tiny, dtype):
    A = tiny("gpt2", FLOAT32)
    B = A.changed(**{name: w.to(dtype) for name, w in A.tensors.items()})
    for pair in ((A, B), (B, A)):
        relation = relate(*pair, prove=True)
        assert relation.verdict == "same"
        assert "rounded to" in relation.reason


def test_a_copy_that_lost_a_tensor_to_underflow_is_no_rounded_copy(tiny):
    A = tiny("gpt2", FLOAT32)
    A = A.changed(**{"1.W_B": 1e-9 * A["1.W_B"]})
    B = A.changed(**{name: w.to(torch.float16) for name, w in A.tensors.items()})
    assert "rounded to" not in relate(A, B).reason


def test_scores_are_symmetric_up_to_what_probes_leave(tiny):
    A = tiny("gpt2")
    B = disguised(noisy(A, 0.3), 6)
    there, back = relate(A, B).score, relate(B, A).score
    assert there == pytest.approx(back, abs=0.03)
