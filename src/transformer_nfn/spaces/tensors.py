"""How one tensor of a space carries its axes, and how biases may be shifted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from transformer_nfn.errors import SpaceError

Weights = dict[str, Tensor]
"""Tensors by name, each ``[batch, channels, *axes]``."""


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor and its axes in order; ``dual`` holds the linear axes it carries dual.

    Written as strings, a star marks a dual axis: ``TensorSpec.parse("W_K", "head input qk*")``.
    """

    name: str
    axes: tuple[str, ...]
    dual: frozenset[str] = frozenset()

    @staticmethod
    def parse(name: str, axes: str | Iterable[str]) -> TensorSpec:
        """Reads ``"head input qk*"`` (or the same as a list of words)."""
        words = axes.split() if isinstance(axes, str) else list(axes)
        plain = tuple(word.rstrip("*") for word in words)
        dual = frozenset(word.rstrip("*") for word in words if word.endswith("*"))
        return TensorSpec(name, plain, dual)

    def words(self) -> list[str]:
        """The axes as words, dual ones starred; the inverse of `parse`."""
        return [axis + "*" * (axis in self.dual) for axis in self.axes]

    def position(self, axis: str) -> int:
        """Where the axis stands in this tensor, counted from the first axis after channels."""
        return self.axes.index(axis)


@dataclass(frozen=True)
class Shift:
    """A bias that may be moved freely, because another one takes the change up.

    ``tensor`` may receive any constant ``c`` (of its own shape) if ``into`` loses ``c``
    contracted with ``through``: ``b_V → b_V + c`` with ``b_O → b_O − Σ c W_O``, summed over all
    axes that ``into`` lacks (over heads, and over the queries that share a value). Without
    ``through`` and ``into`` nothing has to make up for it: the key bias ``b_K`` drops out of
    the softmax, so it may be anything at all.
    """

    tensor: str
    through: str | None = None
    into: str | None = None

    def __post_init__(self) -> None:
        if (self.through is None) != (self.into is None):
            raise SpaceError(
                f"shift of '{self.tensor}' needs both `through` and `into`, or neither"
            )
