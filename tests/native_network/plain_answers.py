"""Random networks of the zoo's kind, and what they answer, written out in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def random_networks(
    n: int, D: int, heads: int, neurons: int, blocks: int, classes: int, patch: int
) -> dict[str, Any]:
    """With weights of a size at which attention is neither uniform nor saturated."""
    rng = torch.Generator().manual_seed(D + blocks)
    d = D // heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=rng) * (1.5 / shape[-2] ** 0.5)

    def bias(size: int) -> Tensor:
        return torch.randn(n, size, generator=rng) * 0.3

    network: dict[str, Any] = {
        "blocks": [
            {name: draw(1, heads, D, d) for name in ("W_Q", "W_K", "W_V")}
            | {"W_O": draw(1, heads, d, D), "W_A": draw(1, D, neurons), "W_B": draw(1, neurons, D)}
            | {"b_A": bias(neurons)[:, None], "b_B": bias(D)[:, None]}
            for _ in range(blocks)
        ],
        "classifier": {"W_1": draw(D, D), "b_1": bias(D), "W_2": draw(D, classes)}
        | {"b_2": bias(classes)},
    }
    if patch:
        network["embedding"] = {"W": draw(patch, D), "b": bias(D)}
    return network


def mapped(part: Any, change: Any) -> Any:
    """A network with every tensor changed."""
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, dict):
        return {name: mapped(inner, change) for name, inner in part.items()}
    return [mapped(inner, change) for inner in part]


def plain_answers(
    network: dict[str, Any], probes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and spread, one network after the other, one head after the other.

    The third is the distance ``[n, P]`` of the nearest ReLU from its kink, where gradients jump.
    """
    n = len(network["classifier"]["W_1"])
    each = [_one(mapped(network, lambda w, m=m: w[m]), probes, positions) for m in range(n)]
    logits, spread, distance = (torch.stack(parts) for parts in zip(*each, strict=True))
    return logits, spread, distance


def _one(
    network: dict[str, Any], probes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x, spread, near = probes, [], []
    if "embedding" in network:
        x = x @ network["embedding"]["W"] + network["embedding"]["b"]
    x = x + positions
    for block in network["blocks"]:
        w = {name: tensor[0] for name, tensor in block.items()}
        x, out = _norm(x), 0
        for h in range(len(w["W_Q"])):
            Q, K, V = (x @ w[name][h] for name in ("W_Q", "W_K", "W_V"))
            out = out + (Q @ K.mT / Q.shape[-1] ** 0.5).softmax(-1) @ V @ w["W_O"][h]
        before = _norm(out) @ w["W_A"] + w["b_A"]
        near.append(before.detach().abs().amin((1, 2)))
        x = before.relu() @ w["W_B"] + w["b_B"]
        spread.append(_norm(x, 0.0).mean(1).square().mean(-1))
    last = network["classifier"]
    before = _norm(x).mean(1) @ last["W_1"] + last["b_1"]
    near.append(before.detach().abs().amin(1))
    logits = before.relu() @ last["W_2"] + last["b_2"]
    return logits, torch.stack(spread, -1), torch.stack(near).amin(0)


def _norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)
