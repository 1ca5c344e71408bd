"""Frame in which two networks are compared, and the ends of a network in that frame.

What a norm's gain, its bias, LayerNorm's centring and similar symmetries leave free is not
searched for: it is reduced to one value in both networks before they are compared, and fitted to
B's values in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.checkpoints.symmetries import (
    BranchConstant,
    CentredReaders,
    CentredWriters,
    EmbeddingShift,
    KeyBias,
    NeuronPermutation,
    NormBias,
    NormGain,
    PositionBias,
    QueryKeyNormSigns,
    RouterShift,
    Site,
    StreamMap,
    SublayerSigns,
    Symmetry,
    ValueBias,
)
from transformer_nfn.checkpoints.symmetries.base import (
    LONG,
    Sites,
    Weights,
    end_names,
    entries,
    vocabulary_cuts,
)
from transformer_nfn.checkpoints.symmetries.norms import is_biased
from transformer_nfn.checkpoints.symmetries.stream import Cross
from transformer_nfn.functional.description import Transformer

GAUGES: tuple[Symmetry[Any], ...] = (
    QueryKeyNormSigns(),
    SublayerSigns(),
    NormGain(),
    NormBias(),
    CentredReaders(),
    RouterShift(),
    KeyBias(),
    ValueBias(),
    PositionBias(),
    BranchConstant(),
    CentredWriters(),
)
"""Symmetries that are reduced before a comparison, in the order in which they are fitted to B
afterwards: signs before gains, and means last, since shifts of biases change them."""
NEGLIGIBLE = 1e-6
"""Gains smaller than this, relative to the largest, count as zero."""
CHUNK = 8192
"""Entries of a vocabulary that are processed at a time."""


def divides(site: Site, weights: Mapping[str, Tensor]) -> bool:
    """Whether the gains of a norm can be divided by.

    They need not be where the bias of the norm, if there is one, can be moved away first.
    """
    if "norm.b" not in site.names or (is_biased(site) and site.detail.residual is None):
        return True
    gain = weights[site.names["norm.g"]].double().abs()
    return bool(gain.min() > NEGLIGIBLE * gain.max())


def turned(config: Transformer, stream: StreamMap, weights: Weights) -> Weights:
    """Tensors after the stream was mapped."""
    return {n: stream.tensor(n, w) if config.moves(n) else w for n, w in weights.items()}


def usable(sites: Sites, *networks: Mapping[str, Tensor]) -> Sites:
    """The sites at which the weights of all networks let a symmetry act."""
    return [
        (symmetry, site)
        for symmetry, site in sites
        if not isinstance(symmetry, NormGain | CentredReaders)
        or all(divides(site, weights) for weights in networks)
    ]


def into_frame(sites: Sites, weights: Weights) -> None:
    """Reduce the gauges of a part of a network, in place."""
    # Biases of norms first: gains that are zero cannot divide them.
    for symmetry, site in [pair for pair in sites if isinstance(pair[0], NormBias)] + sites:
        weights |= site.put(symmetry.reduce(site, site.pick(weights)))


def out_of_frame(
    sites: Sites, weights: Weights, target: Mapping[str, Tensor], shared: tuple[str, ...] = ()
) -> None:
    """Fit the gauges of a part of a network to those of B, in place.

    Args:
        target: B's tensors as its file has them.
        shared: tensors of other parts; what acts on them is fitted to them alone.
    """
    for symmetry, site in sites:
        a, b = site.pick(weights), site.pick(target)
        common = [k for k, n in site.names.items() if n in shared and k not in symmetry.reads]
        x, y = ({k: w[k] for k in common} if common else w for w in (a, b))
        weights |= site.put(symmetry.act(site, a, symmetry.fit(site, x, y)))


class Ends:
    """Tensors outside the blocks of both networks: embeddings, last norm and output heads.

    Long tensors are processed some entries of the vocabulary at a time.

    Attributes:
        config: A as it will be written.
        a: A's tensors by canonical name, ``head`` among them where it is tied.
        b: B's, of the rows that A has (A's where B has none).
        size: squares of both in the frame of comparison, complete after `cross`.
    """

    def __init__(self, config: Transformer, a: Weights, b: Weights) -> None:
        self.config, self.a, self.b, self.size = config, a, b, 0.0
        names = set(end_names(config).values())
        self._gauges = usable(_inside(GAUGES, config, names), a, b)
        self._shifts = _inside((EmbeddingShift(),), config, names)
        self._orders = _inside((NeuronPermutation(),), config, names)
        zeros = {name: torch.zeros_like(w) for name, w in self._tables(a).items()}
        self._smallest = [self._fit_shifts(self._tables(side), zeros) for side in (a, b)]

    def cross(self) -> Cross:
        """Products of both ends along the stream.

        Without BERT's transform, whose units move along or have an order of their own, and
        without the norm after an encoder, which the blocks of the decoder fold.
        """
        total = Cross(self.config.width)
        for number, rows in enumerate(self._cuts()):
            a, b = (self._framed(side, rows) for side in (self.a, self.b))
            for name, w in a.items():
                copied = name == "head" and (self.config.tied or self.config.mlm is not None)
                left_out = name in self.config.memory_norm or name.startswith("extra.mlm")
                stays = not self.config.moves(name)
                if (number and name not in LONG) or copied or left_out or stays:
                    continue
                if total.add(name, w, b[name]):
                    self.size += float(w.square().sum() + b[name].square().sum())
        return total

    def moved(self, stream: StreamMap, memory: Weights) -> Iterator[tuple[str, Tensor]]:
        """A's ends, turned and as near to B's as they get, by canonical name.

        Args:
            memory: the norm after an encoder, which is none of these.
        """
        orders = self._fit_orders(stream)
        sums = self._gain_sums(stream, orders)
        tables = self._shifted(self._tables(self.a), self._smallest[0])
        tables = turned(self.config, stream, tables)
        shifts = self._fit_shifts(tables, self._tables(self.b))
        dtypes = {name: w.dtype for name, w in self.a.items()}
        long = {name: torch.empty_like(w) for name, w in self.a.items() if name in LONG}
        for number, rows in enumerate(self._cuts()):
            weights, target = self._turned(stream, rows, orders), self._cut(self.b, rows)
            for i, (symmetry, site) in enumerate(self._gauges):
                a, b = site.pick(weights), site.pick(target)
                if isinstance(symmetry, NormGain):
                    g = symmetry.from_sums(a["norm.g"], b["norm.g"], sums[i])
                else:
                    g = symmetry.fit(site, a, b)
                weights |= site.put(symmetry.act(site, a, g))
            weights = self._shifted(weights, shifts)
            weights |= memory
            for name, w in long.items():
                entries(name, w, rows).copy_(weights.pop(name))
            if number == 0:
                yield from weights.items()
        if self.config.tied:
            long.pop("head", None)
        yield from ((name, w.to(dtypes[name])) for name, w in long.items())

    def _cuts(self) -> Iterator[slice]:
        return vocabulary_cuts(self.a, CHUNK)

    def _cut(self, side: Weights, rows: slice) -> Weights:
        """One network's ends, the vocabulary cut to a range, in float64."""
        return {name: entries(name, w, rows).double() for name, w in side.items()}

    def _framed(self, side: Weights, rows: slice) -> Weights:
        """One network's ends in the frame of comparison."""
        weights = self._cut(side, rows)
        into_frame(self._gauges, weights)
        return self._shifted(weights, self._smallest[side is self.b])

    def _turned(self, stream: StreamMap, rows: slice, orders: list[Tensor]) -> Weights:
        """A's ends in B's frame of comparison."""
        weights = turned(self.config, stream, self._framed(self.a, rows))
        for (symmetry, site), order in zip(self._orders, orders, strict=True):
            weights |= site.put(symmetry.act(site, site.pick(weights), order))
        for symmetry, site in self._gauges:
            if isinstance(symmetry, NormGain):  # the map leaves signs in BERT's transform
                weights |= site.put(symmetry.reduce(site, site.pick(weights)))
        return weights

    def _gain_sums(self, stream: StreamMap, orders: list[Tensor]) -> dict[int, Tensor]:
        """Sums from which free gains are fitted, over the whole vocabulary."""
        sums: dict[int, Tensor] = {}
        for number, rows in enumerate(self._cuts()):
            weights, target = self._turned(stream, rows, orders), self._cut(self.b, rows)
            for i, (symmetry, site) in enumerate(self._gauges):
                if not isinstance(symmetry, NormGain):
                    continue
                a, b = site.pick(weights), site.pick(target)
                if number:  # all readers but the longest were complete before
                    a = {k: w for k, w in a.items() if k in ("norm.g", "norm.b", "head")}
                sums[i] = sums.get(i, 0) + symmetry.sums(site, a, b)
        return sums

    def _tables(self, side: Weights) -> Weights:
        """Embeddings that a vector may be moved between; of tokens and types their means."""
        names = [name for _, site in self._shifts for name in site.names.values()]
        if self.config.inputs == "tokens":
            tables = {n: side[n].mean(0, keepdim=True, dtype=torch.float64) for n in names}
        else:
            tables = {n: side[n].double() for n in names}
        if self.config.hides_mean_of_embeddings:
            tables = {n: w - w.mean(-1, keepdim=True) for n, w in tables.items()}
        return tables

    def _fit_shifts(self, a: Weights, b: Weights) -> list[Weights]:
        return [s.fit(site, site.pick(a), site.pick(b)) for s, site in self._shifts]

    def _shifted(self, weights: Weights, shifts: list[Weights]) -> Weights:
        for (symmetry, site), g in zip(self._shifts, shifts, strict=True):
            weights = weights | site.put(symmetry.act(site, site.pick(weights), g))
        return weights

    def _fit_orders(self, stream: StreamMap) -> list[Tensor]:
        """Orders of the units of BERT's transform, where no tie fixes them."""
        if not self._orders:
            return []
        first = next(self._cuts())
        a = turned(self.config, stream, self._framed(self.a, first))
        b = self._framed(self.b, first)
        return [s.fit(site, site.pick(a), site.pick(b)) for s, site in self._orders]


def _inside(symmetries: tuple[Symmetry[Any], ...], config: Transformer, names: set[str]) -> Sites:
    """Sites of symmetries whose tensors are all among some."""
    return [
        (symmetry, site)
        for symmetry in symmetries
        for site in symmetry.sites(config)
        if names.issuperset(site.names.values())
    ]
