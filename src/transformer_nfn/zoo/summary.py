"""Summary statistics of a zoo, and its accuracy histogram as the paper draws it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_nfn.io.files import blank_figure, save_figure
from transformer_nfn.known_tasks import task_title
from transformer_nfn.seed_kinds import seeds_text
from transformer_nfn.zoo.damage import ORIGIN, damages
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


def summarise(zoo: Zoo, bins: int = 10) -> dict[str, Any]:
    """Counts, accuracies and the histogram of a zoo as plain JSON values."""
    accuracy = zoo.table["test_accuracy"].astype(float)
    known = accuracy[~np.isnan(accuracy)]
    counts, edges = accuracy_counts(zoo, bins)
    percents, rows = np.unique(zoo.table["epoch"][~zoo.table["best"]], return_counts=True)
    return {
        "path": str(zoo.path),
        "task": zoo.about["task"]["name"],
        "origin": zoo.about["origin"],
        "made_by": zoo.about["made_by"],
        "seeds": zoo.seeds,
        "finished": zoo.finished,
        "runs": len(set(zoo.table["run"].tolist())),
        "crashed": len(zoo.crashed),
        "checkpoints": len(zoo),
        "weights": zoo.space.num_weights,
        "network": asdict(zoo.arch.kind),
        "by_epoch": {int(e): int(n) for e, n in zip(percents, rows, strict=True)},
        "best": int(zoo.table["best"].sum()),
        "by_optimizer": {
            str(name): _quartiles(accuracy[zoo.table["optimizer"] == name])
            for name in sorted(set(zoo.table["optimizer"].tolist()))
        },
        "accuracy": _quartiles(known),
        "histogram": {"counts": counts.tolist(), "edges": [round(float(e), 6) for e in edges]},
        "bytes": sum(p.stat().st_size for p in zoo.path.rglob("*") if p.is_file()),
        **({"by_damage": _by_damage(zoo)} if zoo.about["origin"] == ORIGIN else {}),
    }


def _by_damage(zoo: Zoo) -> dict[str, dict[str, float | int]]:
    """The accuracies of each kind and strength of damage, in the order of the rows."""
    accuracy = zoo.table["test_accuracy"].astype(float)
    names = np.array([damage.words for damage in damages(zoo)], dtype=object)
    return {name: _quartiles(accuracy[names == name]) for name in dict.fromkeys(names.tolist())}


def summarise_mixed(mixed: MixedZoo, bins: int = 10) -> dict[str, Any]:
    """Counts of a mixed zoo as plain JSON values, and under ``kinds`` what `summarise` says."""
    kinds = {name: summarise(zoo, bins) for name, zoo in mixed.zoos.items()}
    totals = ("runs", "crashed", "checkpoints", "bytes")
    accuracy = [zoo.table["test_accuracy"].astype(float) for zoo in mixed]
    return {
        "path": str(mixed.path),
        "task": mixed.task,
        "made_by": mixed.about["made_by"],
        "seeds": mixed.seeds,
        "finished": mixed.finished,
        **{total: sum(found[total] for found in kinds.values()) for total in totals},
        "accuracy": _quartiles(np.concatenate([np.empty(0), *accuracy])),
        "missing": [kind.name for kind in mixed.kinds if kind.name not in mixed.zoos],
        "kinds": kinds,
    }


def _quartiles(values: np.ndarray) -> dict[str, float | int]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {"count": 0}
    low, first, median, third, high = np.quantile(values, (0, 0.25, 0.5, 0.75, 1))
    return {
        "count": len(values),
        "min": float(low),
        "q1": float(first),
        "median": float(median),
        "q3": float(third),
        "max": float(high),
    }
