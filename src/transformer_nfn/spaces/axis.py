"""Declarations: axes, tensors over them, and biases that may be shifted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.actions import ACTIONS, Action, Pieces

LARGEST = 2**40
Value = TypeVar("Value")

Weights = dict[str, Tensor]
"""Tensors by name, each ``[batch, channels, *axes]``."""


@dataclass(frozen=True)
class Axis:
    """One axis of a weight space, shared by every tensor that carries its name.

    Use the constructors, one for each `Action`:

    - `Axis.free`: no symmetry.
    - `Axis.perm`: a permutation. With ``of``, one permutation for each index of the perm axis
      ``of`` (queries within a key/value group: the wreath product of the two).
    - `Axis.linear`: an invertible matrix for each index of the perm axis ``of``: all of GL(n), or
      one complex scale for each pair of entries (the commutant of rotary positions).
    - `Axis.scale`, `Axis.positive`, `Axis.sign`: a number for each entry.
    - `Axis.orthogonal`: an orthogonal matrix.

    A tensor carries an axis on which matrices act plain (``x → x G``) or dual (``x → G⁻¹ x``).

    Attributes:
        name: name in tensors.
        size: number of entries.
        kind: name of the action in files; `action` is the object.
        of: the perm axis it belongs to: one element for each index of that axis.
        form: which matrices, where ``kind`` leaves a choice.

    >>> qk = Axis.linear("qk", 4, of="head")
    >>> qk.action.describe(qk.size)
    'GL(4)'
    >>> qk.to_json()
    {'name': 'qk', 'size': 4, 'kind': 'linear', 'of': 'head'}
    """

    name: str
    size: int
    kind: str = "free"
    of: str | None = None
    form: str = "general"

    def __post_init__(self) -> None:
        if not self.name or "*" in self.name or " " in self.name:
            raise SpaceError(f"axis name {self.name!r} must be a word without '*' or spaces")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise SpaceError(f"axis '{self.name}' must have a positive size, found {self.size!r}")
        if self.size > LARGEST:
            raise SpaceError(f"axis '{self.name}' has {self.size} entries, at most 2**40 fit")
        if (self.kind, "general") not in ACTIONS:
            raise SpaceError(f"axis '{self.name}' has unknown kind {self.kind!r}")
        if (self.kind, self.form) not in ACTIONS:
            raise SpaceError(f"{self.kind} axis '{self.name}' has unknown form {self.form!r}")
        error = self.action.axis_error(self.name, self.size, self.of)
        if error is not None:
            raise SpaceError(error)

    @property
    def action(self) -> Action:
        """The action on the axis."""
        return ACTIONS[self.kind, self.form]

    @property
    def pieces(self) -> Pieces:
        """Decomposition of the axis under its action."""
        return self.action.pieces(self.size)

    @staticmethod
    def free(name: str, size: int) -> Axis:
        """An axis without symmetry."""
        return Axis(name, size, "free")

    @staticmethod
    def perm(name: str, size: int, of: str | None = None) -> Axis:
        """A permuted axis; with ``of``, permuted separately within each index of that axis."""
        return Axis(name, size, "perm", of)

    @staticmethod
    def linear(name: str, size: int, of: str, form: str = "general") -> Axis:
        """An axis with an invertible matrix for each index of the perm axis ``of``.

        Args:
            form: ``general`` for all of GL(n); ``complex`` for one complex scale on each pair of
                neighbouring entries; ``complex_halves`` for the pairs (j, j + n/2).
        """
        return Axis(name, size, "linear", of, form)

    @staticmethod
    def scale(name: str, size: int, of: str | None = None) -> Axis:
        """A nonzero scale for each entry (for each index of ``of``)."""
        return Axis(name, size, "scale", of)

    @staticmethod
    def positive(name: str, size: int, of: str | None = None) -> Axis:
        """A positive scale for each entry (for each index of ``of``)."""
        return Axis(name, size, "positive", of)

    @staticmethod
    def sign(name: str, size: int, of: str | None = None) -> Axis:
        """A sign for each entry (for each index of ``of``)."""
        return Axis(name, size, "sign", of)

    @staticmethod
    def orthogonal(name: str, size: int, of: str | None = None) -> Axis:
        """An axis with an orthogonal matrix (for each index of ``of``)."""
        return Axis(name, size, "orthogonal", of)

    def to_json(self) -> dict[str, Any]:
        """The axis as JSON values, defaults left out."""
        out: dict[str, Any] = {"name": self.name, "size": self.size, "kind": self.kind}
        if self.of is not None:
            out["of"] = self.of
        if self.form != "general":
            out["form"] = self.form
        return out


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor and its axes in order; ``dual`` holds the axes it carries dual.

    In text a star marks a dual axis.

    >>> spec = TensorSpec.parse("W_K", "head input qk*")
    >>> spec.axes, sorted(spec.dual), spec.words()
    (('head', 'input', 'qk'), ['qk'], ['head', 'input', 'qk*'])
    """

    name: str
    axes: tuple[str, ...]
    dual: frozenset[str] = frozenset()

    @staticmethod
    def parse(name: str, axes: str | Iterable[str]) -> TensorSpec:
        """Parse ``"head input qk*"`` (or the same as a list of words)."""
        words = axes.split() if isinstance(axes, str) else list(axes)
        plain = tuple(word.rstrip("*") for word in words)
        dual = frozenset(word.rstrip("*") for word in words if word.endswith("*"))
        return TensorSpec(name, plain, dual)

    def words(self) -> list[str]:
        """The axes as words, dual ones starred; inverse of `parse`."""
        return [axis + "*" * (axis in self.dual) for axis in self.axes]

    def position(self, axis: str) -> int:
        """Index of the axis, counted from the first axis after channels."""
        return self.axes.index(axis)


@dataclass(frozen=True)
class Shift:
    """A bias that may be shifted freely, because another one compensates.

    ``tensor`` may receive any constant ``c`` (of its own shape) if ``into`` loses ``c``
    contracted with ``through``: ``b_V → b_V + c`` with ``b_O → b_O − Σ c W_O``, summed over all
    axes that ``into`` lacks (over heads, and over the queries that share a value). Without
    ``through`` and ``into`` nothing compensates: the key bias ``b_K`` drops out of the softmax.

    >>> Shift("b_V", through="W_O", into="b_O").into
    'b_O'
    """

    tensor: str
    through: str | None = None
    into: str | None = None

    def __post_init__(self) -> None:
        if (self.through is None) != (self.into is None):
            raise SpaceError(
                f"shift of '{self.tensor}' needs both `through` and `into`, or neither"
            )


def under_prefix(weights: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """The tensors whose names begin with ``prefix``, under the rest of their names.

    >>> under_prefix({"blocks.0.W_Q": 1, "head.W": 2}, "blocks.0.")
    {'W_Q': 1}
    """
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
