"""The paper's neural baselines: an MLP on flattened weights, and StatNN on their statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.models.batch import Batch, paper_block, paper_layout
from transformer_nfn.models.predictor import STATISTICS as STATISTICS_OF_TENSORS
from transformer_nfn.models.predictor import LearningSet, Variant, predictor
from transformer_nfn.models.pretrained import Inputs, Pretrained
from transformer_nfn.models.statistics import COUNT, statistics
from transformer_nfn.spaces import WeightSpace
from transformer_nfn.spaces.axis import under_prefix

STATISTICS = "statistics"
"""Key of a network that holds its `StatNN.features`, where they were computed before."""
CLASSIFIER_TENSORS = 4


@predictor("mlp")
class MLP(Pretrained):
    """A linear layer on each flattened part of the network, and one head on all of them.

    Not invariant: two networks that compute the same function are two vectors to it.

    >>> sum(p.numel() for p in MLP.paper("ag_news").parameters())
    896051

    Args:
        space: weight space of one block.
        blocks: number of blocks.
        embedding: weights in the embedding of a network; None leaves it out.
        classifier: weights in the classifier of a network; None leaves it out.
        hidden: width of every layer.
        authors: layers as in the authors' code: the first reads all blocks, the classifier's has
            one more, and no ReLU follows the embedding's. There are as many parameters.
    """

    title, place = "MLP", 1
    variants: ClassVar = {"authors": Variant("MLP, authors' layers", {"authors": True})}

    def __init__(
        self,
        space: WeightSpace,
        blocks: int = 2,
        *,
        embedding: int | None = None,
        classifier: int | None = None,
        hidden: int = 50,
        authors: bool = False,
    ) -> None:
        super().__init__()
        if blocks < 1 or hidden < 1:
            raise SpaceError(f"a model needs blocks and neurons, found {blocks} and {hidden}")
        self.space = space
        self._config = dict(
            blocks=blocks, embedding=embedding, classifier=classifier, hidden=hidden,
            authors=authors,
        )  # fmt: skip
        together = blocks if authors else 1  # blocks that a layer reads
        self.blocks = nn.ModuleList(
            nn.Linear(together * space.num_weights, hidden) for _ in range(blocks // together)
        )
        self.neck = nn.Linear(blocks // together * hidden, hidden)
        layers = 3 if authors else 2
        self.classifier = _relu_mlp(classifier, hidden, layers) if classifier is not None else None
        self.embedding = nn.Linear(embedding, hidden) if embedding is not None else None
        parts = 1 + (classifier is not None) + (embedding is not None)
        self.head = nn.Linear(parts * hidden, 1)

    @classmethod
    def paper(cls, task: str = "ag_news") -> Self:
        """The paper's baseline: 896,051 parameters on AG News, 933,251 on MNIST."""
        layout = paper_layout(task)
        embedding, classifier = map(layout.part, ("embedding", "classifier"))
        return cls(paper_block(), embedding=embedding, classifier=classifier)

    def logits(self, batch: Batch) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        blocks = batch.blocks(self._config["blocks"])
        read = [torch.cat(_block_tensors(self.space, weights), -1) for weights in blocks]
        if self._config["authors"]:
            read = [torch.cat(read, -1)]
        vectors = [torch.relu(layer(x)) for layer, x in zip(self.blocks, read, strict=True)]
        parts = [torch.relu(self.neck(torch.cat(vectors, -1)))]
        if self.classifier is not None:
            width = self._config["classifier"] or 0
            parts.append(torch.relu(self.classifier(batch.flat("classifier", width))))
        if self.embedding is not None:
            width = self._config["embedding"] or 0
            vector = self.embedding(batch.flat("embedding", width))
            # Without a ReLU this layer and the head multiply into one.
            parts.append(vector if self._config["authors"] else torch.relu(vector))
        return _head(self.head, parts)


@predictor("statnn")
class StatNN(Pretrained):
    """An MLP on mean, variance and quartiles of each tensor (Unterthiner et al., 2020).

    The embedding is read entry by entry, as in the paper. The statistics are constants during
    training: `prepared` stores them beside the weights.

    >>> sum(p.numel() for p in StatNN.paper("ag_news").parameters())
    168449

    Args:
        space: weight space of one block.
        blocks: number of blocks.
        embedding: weights in the embedding of a network; None leaves it out.
        classifier: weights in each tensor of the classifier, names in alphabetical order
            (W_1, W_2, b_1, b_2); or their sum, if the classifier is a dict of four tensors;
            None leaves it out.
        hidden: width of the layers on statistics.
        embedding_hidden: width of the layer on the embedding.
        authors: no ReLU behind the layer on the embedding, as in the authors' code.
    """

    title, place = "StatNN", 2
    variants: ClassVar = {"authors": Variant("StatNN, authors' layers", {"authors": True})}
    reads = STATISTICS_OF_TENSORS

    def __init__(
        self,
        space: WeightSpace,
        blocks: int = 2,
        *,
        embedding: int | None = None,
        classifier: int | Sequence[int] | None = None,
        hidden: int = 256,
        embedding_hidden: int = 64,
        authors: bool = False,
    ) -> None:
        super().__init__()
        if blocks < 1 or hidden < 1:
            raise SpaceError(f"a model needs blocks and neurons, found {blocks} and {hidden}")
        if not isinstance(classifier, int | None):
            classifier = list(classifier)
        self.space = space
        self._config = dict(
            blocks=blocks,
            embedding=embedding,
            classifier=classifier,
            hidden=hidden,
            embedding_hidden=embedding_hidden,
            authors=authors,
        )
        self._classifier_sizes = classifier
        tensors = CLASSIFIER_TENSORS if isinstance(classifier, int) else len(classifier or [])
        # Numbers of features of blocks, classifier and embedding.
        self._widths = (blocks * len(space.tensors) * COUNT, tensors * COUNT, embedding or 0)
        self.encoder = _relu_mlp(self._widths[0], hidden)
        self.classifier = _relu_mlp(self._widths[1], hidden) if tensors else None
        self.embedding = nn.Linear(embedding, embedding_hidden) if embedding else None
        parts = hidden * (2 if tensors else 1) + (embedding_hidden if embedding else 0)
        self.head = nn.Linear(parts, 1)

    @classmethod
    def paper(cls, task: str = "ag_news") -> Self:
        """The paper's baseline: 168,449 parameters on AG News, 203,393 on MNIST."""
        layout = paper_layout(task)
        last = under_prefix(layout.shapes, "classifier.")
        classifier = [math.prod(last[name]) for name in sorted(last)]
        return cls(paper_block(), embedding=layout.part("embedding"), classifier=classifier)

    def features(self, batch: Batch) -> Tensor:
        """Statistics of blocks and classifier, and the entries of the embedding, ``[batch, F]``."""
        parts = []
        for weights in batch.blocks(self._config["blocks"]):
            parts += [statistics(x) for x in _block_tensors(self.space, weights)]
        if self.classifier is not None:
            parts += [statistics(x) for x in self._classifier_tensors(batch)]
        if self.embedding is not None:
            parts.append(batch.flat("embedding", self._widths[2]))
        return torch.cat(parts, -1)

    def logits(self, batch: Batch) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        blocks, classifier, embedding = self._features(batch).split(self._widths, -1)
        parts = [torch.relu(self.encoder(blocks))]
        if self.classifier is not None:
            parts.append(torch.relu(self.classifier(classifier)))
        if self.embedding is not None:
            vector = self.embedding(embedding)
            parts.append(vector if self._config["authors"] else torch.relu(vector))
        return _head(self.head, parts)

    @torch.no_grad()
    def prepared(self, batch: Batch, positions: Tensor | None = None) -> Batch:
        """The networks with their statistics beside their weights."""
        return batch.plus(STATISTICS, self._features(batch))

    def start(
        self, train: Sequence[LearningSet], val: Sequence[LearningSet], seed: int, epochs: int, *,
        fresh: bool,
    ) -> Inputs:  # fmt: skip
        """Drop the weights: the statistics are enough."""
        first, second = ([data.network.only(STATISTICS) for data in part] for part in (train, val))
        return first, second

    def _features(self, batch: Batch) -> Tensor:
        stored: Tensor | None = batch.computed.get(STATISTICS)
        return self.features(batch) if stored is None else stored

    def _classifier_tensors(self, batch: Batch) -> list[Tensor]:
        if not isinstance(self._classifier_sizes, int):
            sizes = self._classifier_sizes or []
            return list(batch.flat("classifier", sum(sizes)).split(sizes, -1))
        joined = batch.flat("classifier", self._classifier_sizes)
        shapes = under_prefix(batch.layout.shapes, "classifier.")
        if len(shapes) != CLASSIFIER_TENSORS:
            raise SpaceError(
                f"StatNN reads {CLASSIFIER_TENSORS} tensors of a classifier, or needs the size of "
                f"each when it is built; found {len(shapes)}"
            )
        return list(joined.split([math.prod(shapes[name]) for name in sorted(shapes)], -1))


def _head(head: nn.Module, parts: list[Tensor]) -> Tensor:
    out: Tensor = head(torch.cat(parts, -1))
    return out.squeeze(-1)


def _relu_mlp(width: int, hidden: int, layers: int = 2) -> nn.Sequential:
    widths = [width, *[hidden] * (layers - 1)]  # weights are drawn from the first layer on
    return nn.Sequential(*[m for n in widths for m in (nn.Linear(n, hidden), nn.ReLU())][:-1])


def _block_tensors(space: WeightSpace, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of a block in the order of its space, each ``[batch, numbers]``."""
    space.check(weights, finite=False)
    for name in space.tensors:
        if weights[name].shape[1] != 1:
            raise SpaceError(
                f"tensor '{name}' must have one channel to be read as weights, "
                f"found {weights[name].shape[1]}"
            )
    return [weights[name].flatten(1) for name in space.tensors]
