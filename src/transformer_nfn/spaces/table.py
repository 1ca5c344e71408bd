"""A space as a table a person can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_nfn.spaces.space import WeightSpace


def space_table(space: WeightSpace) -> str:
    """The space's tensors, axes and invariant products as aligned text."""
    tensors = [
        (name, " × ".join(str(n) for n in space.shape(name)) or "1", " ".join(spec.words()))
        for name, spec in space.tensors.items()
    ]
    lines = [f"{space.name}: {len(tensors)} tensors, {space.num_weights:,} weights", ""]
    lines += _columns(("tensor", "shape", "axes (* = dual)"), tensors)
    axes = []
    for axis in space.axes.values():
        acts = axis.action.describe(axis.size)
        if axis.of is not None:
            acts += f", one for each {axis.of}"
        axes.append((axis.name, str(axis.size), axis.kind, acts))
    lines += ["", *_columns(("axis", "size", "kind", "what acts on it"), axes)]
    if space.products:
        rows = [(p.name, p.over, " ".join(p.axes)) for p in space.products]
        lines += ["", *_columns(("invariant product", "over", "axes"), rows)]
    for shift in space.shifts:
        note = f" (taken up by {shift.into} through {shift.through})" if shift.into else " freely"
        lines += ["", f"{shift.tensor} may be shifted{note}"]
    return "\n".join(lines)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    table = [head, ["─" * w for w in widths], *rows]
    return [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]
