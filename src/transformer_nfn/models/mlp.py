"""How well do the weights do as a plain vector? The paper's MLP baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.models.network import blocks_of, flat
from transformer_nfn.models.paper_sizes import paper_block, paper_sizes
from transformer_nfn.models.plain import PlainModel, block_tensors, relu_mlp
from transformer_nfn.spaces import WeightSpace


class MLP(PlainModel):
    """A linear layer on each flattened part of the network, one head on all of them.

    Knows nothing of the symmetry: two networks that are one function are two vectors to it.

    Args:
        space: of one block.
        blocks: how many there are.
        embedding: numbers in the embedding of a network; None leaves it out.
        classifier: numbers in the classifier of a network; None leaves it out.
        hidden: width of every layer.
    """

    def __init__(
        self,
        space: WeightSpace,
        blocks: int = 2,
        *,
        embedding: int | None = None,
        classifier: int | None = None,
        hidden: int = 50,
    ) -> None:
        super().__init__()
        if blocks < 1 or hidden < 1:
            raise SpaceError(f"a model needs blocks and neurons, found {blocks} and {hidden}")
        self.space = space
        self._config = dict(
            blocks=blocks, embedding=embedding, classifier=classifier, hidden=hidden
        )
        self.blocks = nn.ModuleList(nn.Linear(space.num_weights, hidden) for _ in range(blocks))
        self.neck = nn.Linear(blocks * hidden, hidden)
        self.classifier = relu_mlp(classifier, hidden) if classifier is not None else None
        self.embedding = nn.Linear(embedding, hidden) if embedding is not None else None
        parts = 1 + (classifier is not None) + (embedding is not None)
        self.head = nn.Linear(parts * hidden, 1)

    @classmethod
    def paper(cls, task: str = "ag_news") -> Self:
        """The paper's baseline: 896,051 parameters on AG News, 933,251 on MNIST."""
        sizes = paper_sizes(task)
        return cls(paper_block(), embedding=sizes.embedding, classifier=sum(sizes.classifier))

    def logits(self, network: Mapping[str, object]) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        blocks = blocks_of(network, len(self.blocks))
        vectors = []
        for layer, weights in zip(self.blocks, blocks, strict=True):
            flattened = torch.cat(block_tensors(self.space, weights), -1)
            vectors.append(torch.relu(layer(flattened)))
        parts = [self.neck(torch.cat(vectors, -1))]
        if self.classifier is not None:
            width = self._config["classifier"] or 0
            parts.append(self.classifier(flat(network, "classifier", width)))
        if self.embedding is not None:
            width = self._config["embedding"] or 0
            parts.append(self.embedding(flat(network, "embedding", width)))
        # Without this ReLU the last layers would multiply into one.
        return self.read(self.head, [torch.relu(x) for x in parts])

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model, as JSON values."""
        return {"space": self.space.to_json(), **self._config}
