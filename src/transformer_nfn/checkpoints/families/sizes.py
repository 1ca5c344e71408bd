"""Sizes of the axes of a network, from its config and from the shapes in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from transformer_nfn.checkpoints.families.expressions import (
    MissingFieldError,
    evaluate,
    unexpected,
)
from transformer_nfn.checkpoints.families.family import DATA_FILE, Family, Line
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.io.layout import PLUS

LARGEST = 1 << 40

Shapes = Sequence[tuple[Line, tuple[int, ...]]]
"""Lines of a family, and the shapes of their tensors in a file."""


class SizeSolver:
    """Finds the sizes of one network.

    Args:
        family: of the file.
        config: its fields.
        where: name of the file in errors.

    Attributes:
        sizes: those that the config states, none without a config; every size after `add_shapes`.
    """

    def __init__(self, family: Family, config: Mapping[str, Any], where: str) -> None:
        self._family, self._config, self._where = family, config, where
        self.sizes: dict[str, int] = {}
        if config:
            self._evaluate(family.sizes)

    def add_shapes(self, shapes: Shapes) -> list[str]:
        """Add the sizes that follow from the shapes in the file.

        Returns:
            The config fields that are needed for the remaining sizes; these are then 1 each.
        """
        needed = {axis for line, _ in shapes for slot in line.slots for axis in slot.axes}
        words = {word for line, _ in shapes for word in line.shape or ()}
        needed |= {word for word in words if not word.isdigit()}
        family = self._family
        self._settle(family.sizes, shapes)
        unstated = []
        # Shapes decide before alternatives of an expression do: a grouped query shows in its shape.
        certain = {n: text for n, text in family.sizes.items() if not text.startswith("first(")}
        for name, text in family.sizes.items():
            if name in needed and name not in self.sizes:
                try:
                    evaluate(text, self._config)
                except MissingFieldError as error:
                    unstated.append(str(error))
                    self.sizes[name] = 1
                    self._settle(certain, shapes)
        missing = sorted(needed - self.sizes.keys())
        if missing:
            raise CheckpointError(
                f"'{self._where}' does not say the size of '{missing[0]}' of {family.title}: "
                f"expected it in config.json or {DATA_FILE}"
            )
        return unstated

    def _settle(self, expressions: Mapping[str, str], shapes: Shapes) -> None:
        before = -1
        while len(self.sizes) > before:
            before = len(self.sizes)
            for line, shape in shapes:
                self._solve(line, shape)
            self._evaluate(expressions)

    def _evaluate(self, expressions: Mapping[str, str]) -> None:
        for _ in expressions:  # a size may depend on another
            for name, text in expressions.items():
                if name not in self.sizes:
                    try:
                        value = evaluate(text, {**self._config, **self.sizes})
                    except MissingFieldError:
                        continue
                    except SpaceError as error:
                        raise CheckpointError(
                            f"'{self._where}': config: size {name}: {error}"
                        ) from None
                    if type(value) is not int or not 0 < value < LARGEST:
                        what = f"config: size {name} ({text})"
                        raise unexpected(self._where, what, "a whole number above 0", value)
                    self.sizes[name] = value

    def _solve(self, line: Line, shape: tuple[int, ...]) -> None:
        """Add the sizes that one shape settles: one unknown factor in an axis of the file."""
        if not line.slots:
            return
        sizes, layout = self.sizes, line.slots[0].layout
        dims = layout.dims if line.shape is None else tuple((word,) for word in line.shape)
        if len(dims) != len(shape):
            return  # reported when shapes are checked
        for i, (dim, n) in enumerate(zip(dims, shape, strict=True)):
            unknown = [a for a in dim if a not in sizes and a != PLUS and not a.isdigit()]
            fused = line.shape is None and layout.joined == i and len(line.slots) > 1
            if len(unknown) == 1 and not fused:
                known = (a for a in dim if a != unknown[0])
                rest = prod(len(line.slots) if a == PLUS else sizes[a] for a in known)
                if n and n % rest == 0:
                    sizes[unknown[0]] = n // rest
