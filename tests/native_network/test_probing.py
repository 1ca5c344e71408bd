"""Probes through networks by the C code: the numbers and gradients of plain PyTorch in float64."""

from typing import Any

import pytest
import torch
from plain_answers import mapped, plain_answers, random_networks
from torch import Tensor

from transformer_nfn import native_code
from transformer_nfn.errors import SpaceError
from transformer_nfn.native_network import fits, probe_outputs, probing, why_not

needs_compiler = pytest.mark.skipif(native_code.find_compiler() is None, reason="no C compiler")

# n, D, heads, neurons, blocks, classes, patch; probes; tokens. Heads narrower than a vector, heads
# of no whole vector, rows of no whole wide vector, more classes than one tile, patches of any size.
CASES = [
    ((5, 32, 2, 64, 2, 10, 16), 19, 49),
    ((3, 32, 2, 64, 2, 4, 0), 5, 16),
    ((9, 16, 4, 32, 1, 10, 5), 33, 7),
    ((2, 48, 4, 96, 3, 10, 16), 6, 16),
    ((2, 20, 2, 40, 1, 20, 4), 3, 49),
    ((2, 20, 2, 40, 3, 3, 0), 17, 7),
    ((1, 32, 2, 64, 2, 10, 16), 2, 201),
]


def asked(case: Any) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    sizes, count, tokens = case
    n, D, _, _, _, classes, patch = sizes
    rng = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    network = random_networks(*sizes)
    probes, positions = draw(count, tokens, patch or D), draw(tokens, D)
    return network, probes, positions, draw(n, count, classes)


def gradient(answered: tuple[Tensor, ...], probes: Tensor, weights: Tensor) -> Tensor:
    loss = (answered[0] * weights).sum()
    return torch.autograd.grad(loss, probes, retain_graph=True)[0]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).detach().norm() / exact.detach().norm())


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_and_gradients_are_those_of_float64(case: Any) -> None:
    network, probes, positions, weights = asked(case)
    twin = probes.double().requires_grad_()
    logits, spread, distance = plain_answers(
        mapped(network, Tensor.double), twin, positions.double()
    )
    probes.requires_grad_()
    found = probe_outputs(network, probes, positions)
    assert error(found[0], logits) < 1e-5
    assert error(found[1], spread) < 1e-5
    clear = (distance > 1e-5).float()[..., None]
    assert clear.mean() > 0.7
    exact = gradient((logits,), twin, weights * clear)
    assert error(gradient(found, probes, weights * clear), exact) < 1e-5
    assert not found[1].requires_grad


@needs_compiler
def test_neither_threads_nor_company_change_a_bit() -> None:
    network, probes, positions, weights = asked(CASES[0])
    probes.requires_grad_()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            logits, spread = probe_outputs(network, probes, positions)
            found.append((logits, spread, gradient((logits,), probes, weights)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    alone = probe_outputs(mapped(network, lambda w: w[3:4]), probes[7:10], positions)
    assert torch.equal(alone[0], found[0][0][3:4, 7:10])
    assert torch.equal(alone[1], found[0][1][3:4, 7:10])


@needs_compiler
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[6]], ids=str)
def test_without_memory_the_way_back_walks_there_again(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, probes, positions, weights = asked(case)
    probes.requires_grad_()
    kept = gradient(probe_outputs(network, probes, positions), probes, weights)
    monkeypatch.setattr(probing, "MOST_KEPT", 0)
    assert torch.equal(kept, gradient(probe_outputs(network, probes, positions), probes, weights))


@needs_compiler
def test_how_alike_tokens_are_does_not_tell_how_large_they_were() -> None:
    """LayerNorm discards the scale but for ε, which shows where a block gives next to nothing."""
    network, probes, positions, _ = asked(CASES[0])
    small = mapped(network, Tensor.clone)
    for name in ("W_B", "b_B"):
        small[f"blocks.1.{name}"] *= 1e-3
    found, other = (probe_outputs(one, probes, positions) for one in (network, small))
    assert error(other[0], found[0]) > 1e-2
    assert error(other[1], found[1]) < 1e-5


@needs_compiler
def test_a_network_out_of_bounds_answers_no_number() -> None:
    """As PyTorch has it; its neighbours are not touched."""
    network, probes, positions, *_ = asked(CASES[0])
    expected = probe_outputs(network, probes, positions)[0]
    network["blocks.0.W_Q"][2] *= 1e25
    network["blocks.0.W_K"][2] *= 1e25
    found = probe_outputs(network, probes, positions)[0]
    assert found[2].isnan().all()
    rest = [0, 1, 3, 4]
    assert torch.equal(found[rest], expected[rest])


@needs_compiler
def test_what_does_not_fit_is_said() -> None:
    network, probes, positions, *_ = asked(CASES[0])
    assert fits(network)
    assert "float32" in why_not(mapped(network, Tensor.double))
    assert "multiples of 4" in why_not(random_networks(1, 30, 3, 60, 1, 10, 4))
    narrow = random_networks(5, 32, 2, 32, 2, 10, 0)
    second = {name: w for name, w in narrow.items() if name.startswith("blocks.1.")}
    assert "'blocks.1.W_A'" in why_not({**network, **second})
    blocks = {name: w for name, w in network.items() if name.startswith("blocks.")}
    assert "networks of the zoo" in why_not(blocks)
    wanted = mapped(network, torch.Tensor.clone)
    wanted["classifier.W_1"].requires_grad_()
    assert "gradients of weights" in why_not(wanted)
    with pytest.raises(SpaceError, match="gradients of weights"):
        probe_outputs(wanted, probes, positions)
    with pytest.raises(SpaceError, match=r"probes \[any, any, 16\].*\[19, 49, 15\]"):
        probe_outputs(network, probes[..., 1:], positions)
    with pytest.raises(SpaceError, match="1 to 48 tokens expected, found 49"):
        probe_outputs(network, probes, positions[1:])


def test_without_a_compiler_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "find_compiler", lambda: None)
    network = random_networks(1, 24, 2, 44, 1, 10, 4)
    assert why_not(network) == "no C compiler was found"
    assert not fits(network)
