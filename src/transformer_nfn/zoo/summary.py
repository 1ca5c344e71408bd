"""Summary statistics of a zoo, and its accuracy histogram as the paper draws it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from transformer_nfn.io.files import blank_figure, save_figure
from transformer_nfn.known_tasks import seeds_text, task_title
from transformer_nfn.zoo.damage import ORIGIN, damages
from transformer_nfn.zoo.errors import ZooError
from transformer_nfn.zoo.store.zoo import Zoo
from transformer_nfn.zoo.targets import TEST_ACCURACY, is_accuracy

# Bars of the histogram in a summary.
BINS = 10
# Values of a target of text that a summary counts.
VALUES = 8
# Panels per line in the figure of a mixed zoo.
COLUMNS = 6


def summarise(zoo: Zoo) -> dict[str, Any]:
    """Counts, accuracies or targets, and sizes or families of a zoo as plain JSON values.

    >>> summary = summarise(Zoo.open("mnist-sample"))
    >>> summary["runs"], summary["by_epoch"], sum(summary["histogram"]["counts"])
    (160, {12: 160}, 160)
    """
    if zoo.named:
        return _summarise_named(zoo)
    if zoo.mixed:
        return _summarise_sizes(zoo)
    accuracy = zoo.table["test_accuracy"].astype(float)
    counts, edges = accuracy_counts(accuracy, BINS)
    of_copies = damages(zoo) if zoo.metadata["origin"] == ORIGIN else []
    damaged = np.array([damage.name for damage in of_copies], dtype=object)
    epochs, rows = np.unique(zoo.table["epoch"][~zoo.table["best"]], return_counts=True)
    return {
        "path": str(zoo.path),
        "task": zoo.task,
        "origin": zoo.metadata["origin"],
        "made_by": zoo.metadata["made_by"],
        "seeds": zoo.seeds,
        "finished": zoo.finished,
        "runs": len(set(zoo.table["run"].tolist())),
        "crashed": len(zoo.crashed),
        "checkpoints": len(zoo),
        "weights": zoo.space.num_weights,
        "network": asdict(zoo.sizes.group),
        "by_epoch": {int(e): int(n) for e, n in zip(epochs, rows, strict=True)},
        "best": int(zoo.table["best"].sum()),
        "by_optimizer": dict(sorted(_by_name(zoo.table["optimizer"], accuracy).items())),
        "accuracy": _quartiles(accuracy),
        "histogram": {"counts": counts.tolist(), "edges": [round(float(e), 6) for e in edges]},
        "bytes": sum(p.stat().st_size for p in zoo.path.rglob("*") if p.is_file()),
        **({"by_damage": _by_name(damaged, accuracy)} if len(damaged) else {}),
    }


def _by_name(names: np.ndarray, accuracy: np.ndarray) -> dict[str, dict[str, float | int]]:
    """Accuracies of the networks of each name, in row order."""
    return {
        str(name): _quartiles(accuracy[names == name]) for name in dict.fromkeys(names.tolist())
    }


def _summarise_sizes(zoo: Zoo) -> dict[str, Any]:
    """Counts of a zoo of several sizes; ``kinds`` holds the summary of each."""
    summaries = {name: summarise(part) for name, part in zoo.parts.items()}
    totals = ("runs", "crashed", "checkpoints", "bytes")
    accuracy = [part.table["test_accuracy"].astype(float) for part in zoo.parts.values()]
    return {
        "path": str(zoo.path),
        "task": zoo.task,
        "made_by": zoo.metadata["made_by"],
        "seeds": zoo.seeds,
        "finished": zoo.finished,
        **{total: sum(summary[total] for summary in summaries.values()) for total in totals},
        "accuracy": _quartiles(np.concatenate([np.empty(0), *accuracy])),
        "missing": [name for name in zoo.metadata["kinds"] if name not in zoo.parts],
        "kinds": summaries,
    }


def _quartiles(values: np.ndarray) -> dict[str, float | int]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {"count": 0}
    names = ("min", "q1", "median", "q3", "max")
    quantiles = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return {"count": len(values), **dict(zip(names, quantiles, strict=True))}


def _summarise_named(zoo: Zoo) -> dict[str, Any]:
    """Families or layout, targets and bytes of a zoo of a user."""
    targets: dict[str, dict[str, Any]] = {}
    for name, column in zoo.targets.items():
        missing = len(zoo) - int(zoo.known(name, np.arange(len(zoo))).sum())
        if column.dtype == object:
            values = Counter(value for value in column.tolist() if value != "")
            targets[name] = {"distinct": len(values), "values": dict(values.most_common(VALUES))}
        else:
            targets[name] = _quartiles(column.astype(float))
        if missing:
            targets[name]["missing"] = missing
    layout = zoo.layout
    families = Counter(zoo.table.get("family", np.array([])).tolist())
    return {
        "path": str(zoo.path),
        "made_by": zoo.metadata["made_by"],
        "networks": len(zoo),
        **({"families": dict(families.most_common())} if layout is None else
           {"weights": layout.width, "layout": {k: list(v) for k, v in layout.shapes.items()}}),
        "bytes": sum(p.stat().st_size for p in zoo.path.rglob("*") if p.is_file()),
        "targets": targets,
    }  # fmt: skip


def accuracy_counts(accuracy: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and bin edges of the known accuracies, from 0 to 1."""
    return np.histogram(accuracy[~np.isnan(accuracy)], bins=bins, range=(0.0, 1.0))


def needed_accuracies(zoo: Zoo) -> str:
    """Column of the accuracies of a zoo: `TEST_ACCURACY`, else the first of a user's columns."""
    if not zoo.named:
        return TEST_ACCURACY
    names = sorted(zoo.targets, key=lambda name: name != TEST_ACCURACY)
    column = next((name for name in names if is_accuracy(name, zoo.targets[name])), None)
    if column is None:
        raise ZooError(
            f"'{zoo.path}' has no accuracies: expected numbers from 0 to 1 in a column named so, "
            f"found {', '.join(zoo.targets) or 'no targets'}"
        )
    return column


def zoo_title(zoo: Zoo) -> str:
    """A zoo in one line: task, number of checkpoints, seeds."""
    if zoo.named:
        return f"{zoo.path.name}: {len(zoo):,} networks"
    return f"{task_title(zoo.task)}: {len(zoo):,} checkpoints, {seeds_text(zoo.seeds)}"


def plot_accuracies(zoo: Zoo, out: Path, bins: int) -> Path:
    """Draw the histogram into ``out``, a png, pdf or svg by its suffix.

    Counts are in log scale; a zoo of several sizes has one histogram for each.
    """
    size, zoos, column = (5.0, 3.2), zoo.parts, needed_accuracies(zoo)
    if zoo.mixed:
        if not zoos:
            raise ZooError(f"'{zoo.path}' has no networks to plot yet")
        size = (9.0, 1.2 + 1.5 * -(-len(zoos) // COLUMNS))
    figure = blank_figure(*size, ZooError, "a plot")
    lines, columns = -(-len(zoos) // COLUMNS), min(len(zoos), COLUMNS)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, each) in zip(panels, zoos.items(), strict=False):
        counts, edges = accuracy_counts(each.table[column].astype(float), bins)
        axes.bar(100 * edges[:-1], counts, 100 / bins, align="edge", edgecolor="white",
                 linewidth=0.8)  # fmt: skip
        axes.set(xlim=(0, 100), yscale="log")
        axes.set_ylim(bottom=0.7)
        axes.grid(visible=False, axis="x")
        axes.set_title(f"{name}: {len(each):,}" if name else "", loc="left", fontsize="small")
    for axes in panels[len(zoos) :]:
        axes.set_visible(False)
    figure.supxlabel(f"{column.replace('_', ' ')} (%)")
    figure.supylabel("networks (log scale)")
    figure.suptitle(zoo_title(zoo))
    return save_figure(figure, out, ZooError)
