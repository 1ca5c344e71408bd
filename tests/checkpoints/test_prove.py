"""Proof that two checkpoints are one function or are not; never a wrong one."""

import math

import pytest
import torch
from memory_model import MemoryModel, disguised, noisy

from tiny_families import TINY, every_family
from transformer_nfn.checkpoints import relate

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@every_family
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_disguise_is_proved_the_same(tiny, family, dtype):
    A = tiny(family, dtype)
    proof = relate(A, disguised(A, 7), prove=True).proof
    assert proof.same is True, proof.lines()
    assert proof.element is not None
    named = {check.name for check in proof.checks}
    gains = {n for n in A.names if n.endswith(("norm_1.g", "norm_2.g", "norm.g", "norm_x.g"))}
    matrices = {n for n in A.names if ".W_" in n and n not in gains}
    assert matrices <= named
    assert all(c.excess <= proof.tolerance.same for c in proof.checks)


def test_experts_that_are_copies_are_told_apart_by_their_router(tiny):
    A = tiny("mixtral")
    copies = {
        f"{i}.expert.{e}.{name}": A[f"{i}.expert.0.{name}"]
        for i in range(3) for e in range(5) for name in ("W_A", "W_G", "W_B")
    }  # fmt: skip
    upcycled = MemoryModel(A.description, A.tensors | copies)
    relation = relate(upcycled, disguised(upcycled, 3), prove=True)
    assert relation.verdict == "same", str(relation)
    tuned = noisy(upcycled, 0.01, {"1.router"})
    assert relate(upcycled, disguised(tuned, 3), prove=True).same_function is False


def test_two_disguises_of_a_third_are_the_same(tiny):
    A = tiny("llama", BFLOAT16)
    assert relate(disguised(A, 1), disguised(A, 2), prove=True).same_function is True


@pytest.mark.parametrize("dtype", [pytest.param(FLOAT32, marks=pytest.mark.nightly), BFLOAT16])
@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("gpt2", "0.W_Q"), ("gpt2", "1.W_K"), ("gpt2", "2.W_O"), ("gpt2", "1.W_B"),
        ("bert", "1.W_V"), ("bert", "token"), ("llama", "2.W_G"), ("llama", "0.W_A"),
        ("gemma2", "1.W_Q"), ("neox", "1.W_A"), ("t5", "decoder.1.cross.W_O"), ("vit", "patch"),
        ("mixtral", "1.router"), ("qwen3-moe", "0.expert.4.W_B"), ("olmoe", "1.W_K"),
        ("bart", "decoder.1.cross.W_V"), ("bart", "encoder.position"),
    ],
)  # fmt: skip
def test_one_matrix_changed_by_a_hundredth_is_named(tiny, dtype, family, tensor):
    A = tiny(family, dtype)
    relation = relate(A, disguised(noisy(A, 0.01, {tensor}), 3), prove=True)
    assert relation.same_function is False
    assert tensor in relation.proof.named
    assert relation.verdict != "same"


def test_the_mean_of_embeddings_is_seen_where_a_block_reads_them_without_a_norm(tiny):
    A = tiny("opt-post-norm", FLOAT32)
    means = torch.linspace(-1, 1, len(A["position"]))[:, None]
    B = A.changed(position=A["position"] + means)
    assert relate(A, B, prove=True).same_function is False
    A = tiny("opt", FLOAT32)
    B = A.changed(position=A["position"] + means)
    assert relate(A, B, prove=True).same_function is True


@pytest.mark.parametrize("tensor", ["0.W_Q", "1.W_V", "2.W_A"])
def test_a_factor_that_a_re_basing_could_hide_is_found(tiny, tensor):
    A = tiny("llama", BFLOAT16)
    B = disguised(A.changed(**{tensor: A[tensor] * 1.01}), 3)
    proof = relate(A, B, prove=True).proof
    assert proof.same is False
    assert any(tensor in name for name in proof.named)


def test_one_neuron_changed_is_named(tiny):
    A = tiny("gpt2", BFLOAT16)
    W = A["1.W_B"]
    W[5] *= 1.05
    proof = relate(A, disguised(A.changed(**{"1.W_B": W}), 3), prove=True).proof
    assert proof.same is False
    assert proof.named == ("1.W_B",)


def test_strangers_have_token_ids_that_tell_them_apart(tiny):
    proof = relate(tiny("llama"), tiny("llama", seed=1), prove=True).proof
    assert proof.same is False
    assert proof.witness.difference > 32 * proof.witness.noise
    assert proof.witness.inputs.dtype == torch.long
    assert proof.as_json()["witness"]["inputs"] == proof.witness.inputs.tolist()


def test_queries_moved_to_another_group_are_another_function(tiny):
    A = tiny("llama")
    W_Q, W_O = A["1.W_Q"], A["1.W_O"]
    order = torch.tensor([2, 1, 0, 3])  # query 0 goes to the group of query 2
    B = A.changed(**{"1.W_Q": W_Q[order], "1.W_O": W_O[order]})
    assert relate(A, disguised(B, 1), prove=True).same_function is False


def test_what_a_dead_head_writes_is_not_called_different(tiny):
    A = tiny("gpt2", BFLOAT16)
    W_V, b_V, W_O = A["1.W_V"], A["1.b_V"], A["1.W_O"]
    W_V[2], b_V[2] = 0, 0
    A = A.changed(**{"1.W_V": W_V, "1.b_V": b_V})
    noise = torch.randn(W_O[2].shape, generator=torch.Generator().manual_seed(0))
    W_O[2] *= 1 + 0.05 * noise
    proof = relate(A, A.changed(**{"1.W_O": W_O}), prove=True).proof
    assert proof.same is not False
    assert proof.named == ()


def test_what_doubled_neurons_share_is_not_called_different(tiny):
    A = tiny("gpt2")
    W_A, b_A, W_B = A["1.W_A"], A["1.b_A"], A["1.W_B"]
    W_A[:, 7], b_A[7] = W_A[:, 3], b_A[3]
    A = A.changed(**{"1.W_A": W_A, "1.b_A": b_A})
    moved = 0.05 * W_B[3]
    W_B[3] -= moved
    W_B[7] += moved
    assert relate(A, A.changed(**{"1.W_B": W_B}), prove=True).same_function is not False


@pytest.mark.parametrize("family", ["qwen3", "olmoe"])
def test_pairs_with_equal_gains_turn_by_any_angle(tiny, family):
    A = tiny(family)
    A = A.changed(**{n: torch.full_like(A[n], 1.5) for n in ("1.q_norm.g", "1.k_norm.g")})
    turn = torch.polar(torch.tensor(1.0), torch.tensor(0.1))  # of pair 2 of the first group
    turned, half = {}, A["1.W_Q"].shape[-1] // 2
    for name, heads in (("1.W_Q", slice(0, 2)), ("1.W_K", slice(0, 1))):
        W = A[name]
        z = torch.complex(W[heads, :, 2], W[heads, :, half + 2]) * turn
        W[heads, :, 2], W[heads, :, half + 2] = z.real, z.imag
        turned[name] = W
    assert relate(A, disguised(A.changed(**turned), 1), prove=True).same_function is True


def test_one_sign_of_a_stream_coordinate_is_another_function(tiny):
    A = tiny("gpt2")
    token = A["token"]
    token[:, 3] *= -1
    assert relate(A, A.changed(token=token), prove=True).same_function is False


@pytest.mark.nightly
def test_a_thousand_pairs_and_no_wrong_proof(tiny):
    """Disguises must not be called different, changed models must not be called the same."""
    families = sorted(TINY)
    wrong, undecided = [], 0
    for i in range(1000):
        generator = torch.Generator().manual_seed(i)
        family = families[i % len(families)]
        dtype = (FLOAT32, BFLOAT16, torch.float16)[i // len(families) % 3]
        A = tiny(family, dtype)
        changed = i % 2 == 1
        B = A
        if changed:
            matrices = [n for n, w in A.tensors.items() if w.ndim > 1 and ".b_" not in n]
            name = matrices[int(torch.randint(len(matrices), (), generator=generator))]
            size = math.exp(float(torch.rand((), generator=generator)) * math.log(50) - 4.6)
            B = noisy(A, size, {name}, seed=i)
        keep = bool(torch.randint(2, (), generator=generator))
        found = relate(A, disguised(B, i, keep_tie=keep), prove=True).same_function
        if found is changed:
            wrong.append((i, family, dtype, changed))
        undecided += found is None
    assert wrong == []
    assert undecided <= 50
