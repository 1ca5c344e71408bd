"""The reduced form does not see what norms allow, and knows how far rounding moves it."""

import pytest
import torch
from memory_model import MemoryModel

from transformer_nfn.checkpoints.reduced import Reduced
from transformer_nfn.symmetry.rounding import rounding_rms

FLOAT64 = torch.float64


def parts(model, name):
    """Every tensor of a reduced block."""
    block = Reduced(model).block(name)
    out = {}
    for tensor in ("W_A", "W_V"):
        weight, bias = block.reader(tensor)
        out[tensor] = weight.value
        if bias is not None and tensor != "W_V":
            out[f"b of {tensor}"] = bias.value
    for key, piece in block.query_key("", block.description.attention).items():
        out[key] = piece.value
    out |= {tensor: block.writer(tensor).value for tensor in ("W_O", "W_B")}
    for key, bias in (("b_O", block.output_bias()), ("b_B", block.mlp_bias())):
        if bias is not None:
            out[key] = bias.value
    return out


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64)


def assert_same(A, B, name="1"):
    ours, theirs = parts(A, name), parts(B, name)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-10, atol=1e-11, msg=key)


def test_gains_and_biases_of_norms_are_folded(tiny):
    A = tiny("gpt2", FLOAT64)
    gain, shift = 1 + 0.3 * noise(32, seed=1), noise(32, seed=2)
    old, beta = A["1.norm_2.g"], A["1.norm_2.b"]
    W = A["1.W_A"] * (old / gain).unsqueeze(-1)
    new = beta * gain / old + shift
    b = A["1.b_A"] - shift @ W
    B = A.changed(**{"1.norm_2.g": gain, "1.norm_2.b": new, "1.W_A": W, "1.b_A": b})
    assert_same(A, B)


def test_what_centring_takes_away_is_projected_out(tiny):
    A = tiny("gpt2", FLOAT64)
    token = A["token"] + noise(61, 1)
    W_B, b_B = A["1.W_B"] + noise(128, 1), A["1.b_B"] + 3
    B = A.changed(**{"1.W_B": W_B, "1.b_B": b_B, "token": token})
    assert_same(A, B)
    (a,), (b,) = Reduced(A).tables(("token",)), Reduced(B).tables(("token",))
    torch.testing.assert_close(a.rows(0, 61).value, b.rows(0, 61).value)


def test_value_and_key_biases_go_where_they_are_seen(tiny):
    A = tiny("opt", FLOAT64)
    shift = noise(4, 8)
    taken = torch.einsum("hv,hvd->d", shift, A["1.W_O"])
    changed = {"1.b_V": A["1.b_V"] + shift, "1.b_O": A["1.b_O"] - taken}
    assert_same(A, A.changed(**changed, **{"1.b_K": A["1.b_K"] + noise(4, 8, seed=3)}))


def test_a_key_bias_under_rotary_positions_stays(tiny):
    A = tiny("qwen2", FLOAT64)
    B = A.changed(**{"1.b_K": A["1.b_K"] + 1})
    assert not torch.allclose(parts(A, "1")["b_K"], parts(B, "1")["b_K"])


def test_a_tied_head_is_read_as_an_untied_one(tiny):
    A = tiny("llama-tied", FLOAT64)
    head = A["token"].mT.contiguous()
    description = A.description.__class__(**{**A.description.__dict__, "tied": False})
    B = MemoryModel(description, {**A.tensors, "head": head})
    (a,), (b,) = Reduced(A).tables(("head",)), Reduced(B).tables(("head",))
    torch.testing.assert_close(a.rows(0, 61).value, b.rows(0, 61).value)


def test_a_post_norm_bias_is_carried_to_the_next_constant(tiny):
    A = tiny("bert", FLOAT64)
    shift = noise(32, seed=4)
    changed = {
        "1.norm_1.b": A["1.norm_1.b"] + shift,
        "1.b_A": A["1.b_A"] - shift @ A["1.W_A"],
        "1.b_B": A["1.b_B"] - shift,
    }
    assert_same(A, A.changed(**changed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_expected_rounding_error_is_the_one_found(tiny, dtype):
    exact = tiny("gpt2", FLOAT64)
    rounded = exact.to(dtype)
    found = Reduced(rounded).block("1").writer("W_B")
    away = (found.value - Reduced(exact).block("1").writer("W_B").value).norm()
    assert float(away / found.error.sum().sqrt()) == pytest.approx(1, abs=0.15)
    assert rounding_rms(dtype) < torch.finfo(dtype).eps / 2
