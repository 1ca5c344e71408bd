"""Sizes of the axes of a network, from its config and from the shapes in its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from transformer_nfn.checkpoints.families.expressions import MissingFieldError, evaluate, shown
from transformer_nfn.checkpoints.families.family import Family, Line
from transformer_nfn.errors import CheckpointError, SpaceError
from transformer_nfn.io.layout import PLUS
from transformer_nfn.io.tensor_files import TensorInfo

LARGEST = 1 << 40


@dataclass(frozen=True)
class Size:
    """The size of an axis."""

    size: int


@dataclass(frozen=True)
class Sizes:
    """The axes of one network, for `transformer_nfn.io.layout`."""

    axes: Mapping[str, Size]

    def number(self, word: str) -> int:
        """A word of a shape: a number, or the name of an axis."""
        return int(word) if word.isdigit() else self.axes[word].size


def from_config(family: Family, config: Mapping[str, Any], where: str) -> dict[str, int]:
    """The sizes that a config says; none where there is no config."""
    sizes: dict[str, int] = {}
    if config:
        _evaluate(family.sizes, config, sizes, where)
    return sizes


def from_shapes(
    family: Family,
    config: Mapping[str, Any],
    known: Mapping[str, Line],
    infos: Mapping[str, TensorInfo],
    sizes: dict[str, int],
    where: str,
) -> list[str]:
    """Adds the sizes that follow from the shapes in the file.

    Args:
        family: of the file.
        config: its fields.
        known: the line of each tensor of the file.
        infos: the tensors of the file.
        sizes: what is known so far; every size afterwards.
        where: what errors call the file.

    Returns:
        The config fields that are needed for the remaining sizes; these are then 1 each.
    """
    needed = {axis for line in known.values() for slot in line.slots for axis in slot.axes}
    words = {word for line in known.values() for word in line.shape or ()}
    needed |= {word for word in words if not word.isdigit()}
    _settle(family.sizes, config, known, infos, sizes, where)
    unstated = []
    # Shapes decide before alternatives of an expression do: a grouped query shows in its shape.
    certain = {n: text for n, text in family.sizes.items() if not text.startswith("first(")}
    for name, text in family.sizes.items():
        if name in needed and name not in sizes:
            try:
                evaluate(text, config)
            except MissingFieldError as error:
                unstated.append(str(error))
                sizes[name] = 1
                _settle(certain, config, known, infos, sizes, where)
    missing = sorted(needed - sizes.keys())
    if missing:
        raise CheckpointError(
            f"'{where}' does not say the size of '{missing[0]}' of {family.title}: expected it in "
            "config.json or an --architecture file"
        )
    return unstated


def _settle(
    expressions: Mapping[str, str],
    config: Mapping[str, Any],
    known: Mapping[str, Line],
    infos: Mapping[str, TensorInfo],
    sizes: dict[str, int],
    where: str,
) -> None:
    before = -1
    while len(sizes) > before:
        before = len(sizes)
        for key, line in known.items():
            _solve(line, infos[key].shape, sizes)
        _evaluate(expressions, config, sizes, where)


def _evaluate(
    expressions: Mapping[str, str], config: Mapping[str, Any], sizes: dict[str, int], where: str
) -> None:
    for _ in expressions:  # one size may be said by means of another
        for name, text in expressions.items():
            if name not in sizes:
                try:
                    value = evaluate(text, {**config, **sizes})
                except MissingFieldError:
                    continue
                except SpaceError as error:
                    raise CheckpointError(f"'{where}': config: size {name}: {error}") from None
                if type(value) is not int or not 0 < value < LARGEST:
                    raise CheckpointError(
                        f"'{where}': config: size {name} ({text}) expected a whole number "
                        f"above 0, found {shown(value)}"
                    )
                sizes[name] = value


def _solve(line: Line, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Adds the sizes that one shape settles: one unknown factor in an axis of the file."""
    if not line.slots:
        return
    layout = line.slots[0].layout
    dims = layout.dims if line.shape is None else tuple((word,) for word in line.shape)
    if len(dims) != len(shape):
        return  # told when shapes are checked
    for i, (dim, n) in enumerate(zip(dims, shape, strict=True)):
        unknown = [a for a in dim if a not in sizes and a != PLUS and not a.isdigit()]
        fused = line.shape is None and layout.joined == i and len(line.slots) > 1
        if len(unknown) == 1 and not fused:
            rest = prod(len(line.slots) if a == PLUS else sizes[a] for a in dim if a != unknown[0])
            if n and n % rest == 0:
                sizes[unknown[0]] = n // rest
