"""The accuracy histogram of a zoo, as the paper draws it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from transformer_nfn.io.files import blank_figure, save_figure
from transformer_nfn.known_tasks import task_title
from transformer_nfn.seed_kinds import seeds_text
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.store import MixedZoo, Zoo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Panels in a row of a mixed zoo's figure.
KINDS_ACROSS = 6


def accuracy_counts(zoo: Zoo, bins: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Counts and edges of the test accuracies of every checkpoint, from 0 to 1."""
    accuracy = zoo.table["test_accuracy"].astype(float)
    return np.histogram(accuracy[~np.isnan(accuracy)], bins=bins, range=(0.0, 1.0))


def paint_accuracies(figure: Figure, zoo: Zoo, bins: int = 20, color: str | None = None) -> None:
    """The histogram on a figure, counts in log scale."""
    counts, edges = accuracy_counts(zoo, bins)
    axes = figure.subplots()
    axes.bar(100 * edges[:-1], counts, width=100 / bins, align="edge", color=color,
             edgecolor="white", linewidth=0.8)  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.grid(visible=False, axis="x")
    axes.set(xlim=(0, 100), xlabel="test accuracy (%)", ylabel="networks (log scale)")
    name = task_title(zoo.about["task"]["name"])
    axes.set_title(f"{name}: {len(zoo):,} checkpoints, {seeds_text(zoo.seeds)}", loc="left")


def paint_kinds(figure: Figure, mixed: MixedZoo, bins: int = 20) -> None:
    """A small histogram of each kind on a figure, all on the same axes."""
    across = min(len(mixed.zoos), KINDS_ACROSS)
    down = -(-len(mixed.zoos) // across)
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes, (name, zoo) in zip(panels, mixed.zoos.items(), strict=False):
        counts, edges = accuracy_counts(zoo, bins)
        axes.bar(100 * edges[:-1], counts, width=100 / bins, align="edge")
        axes.set(xlim=(0, 100), yscale="log")
        axes.set_ylim(bottom=0.7)
        axes.set_title(f"{name}: {len(zoo):,}", loc="left", fontsize="small")
        axes.grid(visible=False, axis="x")
    for axes in panels[len(mixed.zoos) :]:
        axes.set_visible(False)
    figure.supxlabel("test accuracy (%)")
    figure.supylabel("networks (log scale)")
    title = f"{task_title(mixed.task)}: {len(mixed):,} checkpoints, {seeds_text(mixed.seeds)}"
    figure.suptitle(title)


def plot_accuracies(zoo: Zoo | MixedZoo, out: Path, bins: int = 20) -> Path:
    """Draws the histogram, counts in log scale, into ``out`` (png, pdf or svg by its name)."""
    if isinstance(zoo, MixedZoo):
        if not zoo.zoos:
            raise ZooError(f"'{zoo.path}' has no networks to plot yet")
        down = -(-len(zoo.zoos) // KINDS_ACROSS)
        figure = blank_figure(9, 1.2 + 1.5 * down, ZooError, "a plot")
        paint_kinds(figure, zoo, bins)
        return save_figure(figure, out, ZooError)
    figure = blank_figure(5, 3.2, ZooError, "a plot")
    paint_accuracies(figure, zoo, bins)
    return save_figure(figure, out, ZooError)
