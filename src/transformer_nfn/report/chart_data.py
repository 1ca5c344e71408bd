"""The data of the page, as JSON: the values behind its tables and charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transformer_nfn.models.predictor import model_name, model_place
from transformer_nfn.paper.gather import Run, Study
from transformer_nfn.paper.table_text import (
    TableView,
    curve_lines,
    finite,
    mean_tau,
    zoo_size,
)
from transformer_nfn.prediction.runs import ENSEMBLE_TAU, RunRecord
from transformer_nfn.report.held_out import MILLION, HeldOut, TestedModel, plain
from transformer_nfn.report.number_text import network_name

BINS = 20
PARTS = ("train", "val", "test")


def as_script(data: dict[str, Any]) -> str:
    """The data as JSON, safe inside a ``script`` element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def zoo_data(tested: HeldOut, curve: TableView | None = None) -> dict[str, Any]:
    """All of one zoo; an empty list where there is nothing to draw.

    Args:
        tested: predictions for its held-out networks.
        curve: its learning curve, if there is one.
    """
    parts: list[list[int]] = []
    zoo, networks, record = tested.zoo, tested.networks, tested.zoo.example.record
    pairs = zip(networks.place, networks.run, strict=True)
    everything = tested.everything
    return {
        "label": zoo.label,
        "size": zoo_size(record.zoo),
        "chosen": [record.selection.get(part) for part in PARTS],
        "models": [_model_data(run, tested.of(run), parts) for run in zoo.finished],
        "parts": parts,
        "networks": {
            "name": [network_name(tested.reference, place, run) for place, run in pairs],
            "run": [plain(run) for run in networks.run],
            "accuracy": networks.accuracy.tolist(),
            "settings": {name: networks.configuration[name] for name in networks.settings},
        },
        "validation": sorted(networks.validation),
        "everything": None if everything is None else np.round(everything, 6).tolist(),
        "histogram": histogram(networks.accuracy if everything is None else everything),
        "sizes": _lines(zoo.by_size() if curve is None else curve_lines(curve)),
        "curves": [
            _model(run) | {"seeds": seeds} for run in zoo.finished if (seeds := _curves(run))
        ],
    }


def study_data(study: Study) -> dict[str, Any]:
    """The runs and the cells of tables, with the τ of every seed."""
    return {
        "tables": [_view_data(view) for view in (*study.tables, *study.curves.values())],
        "runs": [
            {
                "zoo": index,
                "model": run.record.model,
                "done": run.done,
                "seeds": [plain(seed.get("seed")) for seed in run.record.seeds],
                "taus": _seed_taus(run.record),
                "chosen": [run.record.selection.get(part) for part in PARTS],
            }
            for run in study.runs
            for index, zoo in enumerate(study.zoos)
            if run in zoo.runs
        ],
    }


def histogram(accuracy: np.ndarray) -> dict[str, Any] | None:
    """Number of networks in each of twenty bands of accuracy; a bound is in the band above it."""
    values = np.rint(accuracy[np.isfinite(accuracy)] * MILLION).astype(np.int64)
    if not len(values):
        return None
    band = np.clip(values * BINS // MILLION, 0, BINS - 1)
    return {"counts": np.bincount(band, minlength=BINS).tolist(), "total": len(values)}


def number(value: Any, digits: int = 5) -> float | None:
    """A finite number, rounded; None for anything else."""
    known = finite(value)
    return None if known is None else round(known, digits)


def _model(run: Run) -> dict[str, Any]:
    return {"name": run.name, "color": model_place(run.record.model)[0]}


def _model_data(run: Run, tested: TestedModel | None, parts: list[list[int]]) -> dict[str, Any]:
    """A compared model: its record, and its predictions for each test network."""
    summary, (tau, error) = run.record.summary, mean_tau(run.record)
    tests = {} if tested is None else {part.seed: part for part in tested.seeds}
    seeds = []
    for entry in run.record.seeds:
        seed: dict[str, Any] = {"seed": plain(entry.get("seed"))}
        for key in ("tau", "tau_low", "tau_high", "r2", "mae"):
            seed[key] = number(entry.get(key), 6)
        if (part := tests.get(entry.get("seed", -1))) is not None:
            seed["part"] = _place(part.network.tolist(), parts)
            for key in ("predicted", "low", "high"):
                seed[key] = _or_none(getattr(part, key))
        seeds.append(seed)
    return _model(run) | {
        "tau": number(tau, 6),
        "error": number(error, 6),
        "level": number(summary.get("level")),
        "recorded": {
            key: number(summary.get(key), 6) for key in ("coverage", "radius", ENSEMBLE_TAU)
        },
        "parameters": run.record.num_parameters,
        "seeds": seeds,
    }


def _place(part: list[int], parts: list[list[int]]) -> int:
    """Index of a list of networks; seeds and models mostly share them."""
    if part not in parts:
        parts.append(part)
    return parts.index(part)


def _or_none(values: np.ndarray) -> list[float | None]:
    """Values with None for NaN, which JSON lacks."""
    return [None if value != value else value for value in values.tolist()]


def _seed_taus(record: RunRecord) -> list[float | None]:
    return [number(seed.get("tau"), 6) for seed in record.seeds]


def _view_data(view: TableView) -> dict[str, Any]:
    return {
        "name": view.paper.name,
        "zoo": view.zoo,
        "quantity": view.paper.quantity,
        "rows": list(view.rows),
        "columns": list(view.columns),
        "cells": [
            {
                "row": row,
                "column": column,
                "taus": _seed_taus(cell.record) if cell.record.status == "done" else [],
                "parameters": cell.record.num_parameters,
            }
            for (row, column), cell in view.ours.items()
        ],
    }


def _lines(by_model: Mapping[str, Sequence[RunRecord]]) -> list[dict[str, Any]]:
    """τ of each model by number of networks trained on."""
    return [
        {
            "name": model_name(model),
            "color": model_place(model)[0],
            "points": [
                {
                    "train": record.selection["train"],
                    "tau": number(record.summary["tau"], 6),
                    "error": number(mean_tau(record)[1], 6),
                    "taus": _seed_taus(record),
                }
                for record in records
            ],
        }
        for model, records in by_model.items()
    ]


def _curves(run: Run) -> list[dict[str, Any]]:
    """Loss and validation τ by epoch, with the epoch that was kept."""
    kept = {str(seed.get("seed")): number(seed.get("best_epoch")) for seed in run.record.seeds}
    seeds: dict[str, dict[int, Sequence[float | None]]] = {}
    for entry in run.log:
        # A resumed run may write an epoch twice; the later line holds.
        values = [number(entry["loss"], 6), number(entry["val_tau"], 6)]
        seeds.setdefault(str(entry["seed"]), {})[entry["epoch"]] = values
    return [
        {
            "seed": seed,
            "kept": kept.get(seed),
            "epoch": sorted(points),
            "loss": [points[epoch][0] for epoch in sorted(points)],
            "val_tau": [points[epoch][1] for epoch in sorted(points)],
        }
        for seed, points in seeds.items()
    ]
