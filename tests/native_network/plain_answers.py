"""Random networks of the zoo's kind, and what they answer, written out in plain PyTorch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = ("W_Q", "W_K", "W_V", "W_O", "W_A", "b_A", "W_B", "b_B")


def random_networks(
    n: int, D: int, heads: int, neurons: int, blocks: int, classes: int, patch: int
) -> dict[str, Tensor]:
    """With weights of a size at which attention is neither uniform nor saturated."""
    rng = torch.Generator().manual_seed(D + blocks)
    d = D // heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=rng) * (1.5 / shape[-2] ** 0.5)

    def bias(size: int) -> Tensor:
        return torch.randn(n, size, generator=rng) * 0.3

    network = {}
    for i in range(blocks):
        block = {name: draw(heads, D, d) for name in ("W_Q", "W_K", "W_V")}
        block |= {"W_O": draw(heads, d, D), "W_A": draw(D, neurons), "W_B": draw(neurons, D)}
        block |= {"b_A": bias(neurons), "b_B": bias(D)}
        network |= {f"blocks.{i}.{name}": w for name, w in block.items()}
    last = {"W_1": draw(D, D), "b_1": bias(D), "W_2": draw(D, classes), "b_2": bias(classes)}
    network |= {f"classifier.{name}": w for name, w in last.items()}
    if patch:
        network |= {"embedding.W": draw(patch, D), "embedding.b": bias(D)}
    return network


def mapped(network: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """A network with every tensor changed."""
    return {name: change(w) for name, w in network.items()}


def plain_answers(
    network: dict[str, Tensor], probes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and spread, one network after the other, one head after the other.

    The third is the distance ``[n, P]`` of the nearest ReLU from its kink, where gradients jump.
    """
    n = len(network["classifier.W_1"])
    each = [_one({k: w[m] for k, w in network.items()}, probes, positions) for m in range(n)]
    logits, spread, distance = (torch.stack(parts) for parts in zip(*each, strict=True))
    return logits, spread, distance


def _one(
    network: dict[str, Tensor], probes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x, spread, near = probes, [], []
    if "embedding.W" in network:
        x = x @ network["embedding.W"] + network["embedding.b"]
    x = x + positions
    for i in range(sum(name.endswith("W_Q") for name in network)):
        w = {name: network[f"blocks.{i}.{name}"] for name in BLOCK}
        x, out = _norm(x), 0
        for h in range(len(w["W_Q"])):
            Q, K, V = (x @ w[name][h] for name in ("W_Q", "W_K", "W_V"))
            out = out + (Q @ K.mT / Q.shape[-1] ** 0.5).softmax(-1) @ V @ w["W_O"][h]
        before = _norm(out) @ w["W_A"] + w["b_A"]
        near.append(before.detach().abs().amin((1, 2)))
        x = before.relu() @ w["W_B"] + w["b_B"]
        spread.append(_norm(x, 0.0).mean(1).square().mean(-1))
    before = _norm(x).mean(1) @ network["classifier.W_1"] + network["classifier.b_1"]
    near.append(before.detach().abs().amin(1))
    logits = before.relu() @ network["classifier.W_2"] + network["classifier.b_2"]
    return logits, torch.stack(spread, -1), torch.stack(near).amin(0)


def _norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)
