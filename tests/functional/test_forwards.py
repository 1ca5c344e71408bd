"""The references against loops written from the formulas, and PyTorch's own modules."""

import math

import pytest
import torch

from cases import SIX, draw, gen
from transformer_nfn import functional, spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import architecture_of

BLOCK = SIX["attention_block"]


def tokens(length, width, seed=0):
    return torch.randn(length, width, generator=gen(seed), dtype=torch.float64)


def literal_multi_head(X, U):
    """Equation 2, one head and one token after another."""
    out = torch.zeros(len(X), U["W_O"].shape[-1], dtype=X.dtype)
    for Q, K, V, O in zip(U["W_Q"], U["W_K"], U["W_V"], U["W_O"], strict=True):  # noqa: E741
        A = Q @ K.T / math.sqrt(Q.shape[1])
        for i in range(len(X)):
            scores = torch.stack([X[i] @ A @ X[j] for j in range(len(X))]).exp()
            out[i] += sum(s * X[j] for j, s in enumerate(scores / scores.sum())) @ V @ O
    return out


def literal_layer_norm(x):
    centred = x - x.mean(-1, keepdim=True)
    return math.sqrt(x.shape[-1]) * centred / centred.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_multi_head_and_block_are_the_papers(length):
    U, X = draw(BLOCK, 1), tokens(length, 8)
    one = {name: w[0, 0] for name, w in U.items()}
    expected = literal_multi_head(X, one)
    assert torch.allclose(functional.multi_head(X, U)[0, 0], expected, atol=1e-12)
    hidden = torch.relu(literal_layer_norm(expected) @ one["W_A"] + one["b_A"])
    expected = literal_layer_norm(hidden @ one["W_B"] + one["b_B"])
    assert torch.allclose(functional.block(X, U)[0, 0], expected, atol=1e-12)


def test_batched_over_networks_is_a_loop():
    U = draw(BLOCK, 2, batch=3, channels=2)
    shared, own = tokens(4, 8), torch.stack([tokens(4, 8, seed) for seed in range(3)])
    many = torch.stack([tokens(4, 8, seed) for seed in range(5)])[:, None, None]
    for i in range(3):
        for c in range(2):
            one = {name: w[i, c] for name, w in U.items()}
            for X, alone, index in (
                (shared, shared, (i, c)),
                (own, own[i], (i, c)),
                (many, many[4, 0, 0], (4, i, c)),
            ):
                found = functional.block(X, U)[index]
                assert torch.allclose(found, functional.block(alone, one), atol=1e-12)


def test_layer_norm_is_pytorchs_without_eps():
    x = tokens(6, 8)
    expected = torch.nn.functional.layer_norm(x, (8,), eps=0.0)
    assert torch.allclose(functional.layer_norm(x), expected, atol=1e-12)


def test_biases_are_those_of_pytorchs_multihead_attention():
    space = spaces.biased_block(8, 2, 4, 4, 10)
    U, X = draw(space, 3), tokens(5, 8)
    one = {name: w[0, 0] for name, w in U.items()}
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        rows = [one[f"W_{n}"].permute(0, 2, 1).reshape(8, 8) for n in "QKV"]
        module.in_proj_weight.copy_(torch.cat(rows))
        module.in_proj_bias.copy_(torch.cat([one[f"b_{n}"].reshape(8) for n in "QKV"]))
        module.out_proj.weight.copy_(one["W_O"].reshape(8, 8).T)
        module.out_proj.bias.copy_(one["b_O"])
        expected = module(X[None], X[None], X[None])[0][0]
    assert torch.allclose(functional.multi_head(X, one), expected, atol=1e-12)


def test_grouped_queries_are_multi_head_with_repeated_keys():
    U, X = draw(SIX["grouped_query_block"], 4), tokens(5, 8)
    one = {name: w[0, 0] for name, w in U.items()}
    repeated = {
        "W_Q": one["W_Q"].flatten(0, 1),
        "W_K": one["W_K"].repeat_interleave(2, 0),
        "W_V": one["W_V"].repeat_interleave(2, 0),
        "W_O": one["W_O"].flatten(0, 1),
    }
    assert torch.allclose(
        functional.multi_head(X, one), functional.multi_head(X, repeated), atol=1e-12
    )


def test_rotary_scores_depend_on_the_distance_alone():
    U, X = draw(SIX["rope_block"], 5), tokens(4, 8)
    one = {name: w[0, 0] for name, w in U.items()}
    total = torch.zeros(4, 8, dtype=torch.float64)
    frequency = 10000.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    for Q, K, V, O in zip(one["W_Q"], one["W_K"], one["W_V"], one["W_O"], strict=True):  # noqa: E741
        q, k = (torch.view_as_complex((X @ W).reshape(4, 3, 2)) for W in (Q, K))
        scores = torch.zeros(4, 4, dtype=torch.float64)
        for i in range(4):
            for j in range(4):
                turn = torch.polar(torch.ones(3, dtype=torch.float64), (i - j) * frequency)
                scores[i, j] = (q[i] * turn * k[j].conj()).sum().real / math.sqrt(6)
        total += scores.softmax(-1) @ X @ V @ O
    assert torch.allclose(functional.multi_head(X, one, base=10000.0), total, atol=1e-12)


def test_residual_stack_is_pytorchs_encoder():
    space = spaces.residual_stack(2, 8, 2, 4, 4, 10, d_in=5, d_out=3)
    U, X = draw(space, 6), tokens(4, 5)
    w = {name: t[0, 0] for name, t in U.items()}
    layers = []
    for i in range(2):
        layer = torch.nn.TransformerEncoderLayer(
            8,
            2,
            10,
            0.0,
            batch_first=True,
            norm_first=True,
            layer_norm_eps=0.0,
            dtype=torch.float64,
        )
        rows = [w[f"{i}.W_{n}"].permute(0, 2, 1).reshape(8, 8) for n in "QKV"]
        with torch.no_grad():
            layer.self_attn.in_proj_weight.copy_(torch.cat(rows))
            layer.self_attn.in_proj_bias.zero_()
            layer.self_attn.out_proj.weight.copy_(w[f"{i}.W_O"].reshape(8, 8).T)
            layer.self_attn.out_proj.bias.zero_()
            layer.linear1.weight.copy_(w[f"{i}.W_A"].T)
            layer.linear1.bias.copy_(w[f"{i}.b_A"])
            layer.linear2.weight.copy_(w[f"{i}.W_B"].T)
            layer.linear2.bias.copy_(w[f"{i}.b_B"])
            for norm, k in ((layer.norm1, 1), (layer.norm2, 2)):
                norm.weight.copy_(w[f"{i}.g_{k}"])
                norm.bias.copy_(w[f"{i}.b_{k}"])
        layers.append(layer)
    with torch.no_grad():
        x = (X @ w["W_E"] + w["b_E"])[None]
        for layer in layers:
            x = layer(x)
        x = functional.layer_norm(x) * w["g"] + w["b"]
        expected = (x @ w["W_C"] + w["b_C"])[0]
    found = architecture_of(space).forward(U, X)[0, 0]
    assert torch.allclose(found, expected, atol=1e-11)


def test_swiglu_and_stack_compose_as_they_say():
    U, X = draw(SIX["swiglu_block"], 7), tokens(4, 8)
    w = {name: t[0, 0] for name, t in U.items()}
    x = literal_layer_norm(literal_multi_head(X, w))
    gate = x @ w["W_G"]
    hidden = gate / (1 + (-gate).exp()) * (x @ w["W_U"][..., 0])
    expected = literal_layer_norm(hidden @ w["W_D"][:, 0])
    assert torch.allclose(functional.block(X, w), expected, atol=1e-12)
    space = spaces.stack(BLOCK, 2)
    V = draw(space, 8)
    parts = [{n.removeprefix(f"{i}."): t for n, t in V.items() if n[0] == str(i)} for i in (0, 1)]
    expected = functional.block(functional.block(X, parts[0]), parts[1])
    assert torch.allclose(architecture_of(space).forward(V, X), expected, atol=1e-12)


def test_bad_inputs_are_explained():
    with pytest.raises(SpaceError, match="X axis 'width': expected 8 as in 'W_Q', found 5"):
        functional.block(tokens(3, 5), draw(BLOCK))
    with pytest.raises(SpaceError, match="X must have shape"):
        functional.block(torch.ones(8, dtype=torch.float64), draw(BLOCK))
    with pytest.raises(SpaceError, match="X axis 'batch': expected 3 as in the weights, found 2"):
        functional.block(torch.ones(2, 4, 8, dtype=torch.float64), draw(BLOCK, batch=3))
    unknown = spaces.WeightSpace.build("mine", [spaces.Axis.free("x", 2)], {"w": "x"})
    with pytest.raises(SpaceError, match="space 'mine' has no reference forward"):
        architecture_of(unknown)
