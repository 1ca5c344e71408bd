"""One small transformer as a PyTorch module, and the key names of the authors' files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import zoo_logits
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes

HEADS_KEY = "encoder.heads"
"""Key of the number of heads in a state dict; without it there are the paper's two."""


class SmallTransformer(nn.Module):
    """The network of the zoo, with the key names of the authors' files.

    Its forward is `functional.zoo_logits` of its parameters. ``embedding.pos_embedding`` holds
    the fixed positions, which are part of the state dict of an image network only.

    Args:
        sizes: its sizes.
        dropout: probability, while training.

    >>> network = SmallTransformer(NetworkSizes(tokens=4, classes=3, patch=4, d_model=8)).eval()
    >>> network(torch.randn(2, 1, 4, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(self, sizes: NetworkSizes, dropout: float = 0.0) -> None:
        super().__init__()
        self.sizes, self.p = sizes, dropout
        D = sizes.d_model
        self.embedding = nn.Module()
        if sizes.patch:
            side = round(sizes.patch**0.5)
            self.embedding.conv1 = nn.Conv2d(1, D, side, stride=side)
        self.embedding.register_buffer(
            "pos_embedding", sizes.positions(), persistent=sizes.patch > 0
        )
        self.encoder = nn.ModuleList(_block(sizes) for _ in range(sizes.blocks))
        self.classifier = _parts(fc1=nn.Linear(D, D), fc2=nn.Linear(D, sizes.classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, classes]`` of images ``[batch, 1, h, w]`` or word vectors."""
        if self.sizes.patch:
            side = round(self.sizes.patch**0.5)
            inputs = F.unfold(inputs, side, stride=side).mT
        positions = self.embedding.get_buffer("pos_embedding")
        return zoo_logits(
            {name: w[None] for name, w in self._weights().items()},
            inputs[None],
            positions,
            heads=self.sizes.heads,
            drop=lambda x, _: F.dropout(x, self.p, self.training),
        )[0]

    def _weights(self) -> dict[str, Tensor]:
        """Parameters as `zoo_logits` reads them, queries, keys and values fused."""
        own: dict[str, Tensor] = dict(self.named_parameters())
        weights = {}
        if self.sizes.patch:
            weights["embedding.W"] = own["embedding.conv1.weight"].flatten(1).mT
            weights["embedding.b"] = own["embedding.conv1.bias"]
        for i in range(self.sizes.blocks):
            at, name = f"encoder.{i}", f"blocks.{i}"
            parts = [own[f"{at}.attention.{part}.weight"] for part in ("queries", "keys", "values")]
            weights[f"{name}.W_QKV"] = torch.cat(parts).mT
            weights[f"{name}.W_O"] = own[f"{at}.attention.out_projection.weight"].mT
            for layer, letter in (("fc1", "A"), ("fc2", "B")):
                weights[f"{name}.W_{letter}"] = own[f"{at}.{layer}.weight"].mT
                weights[f"{name}.b_{letter}"] = own[f"{at}.{layer}.bias"]
        for layer, number in (("fc1", 1), ("fc2", 2)):
            weights[f"classifier.W_{number}"] = own[f"classifier.{layer}.weight"].mT
            weights[f"classifier.b_{number}"] = own[f"classifier.{layer}.bias"]
        return weights


def _block(sizes: NetworkSizes) -> nn.Module:
    D = sizes.d_model
    names = ("queries", "keys", "values", "out_projection")
    attention = _parts(**{name: nn.Linear(D, D, bias=False) for name in names})
    return _parts(attention=attention, fc1=nn.Linear(D, sizes.d_ff), fc2=nn.Linear(sizes.d_ff, D))


def _parts(**parts: nn.Module) -> nn.Module:
    """A module without a forward; a `ModuleDict` cannot have a part called ``keys``."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def to_state_dict(sizes: NetworkSizes, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One network of `NetworkSizes.space` (no leading axis) under the authors' key names."""
    return sizes.architecture.naming.write(sizes.space, named)


def heads_in(state: Mapping[str, Tensor]) -> int | None:
    """What a state dict says of its heads under `HEADS_KEY`; None where it says nothing."""
    if HEADS_KEY not in state:
        return None
    stored = state[HEADS_KEY]
    if stored.numel() != 1 or not float(stored).is_integer() or float(stored) < 1:
        raise ZooError(f"'{HEADS_KEY}' must be one whole number of at least 1, found {stored}")
    return round(float(stored))


def from_state_dict(sizes: NetworkSizes, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_state_dict`; keys it does not know are left alone."""
    try:
        return sizes.architecture.naming.read(sizes.space, state)
    except SpaceError as error:
        raise ZooError(str(error)) from error


def load_network(sizes: NetworkSizes, named: Mapping[str, Tensor]) -> SmallTransformer:
    """One network of `NetworkSizes.space` as a runnable module in evaluation mode."""
    network = SmallTransformer(sizes)
    # Casting covers zoos stored in half precision; positions come from the architecture.
    state = {k: v.to(torch.float32) for k, v in to_state_dict(sizes, named).items()}
    network.load_state_dict(state)
    return network.eval()
