"""Options of layers: gates, quadratic terms, low rank, initialisation, transforms of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_cases import BLOCK, SPACES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import trials
from transformer_nfn import spaces
from transformer_nfn.nn import Activation, Equivariant, Invariant
from transformer_nfn.spaces import Weights


def test_stacked_layers_collapse_on_queries_unless_gated() -> None:
    for gated in (False, True):
        torch.manual_seed(0)
        first = Equivariant(BLOCK, 1, 3, gated=gated).double()
        second = Equivariant(BLOCK, 3, 1, gated=gated).double()
        act = Activation(BLOCK)
        u = BLOCK.randn(64, 1, dtype=torch.float64)
        out = second(act(first(u)))["W_Q"]
        # The best single map W_Q -> W_Q of the paper's form, one D × D matrix for all.
        x = u["W_Q"].movedim(-2, -1).reshape(-1, 4)
        y = out.movedim(-2, -1).reshape(-1, 4)
        rest = y - x @ torch.linalg.lstsq(x, y).solution
        collapsed = bool(rest.norm() / y.norm() < 1e-10)
        assert collapsed is not gated


def test_further_quadratic_invariants_are_the_compositions() -> None:
    names = [
        {block.term.source.name for block in Equivariant(BLOCK, 1, 1, quadratic=q).blocks()}
        for q in (False, True)
    ]
    assert names[1] - names[0] == {"W_A∘W_B", "b_A∘W_B", "W_O∘W_A"}


def test_quadratic_invariants_tell_apart_what_the_paper_cannot() -> None:
    # Neurons of W_A and b_A reversed against those of W_B: every sum is as before, W_A W_B is not.
    torch.manual_seed(0)
    u = BLOCK.randn(1, 1, dtype=torch.float64)
    v = u | {"W_A": u["W_A"].flip(-1), "b_A": u["b_A"].flip(-1)}
    plain = Invariant(BLOCK, 1, 5).double()
    more = Invariant(BLOCK, 1, 5, quadratic=True).double()
    assert (plain(u) - plain(v)).abs().max() < 1e-12
    assert (more(u) - more(v)).abs().max() > 1e-3


WIDE = {
    "paper": spaces.attention_block(32, 2, 16, 16, 64),
    "residual": spaces.residual_stack(2, 16, 2, 8, 8, 32, d_in=16, d_out=4),
    **SPACES,
}


@pytest.mark.parametrize("active", [False, True], ids=["linear", "relu"])
@pytest.mark.parametrize("name", WIDE)
def test_unit_weights_give_unit_outputs(name: str, active: bool) -> None:
    space = WIDE[name]
    channels = 4 if name == "paper" else 8
    squares = torch.zeros(4)
    draws = trials(1, 3)
    for seed in range(draws):
        torch.manual_seed(seed)
        weights = space.randn(8, 1)
        for depth in range(4):
            layer = Equivariant(space, channels if depth else 1, channels)
            with torch.no_grad():
                weights = layer(weights)
                total = torch.cat([x.flatten() for x in weights.values()])
                squares[depth] += total.square().mean() / draws
                if active:
                    weights = Activation(space)(weights)
    assert (squares.sqrt() > 0.3).all(), squares
    assert (squares.sqrt() < 3).all(), squares


def test_invariants_have_unit_scale() -> None:
    torch.manual_seed(0)
    space = WIDE["paper"]
    out = Invariant(space, 4, 64)(space.randn(64, 4))
    assert 0.5 < out.std() < 2


def block(D: int) -> spaces.WeightSpace:
    return spaces.attention_block(D, 2, 3, 2, 5)


def count(D: int, rank: int | None) -> int:
    layers = Equivariant(block(D), 2, 3, rank=rank), Invariant(block(D), 2, 3, rank=rank)
    return sum(p.numel() for layer in layers for p in layer.parameters())


def test_parameters_grow_linearly_with_the_width() -> None:
    assert count(40, 4) - count(30, 4) == count(30, 4) - count(20, 4)
    # The dense layer's grow with the cube.
    assert count(40, None) - count(30, None) > 1.5 * (count(30, None) - count(20, None))


def test_a_wide_layer_has_few_parameters() -> None:
    with torch.device("meta"):
        layer = Equivariant(spaces.attention_block(4096, 32, 128, 128, 16384), 10, 10, rank=16)
    assert sum(p.numel() for p in layer.parameters()) < 2_000_000


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.seen.add(tuple(x.shape))
        return out


@pytest.mark.parametrize(("rank", "formed"), [(3, False), (None, True)])
def test_no_matrix_of_width_by_width_is_formed(rank: int | None, formed: bool) -> None:
    D = 37
    space = block(D)
    layers = Equivariant(space, 2, 3, rank=rank), Invariant(space, 2, 3, rank=rank)
    weights = space.randn(2, 2)
    with torch.no_grad(), Shapes() as shapes:
        for layer in layers:
            layer(weights)
    # Any tensor in which the width stands twice, alone or merged into a longer axis.
    square = [s for s in shapes.seen if sum(n % D == 0 for n in s) > 1 or D * D in s]
    assert bool(square) == formed


def test_low_rank_has_unit_scale() -> None:
    torch.manual_seed(0)
    space = spaces.attention_block(64, 4, 16, 16, 128)
    out = Equivariant(space, 4, 4, rank=8)(space.randn(4, 4))
    for name, x in out.items():
        assert 0.4 < x.square().mean().sqrt() < 2.5, name


def network() -> nn.Sequential:
    return nn.Sequential(Equivariant(BLOCK, 1, 2), Activation(BLOCK), Invariant(BLOCK, 2, 3))


@pytest.mark.nightly
def test_compiled_layers_give_the_same() -> None:
    torch.manual_seed(0)
    model = network()
    weights = BLOCK.randn(3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(weights), model(weights))
    loss = compiled(weights).square().sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_vmap_over_seeds() -> None:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(network())
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    weights = BLOCK.randn(4)

    def call(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(models[0], (p, b), (weights,))
        return out

    together = torch.func.vmap(call)(parameters, buffers)
    apart = torch.stack([model(weights) for model in models])
    torch.testing.assert_close(together, apart)

    def loss(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return call(p, b).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss))(parameters, buffers)
    models[1](weights).square().sum().backward()
    for name, p in models[1].named_parameters():
        torch.testing.assert_close(gradients[name][1], p.grad)


@pytest.mark.parametrize("rank", [None, 2])
def test_a_layer_can_fit_the_identity(rank: int | None) -> None:
    torch.manual_seed(0)
    layer = Equivariant(BLOCK, 1, 1, rank=rank).double()
    seen, unseen = BLOCK.randn(64, dtype=torch.float64), BLOCK.randn(64, dtype=torch.float64)
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def error(weights: Weights) -> Tensor:
        out = layer(weights)
        return torch.stack([(out[n] - x).square().mean() for n, x in weights.items()]).sum()

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = error(seen)
        loss.backward()
        return loss

    first = error(unseen).item()
    optimiser.step(closure)  # type: ignore[no-untyped-call]
    assert error(unseen).item() < 1e-3 * first
