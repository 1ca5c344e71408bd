"""How much do seven statistics of each tensor say? The paper's StatNN baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.models.network import blocks_of, flat
from transformer_nfn.models.paper_sizes import paper_block, paper_sizes
from transformer_nfn.models.plain import (
    PlainModel,
    block_tensors,
    relu_mlp,
    same_batch,
)
from transformer_nfn.models.statistics import COUNT, pieces, statistics
from transformer_nfn.spaces import WeightSpace

STATISTICS = "statistics"
"""The part of a network that holds what `StatNN` reads of it, where it was computed before."""

# W_1, W_2, b_1, b_2: what a classifier of two layers has.
CLASSIFIER_TENSORS = 4


class StatNN(PlainModel):
    """Mean, variance and quartiles of each tensor, an MLP on them (Unterthiner et al., 2020).

    The embedding is read whole, as in the paper. The statistics do not change while the model
    learns: `prepared` keeps them beside the weights, and they are not computed again.

    Args:
        space: of one block.
        blocks: how many there are.
        embedding: numbers in the embedding of a network; None leaves it out.
        classifier: numbers in each tensor of the classifier, names in alphabetical order
            (W_1, W_2, b_1, b_2); or in all together, if it comes as a dict of four tensors;
            None leaves it out.
        hidden: width of the layers on statistics.
        embedding_hidden: width of the layer on the embedding.
    """

    def __init__(
        self,
        space: WeightSpace,
        blocks: int = 2,
        *,
        embedding: int | None = None,
        classifier: int | Sequence[int] | None = None,
        hidden: int = 256,
        embedding_hidden: int = 64,
    ) -> None:
        super().__init__()
        if blocks < 1 or hidden < 1:
            raise SpaceError(f"a model needs blocks and neurons, found {blocks} and {hidden}")
        if not isinstance(classifier, int | None):
            classifier = list(classifier)
        self.space, self._number = space, blocks
        self._config = dict(
            blocks=blocks,
            embedding=embedding,
            classifier=classifier,
            hidden=hidden,
            embedding_hidden=embedding_hidden,
        )
        self._sizes = classifier
        tensors = CLASSIFIER_TENSORS if isinstance(classifier, int) else len(classifier or [])
        # Where blocks, classifier and embedding stand among the features.
        self._widths = (blocks * len(space.tensors) * COUNT, tensors * COUNT, embedding or 0)
        self.encoder = relu_mlp(self._widths[0], hidden)
        self.classifier = relu_mlp(self._widths[1], hidden) if tensors else None
        self.embedding = nn.Linear(embedding, embedding_hidden) if embedding else None
        parts = hidden * (2 if tensors else 1) + (embedding_hidden if embedding else 0)
        self.head = nn.Linear(parts, 1)

    @classmethod
    def paper(cls, task: str = "ag_news") -> Self:
        """The paper's baseline: 168,449 parameters on AG News, 203,393 on MNIST."""
        sizes = paper_sizes(task)
        return cls(paper_block(), embedding=sizes.embedding, classifier=sizes.classifier)

    def features(self, network: Mapping[str, object]) -> Tensor:
        """Statistics of blocks and classifier, and the embedding as it is, ``[batch, F]``."""
        parts = []
        for weights in blocks_of(network, self._number):
            parts += [statistics(x) for x in block_tensors(self.space, weights)]
        if self.classifier is not None:
            parts += [statistics(x) for x in self._classifier_tensors(network)]
        if self.embedding is not None:
            parts.append(flat(network, "embedding", self._widths[2]))
        return torch.cat(same_batch(parts), -1)

    def logits_from_features(self, features: Tensor) -> Tensor:
        """The number before the Sigmoid, from what `features` gives."""
        blocks, classifier, embedding = pieces(features, self._widths)
        parts = [self.encoder(blocks)]
        if self.classifier is not None:
            parts.append(self.classifier(classifier))
        if self.embedding is not None:
            parts.append(self.embedding(embedding))
        return self.read(self.head, [torch.relu(x) for x in parts])

    @torch.no_grad()
    def prepared(self, network: Mapping[str, Any]) -> dict[str, Any]:
        """The network with its statistics beside its weights, so that they are computed once."""
        return {**network, STATISTICS: self._read(network)}

    def logits(self, network: Mapping[str, Any]) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        return self.logits_from_features(self._read(network))

    def _read(self, network: Mapping[str, Any]) -> Tensor:
        found: Tensor | None = network.get(STATISTICS)
        return self.features(network) if found is None else found

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that build this model, as JSON values."""
        return {"space": self.space.to_json(), **self._config}

    def _classifier_tensors(self, network: Mapping[str, object]) -> list[Tensor]:
        if not isinstance(self._sizes, int):
            sizes = tuple(self._sizes or ())
            return pieces(flat(network, "classifier", sum(sizes)), sizes)
        whole = flat(network, "classifier", self._sizes)
        given = network["classifier"]
        if not isinstance(given, Mapping) or len(given) != CLASSIFIER_TENSORS:
            raise SpaceError(
                f"StatNN reads 'classifier' as a dict of {CLASSIFIER_TENSORS} tensors, or needs "
                "the size of each tensor when it is built"
            )
        sizes = tuple(given[name][0].numel() for name in sorted(given))
        return pieces(whole, sizes)
