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
from transformer_nfn.zoo.store.model_zoo import ModelZoo
from transformer_nfn.zoo.store.zoo import MixedZoo, Zoo
from transformer_nfn.zoo.targets import TEST_ACCURACY, is_accuracy

# Bars of the histogram in a summary.
BINS = 10
# Values of a target of text that a summary counts.
VALUES = 8
# Panels per line in the figure of a mixed zoo.
COLUMNS = 6


def summarise(zoo: Zoo) -> dict[str, Any]:
    """Counts, accuracies and the histogram of a zoo as plain JSON values.

    >>> summary = summarise(Zoo.open("mnist-sample"))
    >>> summary["runs"], summary["by_epoch"], sum(summary["histogram"]["counts"])
    (160, {12: 160}, 160)
    """
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


def summarise_mixed(mixed: MixedZoo) -> dict[str, Any]:
    """Counts of a mixed zoo as plain JSON values; ``kinds`` holds the summary of each zoo."""
    summaries = {name: summarise(zoo) for name, zoo in mixed.zoos.items()}
    totals = ("runs", "crashed", "checkpoints", "bytes")
    accuracy = [zoo.table["test_accuracy"].astype(float) for zoo in mixed]
    return {
        "path": str(mixed.path),
        "task": mixed.task,
        "made_by": mixed.metadata["made_by"],
        "seeds": mixed.seeds,
        "finished": mixed.finished,
        **{total: sum(summary[total] for summary in summaries.values()) for total in totals},
        "accuracy": _quartiles(np.concatenate([np.empty(0), *accuracy])),
        "missing": [group.name for group in mixed.groups if group.name not in mixed.zoos],
        "kinds": summaries,
    }


def _quartiles(values: np.ndarray) -> dict[str, float | int]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {"count": 0}
    names = ("min", "q1", "median", "q3", "max")
    quantiles = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return {"count": len(values), **dict(zip(names, quantiles, strict=True))}


def summarise_models(zoo: ModelZoo) -> dict[str, Any]:
    """Families, targets and bytes of a zoo of checkpoints as plain JSON values."""
    targets: dict[str, dict[str, Any]] = {}
    for name, column in zoo.targets.items():
        if column.dtype == object:
            values = Counter(column.tolist())
            targets[name] = {"distinct": len(values), "values": dict(values.most_common(VALUES))}
        else:
            targets[name] = _quartiles(column.astype(float))
    return {
        "path": str(zoo.path),
        "made_by": zoo.metadata["made_by"],
        "networks": len(zoo),
        "families": dict(Counter(zoo.table["family"].tolist()).most_common()),
        "bytes": int(zoo.table["bytes"].sum()),
        "targets": targets,
    }


def accuracy_counts(accuracy: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and bin edges of the known accuracies, from 0 to 1."""
    return np.histogram(accuracy[~np.isnan(accuracy)], bins=bins, range=(0.0, 1.0))


def needed_accuracies(zoo: ModelZoo) -> str:
    """Column of a zoo of checkpoints with their accuracies: `TEST_ACCURACY`, else the first."""
    names = sorted(zoo.targets, key=lambda name: name != TEST_ACCURACY)
    column = next((name for name in names if is_accuracy(name, zoo.targets[name])), None)
    if column is None:
        raise ZooError(
            f"'{zoo.path}' has no accuracies: expected numbers from 0 to 1 in a column named so, "
            f"found {', '.join(zoo.targets) or 'no targets'}"
        )
    return column


def zoo_title(zoo: Zoo | MixedZoo | ModelZoo) -> str:
    """A zoo in one line: task, number of checkpoints, seeds."""
    if isinstance(zoo, ModelZoo):
        return f"{zoo.path.name}: {len(zoo):,} networks"
    return f"{task_title(zoo.task)}: {len(zoo):,} checkpoints, {seeds_text(zoo.seeds)}"


def plot_accuracies(zoo: Zoo | MixedZoo | ModelZoo, out: Path, bins: int) -> Path:
    """Draw the histogram into ``out``, a png, pdf or svg by its suffix.

    Counts are in log scale; a mixed zoo has one histogram for each size.
    """
    size, zoos = (5.0, 3.2), zoo.zoos if isinstance(zoo, MixedZoo) else {"": zoo}
    if isinstance(zoo, MixedZoo):
        if not zoos:
            raise ZooError(f"'{zoo.path}' has no networks to plot yet")
        size = (9.0, 1.2 + 1.5 * -(-len(zoos) // COLUMNS))
    column = needed_accuracies(zoo) if isinstance(zoo, ModelZoo) else TEST_ACCURACY
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
