"""Plan of an equivariant layer, as data: one linear map per level.

A *level* is a set of permuted axes, closed under "belongs to". At each level every source whose
permuted axes include it is pooled over its other permuted axes and mapped linearly; the result is
broadcast onto every target whose permuted axes include the level. Tensors with a linear axis have
separate levels for each family. (Theorem "equivariant layer" of the paper; for its block the levels
are ∅, neuron, feature, feature+neuron, and head, head+feature.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

from transformer_nfn.errors import SpaceError
from transformer_nfn.nn.sources import (
    Family,
    Source,
    contraction_sources,
    family_of,
    product_source,
    tensor_source,
)
from transformer_nfn.spaces import WeightSpace

RANK = "rank"
"""The label that replaces free axes in layers of low rank."""


@dataclass(frozen=True)
class Target:
    """A tensor that a layer writes: ``labels`` in its order, the free ones in ``free``."""

    name: str
    labels: tuple[str, ...]
    perms: tuple[str, ...]
    carried: tuple[str, ...]
    private: str | None
    free: tuple[str, ...]
    sizes: Mapping[str, int]
    family: Family | None

    @property
    def features(self) -> int:
        """Numbers at each place of its permuted axes, per channel."""
        return prod(self.sizes[a] for a in self.free)


@dataclass(frozen=True)
class Term:
    """One source seen from one level.

    Attributes:
        source: the input.
        pattern: view of axes that occur twice, ``"stream:diagonal"``; else empty.
        same: pairs of labels that are set equal (diagonals and traces).
        kept: for each axis of the level the label that remains.
        pooled: number of entries summed by pooling.
        scale: factor that makes the sum a mean (and a product of unit scale).
        variance: of the scaled feature, for independent weights of unit scale.
        features: numbers per place and channel.
    """

    source: Source
    pattern: str
    same: tuple[tuple[str, str], ...]
    kept: tuple[str, ...]
    pooled: int
    scale: float
    variance: float
    features: int

    @property
    def name(self) -> str:
        """``W_Q·W_K[stream:diagonal]``."""
        return f"{self.source.name}[{self.pattern}]" if self.pattern else self.source.name


@dataclass(frozen=True)
class Level:
    """One linear map: its terms, its targets, and the axes along which it is repeated."""

    axes: tuple[str, ...]
    family: Family | None
    terms: tuple[Term, ...]
    targets: tuple[Target, ...]

    @property
    def name(self) -> str:
        """``feature+neuron``, ``head (qk*)``, ``∅``."""
        axes = "+".join(self.axes) or "∅"
        return axes if self.family is None else f"{axes} ({self.family[0]}{'*' * self.family[1]})"

    @property
    def inputs(self) -> int:
        """Input features per input channel."""
        return sum(term.features for term in self.terms)

    @property
    def outputs(self) -> int:
        """Output features per output channel."""
        return sum(target.features for target in self.targets)


def invariant_sources(space: WeightSpace, *, quadratic: bool) -> list[Source]:
    """All inputs of a layer: tensors, invariant products and, with ``quadratic``, contractions.

    Shifted tensors are zero once folded, so they are not read.
    """
    for spec in space.tensors.values():
        family_of(space, spec)  # layers read tensors with at most one such axis
    out = [product_source(space, p) for p in space.products]
    out += [tensor_source(space, s) for s in space.tensors.values() if s.name not in space.shifted]
    return out + (contraction_sources(space) if quadratic else [])


def tensor_targets(space: WeightSpace, *, rank: int | None) -> list[Target]:
    """Every tensor of the space as a target."""
    out = []
    for spec in space.tensors.values():
        source = tensor_source(space, spec)
        for axis, labels in source.perms.items():
            if len(labels) > 1:
                raise SpaceError(
                    f"layers cannot write tensor '{spec.name}', which carries axis '{axis}' twice"
                )
        labels = source.factors[0].labels
        free = tuple(a for a in source.free if a in labels)
        sizes = dict(source.sizes)
        if rank is not None and free:
            labels = (*(a for a in labels if a not in free), RANK)
            free, sizes[RANK] = (RANK,), rank
        out.append(
            Target(
                spec.name,
                labels,
                tuple(source.perms),
                source.carried,
                source.private,
                free,
                sizes,
                family_of(space, spec),
            )
        )
    return out


def gate_targets(space: WeightSpace) -> list[Target]:
    """For each tensor with a linear axis, one invariant number per index of its owner."""
    out = []
    for spec in space.tensors.values():
        family = family_of(space, spec)
        if family is not None:
            owners = space.ancestors(family[0])
            sizes = {a: space.axes[a].size for a in owners}
            out.append(Target(f"gate {spec.name}", owners, owners, (), None, (), sizes, None))
    return out


def plan_levels(
    space: WeightSpace,
    sources: Sequence[Source],
    targets: Sequence[Target],
    *,
    rank: int | None = None,
    mean: bool = True,
) -> tuple[Level, ...]:
    """The levels of a layer from ``sources`` to ``targets``, largest first.

    Args:
        rank: size of the dictionaries that replace the free axes; None keeps them.
        mean: pool by the mean and bring products to unit scale; False sums, as in the paper.
    """
    wanted: dict[tuple[Family | None, tuple[str, ...]], list[Target]] = {}
    for target in targets:
        must = space.ancestors(target.family[0]) if target.family else ()
        for axes in closed_subsets(space, target.perms, must):
            wanted.setdefault((target.family, axes), []).append(target)
    levels = []
    for (family, axes), into in wanted.items():
        terms = [
            term
            for source in sources
            if source.family == family and set(axes) <= set(source.perms)
            for term in _terms(space, source, axes, rank, mean)
        ]
        if terms or (not axes and family is None):
            levels.append(Level(axes, family, tuple(terms), tuple(into)))
    return tuple(sorted(levels, key=lambda level: -len(level.axes)))


def closed_subsets(
    space: WeightSpace, axes: Sequence[str], must: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Subsets of ``axes`` that contain ``must`` and, with every axis, those it belongs to."""
    order = [a for a in space.axes if a in axes]
    for size in range(len(order) + 1):
        for subset in combinations(order, size):
            owners = {owner for axis in subset for owner in space.ancestors(axis)}
            if {*must, *owners} <= set(subset):
                yield subset


def _terms(
    space: WeightSpace, source: Source, level: tuple[str, ...], rank: int | None, mean: bool
) -> Iterator[Term]:
    """Views of a source from a level: one, or several where an axis occurs twice."""
    twice = [axis for axis, labels in source.perms.items() if len(labels) > 1]
    views = [("row", "column", "diagonal") if a in level else ("total", "trace") for a in twice]
    for choice in product(*views):
        seen = dict(zip(twice, choice, strict=True))
        pooled, root, same = 1, source.summed, []
        kept = {axis: labels[0] for axis, labels in source.perms.items()}
        for axis, labels in source.perms.items():
            size = space.axes[axis].size
            view = seen.get(axis)
            if view in ("diagonal", "trace"):
                same.append((labels[0], labels[1]))
            if view == "column":
                kept[axis] = labels[1]
            if view in ("row", "column"):
                pooled *= size
            elif axis not in level:
                if axis in source.shared:
                    root *= size
                else:
                    pooled *= size**2 if view == "total" else size
        yield Term(
            source,
            ",".join(f"{axis}:{view}" for axis, view in seen.items()),
            tuple(same),
            tuple(kept[axis] for axis in level),
            pooled,
            1 / pooled / root**0.5 if mean else 1.0,
            1 / pooled,
            source.features(rank),
        )
