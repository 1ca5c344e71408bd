"""One small transformer as a plain module, with the key names of the authors' files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.sizes import NetworkSizes

HEADS_KEY = "encoder.heads"
"""In a state dict, how many heads share a matrix; where it is missing, the paper's two."""


class Attention(nn.Module):
    """Multi-head attention without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.out_projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        maps = (self.queries, self.keys, self.values)
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in maps)
        a = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out_projection(a.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """LayerNorm, attention, dropout, LayerNorm, MLP, dropout."""

    def __init__(self, arch: NetworkSizes, p: float) -> None:
        super().__init__()
        self.attention = Attention(arch.d_model, arch.heads)
        self.fc1 = nn.Linear(arch.d_model, arch.d_ff)
        self.fc2 = nn.Linear(arch.d_ff, arch.d_model)
        self.norm = nn.LayerNorm(arch.d_model, elementwise_affine=False)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, tokens, width]`` to the same."""
        x = self.dropout(self.attention(self.norm(x)))
        out: Tensor = self.dropout(self.fc2(self.fc1(self.norm(x)).relu()))
        return out


class PatchEmbedding(nn.Module):
    """A strided convolution and fixed positions."""

    pos_embedding: Tensor

    def __init__(self, arch: NetworkSizes) -> None:
        super().__init__()
        side = round(arch.patch**0.5)
        self.conv1 = nn.Conv2d(1, arch.d_model, side, stride=side)
        self.register_buffer("pos_embedding", arch.positions())

    def forward(self, images: Tensor) -> Tensor:
        """``[batch, 1, height, width]`` to ``[batch, tokens, d_model]``."""
        out: Tensor = self.conv1(images).flatten(2).transpose(1, 2) + self.pos_embedding
        return out


class WordPositions(nn.Module):
    """Fixed positions added to word vectors; nothing of it stands in a file."""

    pos_embedding: Tensor

    def __init__(self, arch: NetworkSizes) -> None:
        super().__init__()
        self.register_buffer("pos_embedding", arch.positions(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """``[batch, tokens, d_model]`` to the same."""
        return vectors + self.pos_embedding[: vectors.shape[1]]


class Classifier(nn.Module):
    """Two linear maps with a ReLU between."""

    def __init__(self, arch: NetworkSizes) -> None:
        super().__init__()
        self.fc1 = nn.Linear(arch.d_model, arch.d_model)
        self.fc2 = nn.Linear(arch.d_model, arch.classes)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, d_model]`` to logits."""
        out: Tensor = self.fc2(self.fc1(x).relu())
        return out


class SmallTransformer(nn.Module):
    """The network of the zoo; takes images ``[batch, 1, h, w]`` or word vectors."""

    def __init__(self, arch: NetworkSizes, dropout: float = 0.0) -> None:
        super().__init__()
        self.arch = arch
        self.embedding = PatchEmbedding(arch) if arch.patch else WordPositions(arch)
        self.encoder = nn.ModuleList(Block(arch, dropout) for _ in range(arch.blocks))
        self.classifier = Classifier(arch)
        self.norm = nn.LayerNorm(arch.d_model, elementwise_affine=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, classes]``."""
        x = self.dropout(self.embedding(inputs))
        for block in self.encoder:
            x = block(x)
        out: Tensor = self.classifier(self.norm(x).mean(1))
        return out


def to_state_dict(arch: NetworkSizes, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One network of `NetworkSizes.space` (no leading axis) under the authors' key names."""
    return arch.architecture.naming.write(arch.space, named)


def heads_in(state: Mapping[str, Tensor]) -> int | None:
    """What a state dict says of its heads under `HEADS_KEY`; None where it says nothing."""
    if HEADS_KEY not in state:
        return None
    stored = state[HEADS_KEY]
    if stored.numel() != 1 or float(stored) != round(float(stored)) or float(stored) < 1:
        raise ZooError(f"'{HEADS_KEY}' must be one whole number of at least 1, found {stored}")
    return round(float(stored))


def from_state_dict(arch: NetworkSizes, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_state_dict`; keys it does not know are left alone."""
    try:
        return arch.architecture.naming.read(arch.space, state)
    except SpaceError as error:
        raise ZooError(str(error)) from error


def load_network(arch: NetworkSizes, named: Mapping[str, Tensor]) -> SmallTransformer:
    """One network of `NetworkSizes.space` as a runnable module in evaluation mode."""
    network = SmallTransformer(arch)
    # Casting covers zoos stored in half precision; positions come from the architecture.
    state = {k: v.to(torch.float32) for k, v in to_state_dict(arch, named).items()}
    network.load_state_dict(state)
    return network.eval()
