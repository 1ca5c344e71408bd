"""What one axis of a weight tensor *is*: which symmetry, if any, acts along it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from transformer_nfn.errors import SpaceError

Kind = Literal["free", "perm", "linear"]
Form = Literal["general", "complex"]


@dataclass(frozen=True)
class Axis:
    """One axis of a weight space, shared by every tensor that carries its name.

    - **free**: no symmetry acts on it.
    - **perm**: one permutation acts on it. With ``of``, one permutation for each index of the
      perm axis ``of`` (queries within a key/value group: the wreath product of the two).
    - **linear**: an invertible matrix acts on it, one for each index of the perm axis ``of``.
      A tensor carries the axis plain (``x → x G``) or dual (``x → G⁻¹ x``). ``form`` says which
      matrices: ``general`` for all of GL(n), ``complex`` for one complex scale on each pair of
      neighbouring entries (what commutes with rotary position embeddings).

    Use the constructors `Axis.free`, `Axis.perm` and `Axis.linear`.
    """

    name: str
    size: int
    kind: Kind = "free"
    of: str | None = None
    form: Form = "general"

    def __post_init__(self) -> None:
        if not self.name or "*" in self.name or " " in self.name:
            raise SpaceError(f"axis name {self.name!r} must be a word without '*' or spaces")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise SpaceError(f"axis '{self.name}' must have a positive size, found {self.size!r}")
        if self.kind not in ("free", "perm", "linear"):
            raise SpaceError(f"axis '{self.name}' has unknown kind {self.kind!r}")
        if self.kind == "free" and self.of is not None:
            raise SpaceError(f"free axis '{self.name}' cannot belong to another axis")
        if self.kind == "linear" and self.of is None:
            raise SpaceError(f"linear axis '{self.name}' must say which perm axis it belongs to")
        if self.form not in ("general", "complex"):
            raise SpaceError(f"axis '{self.name}' has unknown form {self.form!r}")
        if self.form == "complex" and (self.kind != "linear" or self.size % 2):
            raise SpaceError(
                f"axis '{self.name}' of complex form must be linear and of even size, "
                f"found kind {self.kind} and size {self.size}"
            )

    @staticmethod
    def free(name: str, size: int) -> Axis:
        """An axis on which no symmetry acts."""
        return Axis(name, size, "free")

    @staticmethod
    def perm(name: str, size: int, of: str | None = None) -> Axis:
        """A permuted axis; with ``of``, permuted separately within each index of that axis."""
        return Axis(name, size, "perm", of)

    @staticmethod
    def linear(name: str, size: int, of: str, form: Form = "general") -> Axis:
        """An axis re-based by an invertible matrix for each index of the perm axis ``of``."""
        return Axis(name, size, "linear", of, form)

    def to_json(self) -> dict[str, Any]:
        """The axis as plain JSON values, defaults left out."""
        out: dict[str, Any] = {"name": self.name, "size": self.size, "kind": self.kind}
        if self.of is not None:
            out["of"] = self.of
        if self.form != "general":
            out["form"] = self.form
        return out
