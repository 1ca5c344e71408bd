"""How does τ grow with the networks to train on: at which numbers of them, on which lines?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformer_nfn.paper.table_text import ALL_NETWORKS, TableView
from transformer_nfn.prediction.runs import RunError

SMALLEST = 64


@dataclass(frozen=True)
class CurvePoint:
    """τ of one model on so many networks; no standard error where there is one seed only."""

    train: int
    tau: float
    error: float | None


def curve_sizes(train: int, only: Sequence[int] | None = None) -> dict[str, int | None]:
    """The columns: 64, 128, 256, … networks, and all (None).

    Args:
        train: how many networks there are to train on.
        only: these numbers of networks instead, each at least 64 and fewer than ``train``.
    """
    if train < SMALLEST:
        raise RunError(
            f"a learning curve needs at least {SMALLEST} networks to train on, "
            f"the training part of the zoo has {train}"
        )
    for size in only or ():
        if not SMALLEST <= size < train:
            raise RunError(
                f"the sizes of a learning curve are at least {SMALLEST} and less than the "
                f"{train} networks of the training part, found {size}"
            )
    if only:
        return {str(size): size for size in sorted(set(only))}
    sizes: dict[str, int | None] = {}
    size = SMALLEST
    while size < train:
        sizes[str(size)] = size
        size *= 2
    return {**sizes, ALL_NETWORKS: None}


def curve_lines(view: TableView) -> dict[str, list[CurvePoint]]:
    """For each model its points by number of networks; the model that ends highest comes first."""
    lines = {}
    for row in view.rows:
        cells = [view.ours.get((row, column)) for column in view.columns]
        points = [
            CurvePoint(train, cell.value, cell.error)
            for cell in cells
            if cell is not None and cell.value is not None
            if isinstance(train := cell.record.selection.get("train"), int)
        ]
        if points:
            lines[row] = points
    return dict(sorted(lines.items(), key=lambda line: -line[1][-1].tau))
