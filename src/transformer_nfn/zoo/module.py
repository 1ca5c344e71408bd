"""One small transformer as a plain module, with the key names of the authors' files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_nfn.spaces.prefix import under_prefix
from transformer_nfn.zoo.architecture import Architecture
from transformer_nfn.zoo.errors import ZooError


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

    def __init__(self, arch: Architecture, p: float) -> None:
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

    def __init__(self, arch: Architecture) -> None:
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

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.register_buffer("pos_embedding", arch.positions(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """``[batch, tokens, d_model]`` to the same."""
        return vectors + self.pos_embedding[: vectors.shape[1]]


class Classifier(nn.Module):
    """Two linear maps with a ReLU between."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.fc1 = nn.Linear(arch.d_model, arch.d_model)
        self.fc2 = nn.Linear(arch.d_model, arch.classes)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, d_model]`` to logits."""
        out: Tensor = self.fc2(self.fc1(x).relu())
        return out


class SmallTransformer(nn.Module):
    """The network of the zoo; takes images ``[batch, 1, h, w]`` or word vectors."""

    def __init__(self, arch: Architecture, dropout: float = 0.0) -> None:
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


def to_state_dict(arch: Architecture, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One network of `Architecture.space` (no leading axis) under the authors' key names."""
    out: dict[str, Tensor] = {}
    if arch.patch:
        side = round(arch.patch**0.5)
        out["embedding.pos_embedding"] = arch.positions()
        out["embedding.conv1.weight"] = named["embedding.W"].T.reshape(-1, 1, side, side)
        out["embedding.conv1.bias"] = named["embedding.b"]
    for i in range(arch.blocks):
        w = under_prefix(named, f"blocks.{i}.")
        for letter, name in (("Q", "queries"), ("K", "keys"), ("V", "values")):
            out[f"encoder.{i}.attention.{name}.weight"] = w[f"W_{letter}"].mT.flatten(0, 1)
        out[f"encoder.{i}.attention.out_projection.weight"] = w["W_O"].flatten(0, 1).T
        for letter, name in (("A", "fc1"), ("B", "fc2")):
            out[f"encoder.{i}.{name}.weight"] = w[f"W_{letter}"].T
            out[f"encoder.{i}.{name}.bias"] = w[f"b_{letter}"]
    for n in (1, 2):
        out[f"classifier.fc{n}.weight"] = named[f"classifier.W_{n}"].T
        out[f"classifier.fc{n}.bias"] = named[f"classifier.b_{n}"]
    return {name: w.contiguous() for name, w in out.items()}


def from_state_dict(arch: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_state_dict`; keys it does not know are left alone."""
    H, d = arch.heads, arch.d_head

    def take(key: str, *shape: int) -> Tensor:
        if key not in state:
            raise ZooError(f"state dict lacks '{key}'")
        found = state[key].detach()
        if tuple(found.shape) != shape:
            raise ZooError(f"'{key}': expected shape {list(shape)}, found {list(found.shape)}")
        return found

    D, A = arch.d_model, arch.d_ff
    out: dict[str, Tensor] = {}
    if arch.patch:
        side = round(arch.patch**0.5)
        out["embedding.W"] = take("embedding.conv1.weight", D, 1, side, side).flatten(1).T
        out["embedding.b"] = take("embedding.conv1.bias", D)
    for i in range(arch.blocks):
        at = f"encoder.{i}"
        for letter, name in (("Q", "queries"), ("K", "keys"), ("V", "values")):
            w = take(f"{at}.attention.{name}.weight", D, D)
            out[f"blocks.{i}.W_{letter}"] = w.unflatten(0, (H, d)).mT
        w = take(f"{at}.attention.out_projection.weight", D, D)
        out[f"blocks.{i}.W_O"] = w.T.unflatten(0, (H, d))
        out[f"blocks.{i}.W_A"] = take(f"{at}.fc1.weight", A, D).T
        out[f"blocks.{i}.W_B"] = take(f"{at}.fc2.weight", D, A).T
        out[f"blocks.{i}.b_A"] = take(f"{at}.fc1.bias", A)
        out[f"blocks.{i}.b_B"] = take(f"{at}.fc2.bias", D)
    for n, wide in ((1, D), (2, arch.classes)):
        out[f"classifier.W_{n}"] = take(f"classifier.fc{n}.weight", wide, D).T
        out[f"classifier.b_{n}"] = take(f"classifier.fc{n}.bias", wide)
    return {name: out[name].contiguous() for name in arch.space.tensors}


def load_network(arch: Architecture, named: Mapping[str, Tensor]) -> SmallTransformer:
    """One network of `Architecture.space` as a runnable module in evaluation mode."""
    network = SmallTransformer(arch)
    # Casting covers zoos stored in half precision; positions come from the architecture.
    state = {k: v.to(torch.float32) for k, v in to_state_dict(arch, named).items()}
    network.load_state_dict(state)
    return network.eval()
