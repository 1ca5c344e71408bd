"""The levels of a layer as a table a person can read."""

from __future__ import annotations

from collections.abc import Sequence

from transformer_nfn.nn.level_map import LevelMap


def levels_table(maps: Sequence[LevelMap]) -> str:
    """One line a level: what goes in and comes out for each channel, and how many parameters."""
    rows = [("level", "in", "out", "parameters")]
    for linear in reversed(maps):
        level = linear.level
        rows.append(
            (
                level.name,
                ", ".join(f"{t.name} {t.features}" for t in level.terms) or "1",
                ", ".join(f"{t.name} {t.features}" for t in level.targets),
                f"{sum(p.numel() for p in linear.parameters()):,}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows
    )
