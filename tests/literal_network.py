"""The zoo's network written out from a state dict of the authors' layout, head by head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def literal_logits(
    state: Mapping[str, Tensor],
    inputs: Tensor,
    positions: Tensor,
    heads: int,
    neurons: list[Tensor] | None = None,
) -> Tensor:
    """Logits ``[batch, classes]`` of images ``[batch, 1, h, w]`` or word vectors.

    ``neurons`` collects what enters the ReLU of each block.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    x = inputs
    if "embedding.conv1.weight" in state:
        kernel = state["embedding.conv1.weight"]
        x = F.conv2d(x, kernel, state["embedding.conv1.bias"], stride=kernel.shape[-1])
        x = x.flatten(2).mT
    x = x + positions[: x.shape[1]]
    for i in range(sum(name.endswith("queries.weight") for name in state)):
        at = f"encoder.{i}"
        x = norm(x)
        q, k, v = (
            linear(x, f"{at}.attention.{part}").chunk(heads, -1)
            for part in ("queries", "keys", "values")
        )
        d = q[0].shape[-1]
        mixed = [(q[h] @ k[h].mT / d**0.5).softmax(-1) @ v[h] for h in range(heads)]
        x = norm(linear(torch.cat(mixed, -1), f"{at}.attention.out_projection"))
        x = linear(x, f"{at}.fc1")
        if neurons is not None:
            neurons.append(x)
        x = linear(x.relu(), f"{at}.fc2")
    return linear(linear(norm(x).mean(1), "classifier.fc1").relu(), "classifier.fc2")
