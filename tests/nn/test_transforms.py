"""torch.compile and torch.func work on layers; layers can fit the identity."""

from __future__ import annotations

import pytest
import torch
from layer_cases import BLOCK
from torch import Tensor, nn

from transformer_nfn.nn import Activation, Equivariant, Invariant
from transformer_nfn.spaces import Weights


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
