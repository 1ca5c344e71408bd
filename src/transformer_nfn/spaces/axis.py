"""What one axis of a weight tensor *is*: its name, its size, and what acts along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformer_nfn.errors import SpaceError
from transformer_nfn.spaces.actions import ACTIONS, Action, Pieces

LARGEST = 2**40


@dataclass(frozen=True)
class Axis:
    """One axis of a weight space, shared by every tensor that carries its name.

    Make one with the constructors, one for each `Action`:

    - `Axis.free`: no symmetry acts on it.
    - `Axis.perm`: one permutation acts on it. With ``of``, one permutation for each index of the
      perm axis ``of`` (queries within a key/value group: the wreath product of the two).
    - `Axis.linear`: an invertible matrix for each index of the perm axis ``of``, all of GL(n) or
      one complex scale for each pair of entries (what commutes with rotary positions).
    - `Axis.scale`, `Axis.positive`, `Axis.sign`: a number for each entry.
    - `Axis.orthogonal`: an orthogonal matrix.

    A tensor carries an axis on which matrices act plain (``x → x G``) or dual (``x → G⁻¹ x``).

    Attributes:
        name: what tensors call it.
        size: how many entries it has.
        kind: the word for what acts, as it stands in files; `action` is the thing itself.
        of: the perm axis it belongs to: one element for each index of that axis.
        form: which matrices, where ``kind`` leaves a choice.
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
            raise SpaceError(f"axis '{self.name}' has {self.size:.3g} entries, at most 2**40 fit")
        if (self.kind, "general") not in ACTIONS:
            raise SpaceError(f"axis '{self.name}' has unknown kind {self.kind!r}")
        if (self.kind, self.form) not in ACTIONS:
            raise SpaceError(f"{self.kind} axis '{self.name}' has unknown form {self.form!r}")
        error = self.action.axis_error(self.name, self.size, self.of)
        if error is not None:
            raise SpaceError(error)

    @property
    def action(self) -> Action:
        """What acts on the axis."""
        return ACTIONS[self.kind, self.form]

    @property
    def pieces(self) -> Pieces:
        """How the axis falls apart under its action."""
        return self.action.pieces(self.size)

    @staticmethod
    def free(name: str, size: int) -> Axis:
        """An axis on which no symmetry acts."""
        return Axis(name, size, "free")

    @staticmethod
    def perm(name: str, size: int, of: str | None = None) -> Axis:
        """A permuted axis; with ``of``, permuted separately within each index of that axis."""
        return Axis(name, size, "perm", of)

    @staticmethod
    def linear(name: str, size: int, of: str, form: str = "general") -> Axis:
        """An axis re-based by an invertible matrix for each index of the perm axis ``of``.

        Args:
            name: of the axis.
            size: n.
            of: the perm axis it belongs to.
            form: ``general`` for all of GL(n); ``complex`` for one complex scale on each pair of
                neighbouring entries; ``complex_halves`` for the pairs (j, j + n/2).
        """
        return Axis(name, size, "linear", of, form)

    @staticmethod
    def scale(name: str, size: int, of: str | None = None) -> Axis:
        """Every entry scaled by a nonzero number of its own (for each index of ``of``)."""
        return Axis(name, size, "scale", of)

    @staticmethod
    def positive(name: str, size: int, of: str | None = None) -> Axis:
        """Every entry scaled by a positive number of its own (for each index of ``of``)."""
        return Axis(name, size, "positive", of)

    @staticmethod
    def sign(name: str, size: int, of: str | None = None) -> Axis:
        """Every entry multiplied by +1 or −1 (for each index of ``of``)."""
        return Axis(name, size, "sign", of)

    @staticmethod
    def orthogonal(name: str, size: int, of: str | None = None) -> Axis:
        """An axis turned by an orthogonal matrix (for each index of ``of``)."""
        return Axis(name, size, "orthogonal", of)

    def to_json(self) -> dict[str, Any]:
        """The axis as plain JSON values, defaults left out."""
        out: dict[str, Any] = {"name": self.name, "size": self.size, "kind": self.kind}
        if self.of is not None:
            out["of"] = self.of
        if self.form != "general":
            out["form"] = self.form
        return out
