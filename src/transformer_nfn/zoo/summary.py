"""What is in a zoo, in a few numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from transformer_nfn.zoo.damage_record import ORIGIN, damages
from transformer_nfn.zoo.plot import accuracy_counts
from transformer_nfn.zoo.store import MixedZoo, Zoo


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
