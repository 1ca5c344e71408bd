"""Base class of models that read networks of one task, whatever their width, heads and depth."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.functional import sinusoids
from transformer_nfn.models.batch import Batch, paper_block
from transformer_nfn.models.predictor import LearningSet
from transformer_nfn.models.pretrained import Pretrained
from transformer_nfn.spaces import WeightSpace

MAX_TOKENS = 49
"""Most tokens of a generated input: as many as an image of the paper has."""


class TaskReader(Pretrained):
    """A model for networks of one task, of any width, number of heads and depth.

    Subclasses set ``head`` and define `features`, or define `logits`.

    Args:
        space: weight space of one block of the training networks; None for the paper's block.
        images: whether networks have an embedding of patches.
        sizes: the other arguments of the model, whole numbers; ``tokens`` is one of them.
    """

    head: nn.Module
    any_size = True
    stacked = False  # each seed has its own probes

    def __init__(self, space: WeightSpace | None, images: bool, **sizes: int) -> None:
        super().__init__()
        self.space = paper_block() if space is None else space
        for name, size in sizes.items():
            if type(size) is not int or size < 0:
                raise SpaceError(f"'{name}' expected a whole number, found {str(size)[:40]}")
        self._config = {**sizes, "images": images}
        self._positions: dict[tuple[int, torch.device], Tensor] = {}

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A model for networks like these."""
        shapes = data.network.layout.shapes
        patches = shapes.get("embedding.W")
        sizes: dict[str, Any] = {
            "tokens": min(data.tokens or MAX_TOKENS, MAX_TOKENS),
            "width": shapes["classifier.W_1"][0] if patches is None else patches[0],
            "classes": shapes["classifier.b_2"][0],
            "images": patches is not None,
        }
        return cls(data.block_space, **(sizes | options))

    def features(self, batch: Batch) -> Tensor:
        """Inputs of the head, ``[batch, F]``; F is the same for networks of any size."""
        raise NotImplementedError

    def logits(self, batch: Batch) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        out: Tensor = self.head(self.features(batch))
        return out.squeeze(-1)

    def _where(self, batch: Batch, given: Tensor | None = None) -> Tensor:
        """The fixed positions for networks of this width, made once on each device."""
        like, (width, _) = batch.weights, batch.layout.shapes["classifier.W_1"]
        if given is not None:
            return given.to(like)
        key = (width, like.device)
        if key not in self._positions:
            made = sinusoids(self._config["tokens"], width)
            self._positions[key] = made.to(like.device, like.dtype)
        return self._positions[key].to(like.dtype)
