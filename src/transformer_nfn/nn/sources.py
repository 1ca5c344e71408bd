"""Inputs of a layer: tensors of the space and products of two of them, axis by axis.

A *source* is one tensor, one invariant product (eq. 17), or one contraction along a permuted
axis. Its axes have labels: an axis that occurs twice gets a prime the second time, so ``W_Q·W_K``
of a permuted stream has the labels ``stream`` and ``stream'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces import Action, Product, TensorSpec, WeightSpace

Family = tuple[str, bool]
"""A linear axis, and whether it is carried dual; only tensors of one family mix."""

Split = tuple[int, Action]
"""Position of an axis that splits into pieces, and the action that splits it."""


@dataclass(frozen=True)
class Factor:
    """One tensor of a source, with a label for each of its axes.

    Attributes:
        tensor: its name.
        labels: one for each axis; an axis that splits into pieces has two, frequency (the piece)
            and pair (the index in it).
        split: position and action of such an axis.
        turn: label of an extra last axis that holds ``x`` and ``x J``, J the quarter turn of every
            pair; the commutant of complex scales is spanned by 1 and J.
    """

    tensor: str
    labels: tuple[str, ...]
    split: Split | None = None
    turn: str | None = None

    @property
    def all_labels(self) -> tuple[str, ...]:
        """The labels after `turn` has added its axis."""
        return self.labels if self.turn is None else (*self.labels, self.turn)


@dataclass(frozen=True)
class Source:
    """An input of a layer: factors that are multiplied and summed over shared labels.

    Attributes:
        name: name in tables, ``W_Q·W_K``.
        factors: one or two tensors.
        perms: the labels of each permuted axis: one, or two where the axis occurs twice.
        carried: labels of the linear axis, carried along unchanged (families only).
        private: label of the frequencies, each with separate weights (complex families only).
        free: labels of the features, in order.
        dense: those of ``free`` that a dictionary of low rank replaces.
        summed: number of products summed inside, without pooling.
        shared: permuted axes that both factors share (the heads of QK).
        sizes: the size of every label.
        family: the linear axis it carries; None for an invariant.
    """

    name: str
    factors: tuple[Factor, ...]
    perms: Mapping[str, tuple[str, ...]]
    carried: tuple[str, ...] = ()
    private: str | None = None
    free: tuple[str, ...] = ()
    dense: frozenset[str] = frozenset()
    summed: int = 1
    shared: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict)
    family: Family | None = None

    def features(self, rank: int | None = None) -> int:
        """Numbers at each place of a level, per channel."""
        kept = prod(self.sizes[a] for a in self.free if rank is None or a not in self.dense)
        return kept * (rank if rank is not None and self.dense else 1)


def family_of(space: WeightSpace, spec: TensorSpec) -> Family | None:
    """The linear axis of a tensor and its duality; None if it has none."""
    linear = space.rebased(spec.name)
    if spec.name in space.twice_rebased:
        raise SpaceError(
            f"layers need tensors with at most one linear axis, '{spec.name}' carries "
            f"{' and '.join(repr(a) for a in linear)}"
        )
    if not linear:
        return None
    return linear[0], space.is_dual(spec.name, linear[0])


def tensor_source(space: WeightSpace, spec: TensorSpec) -> Source:
    """A tensor as a source; one with a linear axis is a member of its family."""
    family = family_of(space, spec)
    labels, sizes, split = _labelled(space, spec)
    turn = None
    if family is not None and space.axes[family[0]].pieces.turns > 1:
        turn = f"{family[0]}.turn"
    factor = Factor(spec.name, labels, split, turn)
    free = _free_labels(space, labels)
    carried: tuple[str, ...] = ()
    private = None
    if family is not None:
        carried = (f"{family[0]}.pair",) if split else (family[0],)
        private = f"{family[0]}.frequency" if split else None
    dense = frozenset(free)
    if factor.turn is not None:
        free.append(factor.turn)
        sizes[factor.turn] = 2
    return Source(
        spec.name,
        (factor,),
        _perm_labels(space, labels),
        carried,
        private,
        tuple(free),
        dense,
        sizes=sizes,
        family=family,
    )


def product_source(space: WeightSpace, product: Product) -> Source:
    """An invariant product (eq. 17): both factors share heads and the linear axis."""
    first, second = space.tensors[product.plain], space.tensors[product.dual]
    return _pair(space, product.name, first, second, product.over)


def contraction_sources(space: WeightSpace) -> list[Source]:
    """``W_A W_B``, ``b_A W_B``, ``W_O W_A``: quadratic, outside the paper's form.

    Weights compose along a permuted axis that ends one tensor and begins the next one (row
    vectors, ``x @ W``). No other axis of the two may belong to it: summing over heads would add
    vectors in different bases.
    """
    specs = [s for s in space.tensors.values() if s.name not in space.shifted]
    out = []
    for first in specs:
        for second in specs:
            axis = _composes(space, first, second)
            if axis is None:
                continue
            linear = [f for f in (family_of(space, first), family_of(space, second)) if f]
            if len(linear) == 2 or not all(space.axes[f[0]].pieces.single for f in linear):
                continue
            common = set(first.axes) & set(second.axes)
            if any(space.is_permuted(a) for a in common - {axis}):
                continue
            out.append(_pair(space, f"{first.name}∘{second.name}", first, second, axis))
    return out


def _composes(space: WeightSpace, first: TensorSpec, second: TensorSpec) -> str | None:
    """The permuted axis that ends ``first`` and begins the matrix ``second``, if there is one."""
    ends, begins = _inner_axes(space, first), _inner_axes(space, second)
    if first.name == second.name or not ends or len(begins) < 2 or ends[-1] != begins[0]:
        return None
    axis = ends[-1]
    if not space.is_permuted(axis) or space.axes[axis].of is not None:
        return None
    if first.axes.count(axis) > 1 or second.axes.count(axis) > 1:
        return None
    owners = {a for s in (first, second) for label in s.axes for a in space.ancestors(label)}
    return None if axis in owners else axis


def _inner_axes(space: WeightSpace, spec: TensorSpec) -> list[str]:
    """The axes of a tensor to which none of its other axes belongs."""
    owners = {a for label in spec.axes for a in space.ancestors(label)}
    return [a for a in spec.axes if a not in owners]


def _pair(
    space: WeightSpace, name: str, first: TensorSpec, second: TensorSpec, over: str
) -> Source:
    """Two tensors contracted along an axis: invariant where matrices act on it, else a family."""
    shared, pieces = space.ancestors(over), space.axes[over].pieces
    x_labels, sizes, x_split = _labelled(space, first)
    y_labels, y_sizes, y_split = _labelled(space, second, set(x_labels), {over, *shared})
    sizes |= y_sizes
    turn = None
    if pieces.turns > 1:
        turn = f"{over}.turn"
        sizes[turn] = 2
    factors = (Factor(first.name, x_labels, x_split), Factor(second.name, y_labels, y_split, turn))
    labels = tuple(dict.fromkeys((*x_labels, *y_labels)))
    free = _free_labels(space, labels)
    dense = frozenset(free)
    if x_split is not None:
        free.append(f"{over}.frequency")
    if turn is not None:
        free.append(turn)
    perms = {a: p for a, p in _perm_labels(space, labels).items() if a != over}
    family: Family | None = None
    if space.is_permuted(over):
        family = family_of(space, first) or family_of(space, second)
    return Source(
        name,
        factors,
        perms,
        carried=(family[0],) if family else (),
        free=tuple(free),
        dense=dense,
        summed=pieces.width,
        shared=frozenset(shared),
        sizes=sizes,
        family=family,
    )


def _labelled(
    space: WeightSpace,
    spec: TensorSpec,
    taken: set[str] | None = None,
    together: set[str] | None = None,
) -> tuple[tuple[str, ...], dict[str, int], Split | None]:
    """Labels and sizes of a tensor's axes; labels already taken get a prime."""
    seen = set(taken or ())
    labels: list[str] = []
    sizes: dict[str, int] = {}
    split = None
    for place, axis in enumerate(spec.axes):
        size, pieces = space.axes[axis].size, space.axes[axis].pieces
        if not pieces.single:
            split = place, space.axes[axis].action
            labels += [f"{axis}.frequency", f"{axis}.pair"]
            sizes |= {f"{axis}.frequency": pieces.count, f"{axis}.pair": pieces.width}
            continue
        label = axis if axis in (together or ()) or axis not in seen else f"{axis}'"
        seen.add(label)
        labels.append(label)
        sizes[label] = size
    return tuple(labels), sizes, split


def _free_labels(space: WeightSpace, labels: tuple[str, ...]) -> list[str]:
    bases = {label: label.rstrip("'") for label in labels}
    return [a for a in labels if bases[a] in space.axes and space.is_free(bases[a])]


def _perm_labels(space: WeightSpace, labels: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for label in labels:
        axis = label.rstrip("'")
        if axis in space.axes and space.is_permuted(axis):
            out[axis] = (*out.get(axis, ()), label)
    return out
