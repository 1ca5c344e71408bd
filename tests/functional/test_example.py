"""A new architecture in one file of forty lines, end to end."""

import math
import runpy
from pathlib import Path

import pytest
import torch

from cases import draw, gen
from transformer_nfn import symmetry
from transformer_nfn.functional import Architecture
from transformer_nfn.spaces import Axis, WeightSpace
from transformer_nfn.testing import assert_same_function

FILE = Path(__file__).resolve().parents[2] / "examples" / "new_architecture.py"


@pytest.fixture(scope="module")
def example():
    torch.manual_seed(0)
    return runpy.run_path(str(FILE))


@pytest.fixture(scope="module")
def decoder(example):
    return example["decoder"]


def test_it_is_one_file_of_at_most_forty_lines(example):
    assert len(FILE.read_text().splitlines()) <= 40
    found = symmetry.compare(example["decoder"], example["U"], example["V"])
    assert found.same_function is True


def literal(w, X):
    """The forward one head, one token and one neuron after another, with complex rotations."""

    def norm(x, gain):
        return torch.stack([row / (row @ row / len(row)).sqrt() * gain for row in x])

    x = X @ w["W_E"]
    y, added = norm(x, w["g_1"]), torch.zeros_like(x)
    frequency = 1e4 ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    for group in range(2):
        for query in range(3):
            q, k = (
                torch.view_as_complex((y @ W).reshape(len(y), 2, 2))
                for W in (w["W_Q"][group, query], w["W_K"][group])
            )
            for i in range(len(y)):
                turns = [torch.exp(1j * (i - j) * frequency) for j in range(len(y))]
                scores = [(q[i] * turns[j] * k[j].conj()).sum().real for j in range(len(y))]
                exps = [math.exp(float(s) / 2) for s in scores]
                mixed = sum(e * (y[j] @ w["W_V"][group]) for j, e in enumerate(exps)) / sum(exps)
                added[i] += mixed @ w["W_O"][group, query]
    x = x + added
    y = norm(x, w["g_2"])
    for n in range(8):
        gate, up = y @ w["W_G"][:, n], y @ w["W_U"][:, n, 0]
        x = x + (gate / (1 + (-gate).exp()) * up)[:, None] * w["W_D"][n, 0]
    return norm(x, 1.0) @ w["W_C"]


def test_the_forward_is_what_its_words_say(decoder):
    U = {name: w[0, 0] for name, w in draw(decoder.space, 1).items()}
    X = torch.randn(4, 7, generator=gen(1), dtype=torch.float64)
    assert torch.allclose(decoder.forward(U, X), literal(U, X), atol=1e-11)


def test_the_forward_does_not_notice_the_group(decoder):
    for seed in range(5):
        U = draw(decoder.space, seed)
        assert_same_function(decoder, U, decoder.disguise(U, gen(seed)), tolerance=1e-9)
    decoder.check_invariance(tolerance=1e-9)


WRONG = {
    "any matrix under rotary positions": ("qk", Axis.linear("qk", 4, of="group")),
    "pairs that do not turn together": ("qk", Axis.linear("qk", 4, "group", "complex_halves")),
}


@pytest.mark.parametrize(("axis", "claim"), WRONG.values(), ids=WRONG)
def test_a_group_that_is_too_large_is_caught(decoder, axis, claim):
    space = decoder.space
    tensors = {name: " ".join(spec.words()) for name, spec in space.tensors.items()}
    wrong = WeightSpace.build("wrong", {**space.axes, axis: claim}.values(), tensors)
    with pytest.raises(AssertionError, match="the group of 'wrong' changes its function"):
        Architecture(wrong, decoder.forward, decoder.inputs).check_invariance()


def test_the_key_map_goes_both_ways(decoder):
    U = draw(decoder.space, 2)
    file = decoder.write(U)
    assert {name: tuple(w.shape) for name, w in file.items()} == {
        "embed.weight": (7, 6),
        "lm_head.weight": (5, 6),
        "norm_1.weight": (6,),
        "norm_2.weight": (6,),
        "q_proj.weight": (24, 6),
        "kv_proj.weight": (14, 6),
        "o_proj.weight": (6, 18),
        "gate_up_proj.weight": (16, 6),
        "down_proj.weight": (6, 8),
    }
    assert torch.equal(file["kv_proj.weight"][8:11], U["W_V"][0, 0, 0].T)
    back = decoder.read(file)
    assert all(torch.equal(back[name], U[name]) for name in U)


def test_compare_says_same_and_different_with_proof(decoder):
    for seed in range(3):
        U = draw(decoder.space, seed)
        g = decoder.space.group.random(gen(seed), max_condition=100)
        found = symmetry.compare(decoder, U, g.act(U))
        assert (found.same_function, found.same_orbit, found.group) == (True, True, "paper")
        V = decoder.disguise(U, gen(seed))
        found = symmetry.compare(decoder, U, V)
        assert (found.same_function, found.same_orbit, found.group) == (True, True, "enlarged")
        for name in ("W_Q", "W_D", "g_1"):
            W = {**V, name: V[name] * 1.01} if name != "W_D" else {**V, name: V[name] + 0.01}
            found = symmetry.compare(decoder, U, W)
            assert (found.same_function, found.same_orbit) == (False, False)
            outputs = [decoder.forward(w, found.witness.X) for w in (U, W)]
            assert float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) > 1e-6
