"""The paper's model: from the weights of a transformer to a number between 0 and 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from transformer_nfn.errors import SpaceError
from transformer_nfn.known_tasks import BLOCKS
from transformer_nfn.models.batch import Batch, paper_block, paper_layout
from transformer_nfn.models.predictor import OTHERS, LearningSet, Variant, predictor
from transformer_nfn.models.pretrained import Pretrained
from transformer_nfn.nn import Activation, Equivariant, Invariant, ReadThrough
from transformer_nfn.spaces import Weights, WeightSpace

COMPONENTS = ("encoder", "classifier", "embedding")


class BlockEncoder(nn.Module):
    """Equivariant layers with ReLU, an invariant layer and LayerNorm: each block to ``[batch, n]``.

    Every block has its own parameters; the layers of several blocks run side by side as
    groups of channels, so that reading two blocks takes no more calls than reading one.

    >>> from transformer_nfn.spaces import attention_block
    >>> space = attention_block(4, 2, 2, 2, 3)
    >>> encoder = BlockEncoder(space, [5], 1, {"pool": "mean"})
    >>> encoder([space.randn(7)])[0].shape
    torch.Size([7, 5])

    Args:
        space: weight space of one block.
        channels: of each equivariant layer, for one block; the last one is also n.
        blocks: number of blocks.
        options: options of the layers (``rank``, ``gated``, ``quadratic``, ``pool``, ``init``).
    """

    def __init__(
        self, space: WeightSpace, channels: Sequence[int], blocks: int, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.space, self.blocks = space, blocks
        wide = [blocks, *(c * blocks for c in channels)]
        self.equivariant = nn.ModuleList(
            Equivariant(space, d, e, groups=blocks, **options) for d, e in pairwise(wide)
        )
        self.activation = Activation(space)
        rest = {k: v for k, v in options.items() if k != "gated"}
        self.invariant = Invariant(space, wide[-1], wide[-1], groups=blocks, **rest)
        self.norms = nn.ModuleList(nn.LayerNorm(channels[-1]) for _ in range(blocks))
        last = self.equivariant[-1]
        assert isinstance(last, Equivariant)
        # Only a choice of how to compute; parameters and outputs are the same.
        self.read_through = (
            ReadThrough(last, self.activation, self.invariant)
            if ReadThrough.fits(last, self.invariant)
            else None
        )

    def forward(self, blocks: Sequence[Weights]) -> list[Tensor]:
        """For each block, weights ``[batch, 1, *axes]``, a vector ``[batch, n]``."""
        self._check(blocks)
        if self.read_through is not None and not torch.is_grad_enabled():
            features = self.read_through(*blocks)
        elif self.read_through is not None:
            features = self.read_through(self._side_by_side(blocks))
        else:
            weights = self._side_by_side(blocks)
            for layer in self.equivariant:
                weights = self.activation(layer(weights))
            features = self.invariant(weights)
        vectors = features.unflatten(1, (self.blocks, -1)).unbind(1)
        return [norm(x) for norm, x in zip(self.norms, vectors, strict=True)]

    def _check(self, blocks: Sequence[Weights]) -> None:
        for weights in blocks:
            self.space.check(weights, finite=False)
            first = next(iter(weights.values()))
            if first.shape[1] != 1:
                raise SpaceError(f"the model reads 1 channel, the weights have {first.shape[1]}")

    def _side_by_side(self, blocks: Sequence[Weights]) -> Weights:
        if len(blocks) == 1:
            return dict(blocks[0])
        # In memory one block after the other, which is how the layers read them.
        return {
            name: torch.cat([w[name].transpose(0, 1) for w in blocks]).transpose(0, 1)
            for name in self.space.tensors
        }


@predictor("transformer_nfn")
class TransformerNFN(Pretrained):
    """Transformer-NFN: embedding MLP, encoder of the blocks, classifier MLP, one head, Sigmoid.

    Reads the tensors of a `Batch` below ``blocks.0.`` and on, ``classifier.`` and ``embedding.``,
    as far as the model has the component.

    >>> sum(p.numel() for p in TransformerNFN.paper("ag_news").parameters())
    1804741

    Args:
        space: weight space of one block; every block has its own layers.
        blocks: number of blocks.
        channels: of the equivariant layers, ``[10]`` or ``[10, 10]``; the last one is also the
            number of invariants of each block.
        embedding: weights in the embedding of a network; None leaves it out.
        classifier: weights in the classifier of a network; None leaves it out.
        encoder: whether the blocks are read at all (False for the ablation).
        features: width of each component's vector and of the MLPs.
        rank: of the layers; this and what follows as in `transformer_nfn.nn.Equivariant`.
        gated: whether the layers gate tensors with a linear axis.
        quadratic: whether the layers also read contractions along permuted axes.
        pool: ``mean`` or ``sum``.
        init: ``unit`` or ``xavier``.
        authors: another ReLU behind the MLP of the classifier, as in the authors' code.
    """

    title, place = "Transformer-NFN", 0
    variants: ClassVar = {"authors": Variant("Transformer-NFN, authors' layers", {"authors": True})}
    invariant = True
    usual: ClassVar[Mapping[str, Any]] = {"pool": "sum", "init": "xavier"}
    """Options of a predictor that is trained by name."""

    def __init__(
        self,
        space: WeightSpace,
        blocks: int = 2,
        channels: Sequence[int] = (10,),
        *,
        embedding: int | None = None,
        classifier: int | None = None,
        encoder: bool = True,
        features: int = 10,
        rank: int | None = None,
        gated: bool = False,
        quadratic: bool = False,
        pool: str = "mean",
        init: str = "unit",
        authors: bool = False,
    ) -> None:
        super().__init__()
        if not channels or blocks < 1:
            raise SpaceError(
                f"a model needs blocks and channels, found {blocks} and {list(channels)}"
            )
        if not encoder and embedding is None and classifier is None:
            raise SpaceError("a model needs at least one of encoder, classifier and embedding")
        self.space = space
        options = dict(rank=rank, gated=gated, quadratic=quadratic, pool=pool, init=init)
        self._config: dict[str, Any] = dict(
            blocks=blocks,
            channels=list(channels),
            embedding=embedding,
            classifier=classifier,
            encoder=encoder,
            features=features,
            authors=authors,
            **options,
        )
        self.encoders = nn.ModuleList()
        if encoder:
            # Layers of low rank have one dictionary per block and run one block at a time.
            together = blocks if rank is None else 1
            self.encoders.extend(
                BlockEncoder(space, channels, together, options) for _ in range(blocks // together)
            )
            self.neck = _neck(blocks * channels[-1], features)
        self.classifier = _mlp(classifier, features, 3) if classifier is not None else None
        if authors and self.classifier is not None:
            self.classifier.append(nn.ReLU())
        self.embedding = _mlp(embedding, features, 1) if embedding is not None else None
        parts = encoder + (classifier is not None) + (embedding is not None)
        self.head = nn.Linear(parts * features, 1)

    @classmethod
    def of(cls, data: LearningSet, **options: Any) -> Self:
        """A model for networks like these; ``components`` names the parts that are read."""
        components = options.pop("components", None)
        layout = data.network.layout
        sizes: dict[str, Any] = {part: layout.part(part) for part in ("embedding", "classifier")}
        assert data.block_space is not None
        if components is not None:
            sizes = {part: n if part in components else None for part, n in sizes.items()}
        return cls(
            data.block_space,
            layout.depth,
            options.pop("channels", [10]),
            encoder=components is None or "encoder" in components,
            **sizes,
            **{**cls.usual, **options},
        )

    @classmethod
    def paper(
        cls,
        task: str = "ag_news",
        channels: Sequence[int] = (10,),
        components: Sequence[str] | None = None,
        **options: Any,
    ) -> Self:
        """The authors' model: 1,804,741 parameters on AG News, 1,812,181 on MNIST.

        D = 32, two heads of 16, hidden width 64, two blocks; sums instead of means and the
        authors' initialisation.

        Args:
            task: ``ag_news`` or ``mnist``.
            channels: ``[10]``; the paper's ablation has ``[3]`` to ``[15, 15]``.
            components: any of ``encoder``, ``classifier``, ``embedding``; by default all that the
                task has.
            options: anything the constructor takes, e.g. ``pool="mean", init="unit"``.
        """
        layout = paper_layout(task)
        chosen = [c for c in COMPONENTS if c == "encoder" or layout.part(c) is not None]
        if components is not None:
            for name in components:
                if name not in chosen:
                    raise SpaceError(f"'{task}' has {', '.join(chosen)}, found {name!r}")
            chosen = list(components)
        return cls(
            paper_block(),
            BLOCKS,
            channels,
            embedding=layout.part("embedding") if "embedding" in chosen else None,
            classifier=layout.part("classifier") if "classifier" in chosen else None,
            encoder="encoder" in chosen,
            **{"pool": "sum", "init": "xavier", **options},
        )

    def logits(self, batch: Batch) -> Tensor:
        """The number before the Sigmoid, ``[batch]``."""
        parts = []
        if self.encoders:
            blocks = batch.blocks(self._config["blocks"])
            size = len(blocks) // len(self.encoders)
            vectors: list[Tensor] = []
            for i, encode in enumerate(self.encoders):
                vectors += encode(blocks[i * size : (i + 1) * size])
            parts.append(self.neck(torch.cat(vectors, -1)))
        if self.classifier is not None:
            parts.append(self.classifier(batch.flat("classifier", _width(self.classifier))))
        if self.embedding is not None:
            parts.append(self.embedding(batch.flat("embedding", _width(self.embedding))))
        out: Tensor = self.head(torch.cat(parts, -1))
        return out.squeeze(-1)


@predictor("transformer_nfn_gated")
class GatedTransformerNFN(TransformerNFN):
    """`TransformerNFN` with gates and products of two tensors, and means instead of sums."""

    title, place = "Transformer-NFN, gated", OTHERS
    variants: ClassVar = {}
    usual: ClassVar[Mapping[str, Any]] = {
        "pool": "mean", "init": "unit", "gated": True, "quadratic": True,
    }  # fmt: skip


def _neck(width: int, features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, features),
        nn.LayerNorm(features),
        nn.ReLU(),
        nn.Linear(features, features),
        nn.LayerNorm(features),
        nn.ReLU(),
        nn.Linear(features, features),
    )


def _mlp(width: int, features: int, layers: int) -> nn.Sequential:
    modules: list[nn.Module] = [nn.Linear(width, features)]
    for _ in range(layers - 1):
        modules += [nn.ReLU(), nn.Linear(features, features)]
    return nn.Sequential(*modules)


def _width(mlp: nn.Module) -> int:
    first = next(iter(mlp.children()))
    assert isinstance(first, nn.Linear)
    return first.in_features
