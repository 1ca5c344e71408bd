"""What the charts of the report draw: the runs as plain JSON values."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from transformer_nfn.paper.gather import Run, ZooStudy, model_order
from transformer_nfn.paper.learning_curve import curve_lines
from transformer_nfn.paper.table_text import TableView
from transformer_nfn.prediction.records import CONFIGURATION

# More points than this hide each other and make a page slow.
MOST_POINTS = 1000
BINS = 20


def as_script(zoos: list[dict[str, Any]]) -> str:
    """The charts of all zoos as JSON, safe inside a ``script`` element."""
    text = json.dumps(
        {"zoos": zoos},
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def zoo_data(zoo: ZooStudy, curve: TableView | None = None) -> dict[str, Any]:
    """All charts of one zoo; an empty list where there is nothing to draw.

    Args:
        zoo: the runs on it.
        curve: its learning curve, where one was made.
    """
    networks, panels = _scatter(zoo)
    return {
        "label": zoo.label,
        "taus": [_taus(run) for run in zoo.finished],
        "networks": networks,
        "scatter": panels,
        "histogram": _histogram(zoo),
        "sizes": _sizes(zoo) if curve is None else _curve(curve),
        "curves": [
            _model(run) | {"seeds": seeds} for run in zoo.finished if (seeds := _curves(run))
        ],
    }


def number(value: Any, digits: int = 5) -> float | None:
    """A finite number, rounded; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return round(float(value), digits) if np.isfinite(value) else None


def plain(value: Any) -> Any:
    """A value of a configuration as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)


def _model(run: Run) -> dict[str, Any]:
    return {"name": run.name, "color": model_order(run.record.model)}


def _sizes(zoo: ZooStudy) -> list[dict[str, Any]]:
    return [
        _model(runs[0])
        | {
            "points": [
                {
                    "train": run.record.selection["train"],
                    "tau": number(run.record.summary.get("tau")),
                    "error": number(run.record.summary.get("tau_se")),
                }
                for run in runs
                if number(run.record.summary.get("tau")) is not None
            ]
        }
        for runs in zoo.by_size().values()
    ]


def _curve(view: TableView) -> list[dict[str, Any]]:
    return [
        {
            "name": view.rows[model],
            "color": model_order(model),
            "points": [
                {"train": point.train, "tau": number(point.tau), "error": number(point.error)}
                for point in points
            ],
        }
        for model, points in curve_lines(view).items()
    ]


def _taus(run: Run) -> dict[str, Any]:
    summary = run.record.summary
    seeds = [
        {key: number(seed.get(key)) for key in ("seed", "tau", "tau_low", "tau_high")}
        for seed in run.record.seeds
    ]
    return _model(run) | {
        "tau": number(summary.get("tau")),
        "error": number(summary.get("tau_se")),
        "seeds": [seed for seed in seeds if seed["tau"] is not None],
    }


def _scatter(zoo: ZooStudy) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """One seed for each model; networks stand once, whichever models saw them."""
    where: dict[int, int] = {}
    networks: dict[str, list[Any]] = {key: [] for key in ("id", "accuracy", *CONFIGURATION)}
    panels = []
    for run in zoo.finished:
        part = run.tested
        if part is None or not len(part["row"]):
            continue
        seed = part["seed"].min()
        chosen = np.flatnonzero(part["seed"] == seed)
        total = len(chosen)
        if total > MOST_POINTS:
            chosen = chosen[np.linspace(0, total - 1, MOST_POINTS).astype(int)]
        for i in chosen:
            row = int(part["row"][i])
            if row not in where:
                where[row] = len(where)
                networks["id"].append(plain(part["run"][i]) if "run" in part else row)
                networks["accuracy"].append(number(part["accuracy"][i]))
                for key in CONFIGURATION:
                    networks[key].append(plain(part[key][i]))
        scores = [entry for entry in run.record.seeds if entry.get("seed") == seed]
        panels.append(
            _model(run)
            | {
                "seed": int(seed),
                "total": total,
                "tau": number(scores[0].get("tau")) if scores else None,
                "network": [where[int(row)] for row in part["row"][chosen]],
                **{
                    key: [number(value) for value in part[key][chosen]]
                    for key in ("predicted", "low", "high")
                },
            }
        )
    return networks, panels


def _histogram(zoo: ZooStudy) -> dict[str, Any] | None:
    """Accuracies of all networks in any validation or test part."""
    found: dict[int, float] = {}
    for run in zoo.main:
        if run.predictions is not None:
            pairs = zip(run.predictions["row"], run.predictions["accuracy"], strict=True)
            found.update((int(row), float(accuracy)) for row, accuracy in pairs)
    values = np.array([value for value in found.values() if np.isfinite(value)])
    if not len(values):
        return None
    counts, _ = np.histogram(values, bins=BINS, range=(0.0, 1.0))
    return {"counts": counts.tolist(), "total": len(values)}


def _curves(run: Run) -> list[dict[str, Any]]:
    seeds: dict[Any, dict[str, Any]] = {}
    for entry in run.log:
        epoch = number(entry.get("epoch"))
        if epoch is None:
            continue
        seed = seeds.setdefault(
            str(entry.get("seed")), {"seed": str(entry.get("seed")), "points": {}}
        )
        # A resumed run may write an epoch twice; the later line holds.
        seed["points"][epoch] = [number(entry.get("loss")), number(entry.get("val_tau"))]
    return [
        {
            "seed": seed["seed"],
            "epoch": sorted(seed["points"]),
            "loss": [seed["points"][epoch][0] for epoch in sorted(seed["points"])],
            "val_tau": [seed["points"][epoch][1] for epoch in sorted(seed["points"])],
        }
        for seed in seeds.values()
    ]
