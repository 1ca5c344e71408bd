"""A weight space as data: named axes, tensors over them, and nothing that computes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.actions import Place
from transformer_nfn.spaces.axis import Axis
from transformer_nfn.spaces.check import check_weights
from transformer_nfn.spaces.derivation import Derivation, Product, derive
from transformer_nfn.spaces.group import Group
from transformer_nfn.spaces.moves import Moves, moves_of
from transformer_nfn.spaces.shifts import check_shifts
from transformer_nfn.spaces.space_json import as_object, build_arguments
from transformer_nfn.spaces.tensors import Shift, TensorSpec, Weights


@dataclass(frozen=True, eq=False)
class WeightSpace:
    """The space of all weights of one architecture, with what acts on every axis.

    Build one with `WeightSpace.build`, or take a ready one from `transformer_nfn.spaces`.
    Weights in the space are plain ``dict[str, Tensor]`` of shape ``[batch, channels, *axes]``.

    Attributes:
        name: what the space is called in tables and messages.
        axes: every axis by name.
        tensors: every tensor by name, in order.
        shifts: biases that may be moved (see `Shift`).
        architecture: the name of its architecture in `transformer_nfn.functional.KNOWN`, if
            it has one there.
        options: what that architecture needs besides the space (JSON values).
    """

    name: str
    axes: Mapping[str, Axis]
    tensors: Mapping[str, TensorSpec]
    shifts: tuple[Shift, ...] = ()
    architecture: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def build(
        name: str,
        axes: Iterable[Axis],
        tensors: Mapping[str, str],
        *,
        shifts: Iterable[Shift] = (),
        architecture: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> WeightSpace:
        """A space from its axes and one line a tensor: ``{"W_K": "head input qk*", …}``."""
        by_name: dict[str, Axis] = {}
        for axis in axes:
            if axis.name in by_name:
                raise SpaceError(f"space '{name}' has two axes named '{axis.name}'")
            by_name[axis.name] = axis
        specs = {key: TensorSpec.parse(key, words) for key, words in tensors.items()}
        space = WeightSpace(name, by_name, specs, tuple(shifts), architecture, dict(options or {}))
        space._validate()
        return space

    def _validate(self) -> None:
        for axis in self.axes.values():
            if axis.of is None:
                continue
            parent = self.axes.get(axis.of)
            if parent is None or not parent.action.permutes or axis.of == axis.name:
                raise SpaceError(
                    f"axis '{axis.name}' belongs to '{axis.of}', which is not a perm axis of "
                    f"space '{self.name}'"
                )
            if axis.name in self.ancestors(axis.of):
                raise SpaceError(f"axes '{axis.name}' and '{axis.of}' belong to each other")
        for spec in self.tensors.values():
            self._validate_tensor(spec)
        check_shifts(self)
        _ = self.derivation  # refuses a space whose products could still change

    def _validate_tensor(self, spec: TensorSpec) -> None:
        for name in spec.axes:
            if name not in self.axes:
                raise SpaceError(f"tensor '{spec.name}' carries unknown axis '{name}'")
            axis = self.axes[name]
            if name in spec.dual and not axis.action.rebases:
                raise SpaceError(
                    f"tensor '{spec.name}' marks {axis.action.word} axis '{name}' as dual"
                )
            if spec.axes.count(name) > 2 and axis.action.permutes:
                raise SpaceError(f"tensor '{spec.name}' carries perm axis '{name}' three times")
            if spec.axes.count(name) > 1 and (axis.action.rebases or axis.of is not None):
                raise SpaceError(f"tensor '{spec.name}' carries axis '{name}' twice")
            for parent in self.ancestors(name):
                if spec.axes.count(parent) != 1:
                    raise SpaceError(
                        f"tensor '{spec.name}' carries axis '{name}' and so must carry "
                        f"'{parent}' once, found {spec.axes.count(parent)} times"
                    )

    def ancestors(self, axis: str) -> tuple[str, ...]:
        """The perm axes that ``axis`` belongs to, outermost first: ``('head',)`` for ``qk``."""
        chain: list[str] = []
        of = self.axes[axis].of
        while of is not None and of not in chain:
            chain.append(of)
            of = self.axes[of].of
        return tuple(reversed(chain))

    def innermost_first(self, axes: Sequence[str]) -> list[int]:
        """The positions in ``axes``, those of axes that belong to others before their owners."""
        return sorted(range(len(axes)), key=lambda d: -len(self.ancestors(axes[d])))

    def place(self, axes: Sequence[str], dim: int, *, lead: int, batched: bool) -> Place:
        """Where the axis ``axes[dim]`` and its sites stand in a tensor ``[*lead, *axes, …]``."""
        owners = (lead + list(axes).index(a) for a in self.ancestors(axes[dim]))
        return Place(lead + dim, (*((0,) if batched else ()), *owners))

    def moves(self, axes: tuple[str, ...], lead: int, batched: bool) -> Moves:
        """What an element does to a tensor ``[*lead, *axes, …]``, in order.

        Args:
            axes: of the tensor.
            lead: how many axes stand before them.
            batched: whether there is an element for each item of the first of those.
        """
        key = axes, lead, batched
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = moves_of(self, axes, lead, batched)
        return moves

    @cached_property
    def _moves(self) -> dict[tuple[tuple[str, ...], int, bool], Moves]:
        # Asked for at every tensor; working them out takes longer than moving a small network.
        return {}

    def is_permuted(self, axis: str) -> bool:
        """Whether permutations act on an axis."""
        return self.axes[axis].action.permutes

    def is_rebased(self, axis: str) -> bool:
        """Whether matrices act on an axis, so that its entries are seen in products only."""
        return self.axes[axis].action.rebases

    def is_free(self, axis: str) -> bool:
        """Whether nothing acts on an axis."""
        return not (self.is_permuted(axis) or self.is_rebased(axis))

    def permuted_dims(self, axes: Sequence[str]) -> list[int]:
        """Where perm axes stand in ``axes``, inner ones before the axes they belong to.

        In this order each moves on its own, while the axis it belongs to stands still.
        """
        return [d for d in self.innermost_first(axes) if self.is_permuted(axes[d])]

    def free_axes(self, tensor: str) -> tuple[str, ...]:
        """The axes of a tensor on which nothing acts: ``('input',)`` for W_Q."""
        return tuple(a for a in self.tensors[tensor].axes if self.is_free(a))

    def rebased(self, tensor: str) -> tuple[str, ...]:
        """The axes of a tensor on which matrices act: ``('qk',)`` for W_Q."""
        return tuple(a for a in self.tensors[tensor].axes if self.is_rebased(a))

    @cached_property
    def rebased_axes(self) -> tuple[str, ...]:
        """Every axis on which matrices act."""
        return tuple(a for a in self.axes if self.is_rebased(a))

    @cached_property
    def twice_rebased(self) -> tuple[str, ...]:
        """The tensors on which matrices act along more than one axis."""
        return tuple(t for t in self.tensors if len(self.rebased(t)) > 1)

    def is_dual(self, tensor: str, axis: str) -> bool:
        """Whether a tensor carries an axis dual; never where plain and dual are the same."""
        return axis in self.tensors[tensor].dual and not self.axes[axis].action.self_dual

    def carriers(self, axis: str, *, dual: bool) -> list[str]:
        """The tensors that carry an axis plain (or dual), but for those a shift may change."""
        return [
            name
            for name, spec in self.tensors.items()
            if axis in spec.axes and name not in self.shifted and self.is_dual(name, axis) == dual
        ]

    @cached_property
    def shifted(self) -> frozenset[str]:
        """The tensors that a shift may set to anything; folded away, they say nothing."""
        return frozenset(shift.tensor for shift in self.shifts)

    @cached_property
    def entry_tensors(self) -> tuple[str, ...]:
        """The tensors whose entries are only moved about: neither re-based nor shifted."""
        return tuple(t for t in self.tensors if t not in self.shifted and not self.rebased(t))

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The sizes of the tensor's axes, without batch and channels."""
        return self.shapes[tensor]

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, without batch and channels."""
        return {
            name: tuple(self.axes[a].size for a in spec.axes)
            for name, spec in self.tensors.items()
        }

    @property
    def num_weights(self) -> int:
        """How many numbers one network of the space has."""
        return sum(prod(shape) for shape in self.shapes.values())

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The invariant products, derived from the axes (QK and VO in the paper's block)."""
        return self.derivation.products

    @cached_property
    def derivation(self) -> Derivation:
        """How the invariant products come about, and what they leave out."""
        return derive(self)

    @cached_property
    def products_separate(self) -> bool:
        """Whether networks whose products and other invariants agree are always one function."""
        rebased = (axis.action for axis in self.axes.values() if axis.action.rebases)
        return not self.derivation.left_out and all(action.separating for action in rebased)

    def spec(self, name: str) -> TensorSpec:
        """The axes of a tensor, or of one joined from several on the way to a product."""
        return self.tensors[name] if name in self.tensors else self.derivation.joined[name].spec

    @cached_property
    def group(self) -> Group:
        """The symmetry group that the axes describe."""
        return Group(self)

    def randn(
        self,
        batch: int,
        channels: int = 1,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Weights:
        """Standard normal weights, each tensor of shape ``[batch, channels, *axes]``."""
        place = device if device is not None else (generator.device if generator else None)
        return {
            name: torch.randn(
                (batch, channels, *shape), generator=generator, dtype=dtype, device=place
            )
            for name, shape in self.shapes.items()
        }

    def check(
        self, weights: Mapping[str, Tensor], *, finite: bool = True, lead: int | None = 2
    ) -> None:
        """Raises `SpaceError` with one sentence if ``weights`` do not lie in this space.

        Args:
            weights: tensors by name, each ``[batch, channels, *axes]``.
            finite: also look for NaN and infinity (reads every weight once).
            lead: how many axes stand before those of the space; None takes any number, the
                same for all tensors.
        """
        check_weights(self, weights, finite=finite, lead=lead)

    def network(self, weights: Mapping[str, Tensor], item: int = 0, channel: int = 0) -> Weights:
        """One network out of a batch, each tensor of shape ``[1, 1, *axes]``."""
        return {name: w[item : item + 1, channel : channel + 1] for name, w in weights.items()}

    def to_json(self, *, indent: int | None = None) -> str:
        """The whole space as JSON; `WeightSpace.from_json` reads it back."""
        return json.dumps(as_object(self), indent=indent, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> WeightSpace:
        """Reads what `to_json` wrote; says what is wrong with anything else."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpaceError(f"a weight space must be JSON: {error}") from error
        return WeightSpace.from_object(data)

    @staticmethod
    def from_object(data: object) -> WeightSpace:
        """The space that parsed JSON describes; see `from_json`."""
        try:
            return WeightSpace.build(**build_arguments(data))
        except (TypeError, AttributeError) as error:
            raise SpaceError(f"a weight space in JSON is malformed: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightSpace) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __str__(self) -> str:
        from transformer_nfn.spaces.table import space_table

        return space_table(self)

    def __repr__(self) -> str:
        return f"WeightSpace('{self.name}', {self.num_weights} weights)"
