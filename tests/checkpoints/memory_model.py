"""A checkpoint of a real family in memory: what `open_model` gives, without a file."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from transformer_nfn.checkpoints.disguises import Disguise
from transformer_nfn.functional.description import Transformer
from transformer_nfn.io.checkpoint import Checkpoint
from transformer_nfn.io.tensor_files import InMemory


class MemoryModel:
    """Canonical tensors with a description, read as a file would be."""

    def __init__(self, description: Transformer, tensors: dict[str, Tensor], where: str = "memory"):
        self.description = replace(
            description, tensors={n: tuple(w.shape) for n, w in tensors.items()}
        )
        self.tensors, self.names, self.where = tensors, self.description.tensors, where
        self.path = Path(where)
        self.dtype = next(iter(tensors.values())).dtype
        self.checkpoint = Checkpoint(where, InMemory(tensors))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].clone()

    def stored(self, name: str) -> Tensor:
        return self[name]

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {n: self.tensors[n].clone().to(dtype or self.tensors[n].dtype) for n in names}

    def to(self, dtype: torch.dtype) -> "MemoryModel":
        return MemoryModel(self.description, {n: w.to(dtype) for n, w in self.tensors.items()})

    def changed(self, **tensors: Tensor) -> "MemoryModel":
        return MemoryModel(self.description, {**self.tensors, **tensors})

    @staticmethod
    def of(model) -> "MemoryModel":
        return MemoryModel(model.description, model.read(model.names))


def disguised(
    model: MemoryModel, seed: int = 0, *, condition: float = 10.0, keep_tie: bool = False
) -> MemoryModel:
    """A random disguise, rounded to the model's dtype."""
    generator = torch.Generator().manual_seed(seed)
    disguise = Disguise(model.description, model, generator, condition=condition, keep_tie=keep_tie)
    tensors = {name: w.to(model.dtype) for name, w in disguise}
    for name in model.names:
        if name.startswith("kept."):
            tensors[name] = model[name]
    return MemoryModel(disguise.description, tensors)


def noisy(
    model: MemoryModel, share: float, only: set[str] | None = None, seed: int = 0
) -> MemoryModel:
    """Every weight (or those of some tensors) moved by a share of its size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, w in model.tensors.items():
        if only is None or name in only:
            noise = torch.randn(w.shape, generator=generator, dtype=torch.float64)
            tensors[name] = (w.double() * (1 + share * noise)).to(w.dtype)
    return model.changed(**tensors)
