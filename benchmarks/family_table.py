"""Predictors of checkpoints of any family, side by side on zoos of a user's own networks.

Splits each zoo several times into training, validation and test networks, trains every model on
the same parts and writes a table of Kendall's τ and R² on the test networks (mean over splits and
seeds; the error is that of the mean over splits), parameters and seconds a seed. Finished runs are
kept in DIR, so an interrupted call resumes; after --minutes no new run is started. Models whose
library is not installed are left out and named:

    python benchmarks/family_table.py ZOO [ZOO …] --out DIR [--target COLUMN] [--splits 3]
        [--seeds 3] [--device auto] [--models whole_network,invariant_mlp,…] [--minutes N]
        [--json FOLDER]

Without --target it is test_accuracy, or perplexity where a zoo has that. FOLDER/family-ZOO.json is
a table of `tools/result_tables.py`, with all numbers under "cells".
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from rivals import installed, tau_text
from transformer_nfn.cli.options import pick_device
from transformer_nfn.models.predictor import model_name
from transformer_nfn.prediction.data import Parts, Selection, describe_zoo, load_parts
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.metrics import standard_error
from transformer_nfn.zoo import ModelZoo

OPTIONS: dict[str, dict[str, Any]] = {
    "whole_network:probes": {"invariants": 0},
    "whole_network:invariants": {"probes": 0},
}
MODELS = (
    "whole_network", *OPTIONS, "invariant_mlp", "invariant_boosting", "statistics_mlp",
    "statistics_linear", "statistics_boosting", "weights_mlp", "xgboost",
)  # fmt: skip
FIGURES = ("tau", "r2", "tau_together")


def main() -> None:
    """Trains what is missing, and writes a table for each zoo after every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("zoos", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", help="column to predict")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--json", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    names = [name for name in given.models.split(",") if installed(name)]
    left = 0
    for path in given.zoos:
        zoo = ModelZoo.open(path)
        target = given.target or next(
            name for name in ("test_accuracy", "perplexity") if name in zoo.targets
        )
        parts = [
            load_parts(zoo, Selection(None, 0.0, seed, target=target), model="whole_network")
            for seed in range(given.splits)
        ]
        print(f"{path.name}, {target}: {parts[0].counts}", flush=True)
        cells: dict[str, dict[str, Any]] = {}
        for name in names:
            done = []
            for split, networks in enumerate(parts):
                folder = given.out / path.name / target / name.replace(":", "-") / str(split)
                if time.monotonic() > end and not (folder / "run.json").is_file():
                    left += 1
                else:
                    done.append(_trained(zoo, networks, name, given, folder))
            if done:
                cells[name] = _cell(done)
                print(f"  {name:26} τ {tau_text(cells[name])}  R² {cells[name]['r2']:.3f}  "
                      f"{cells[name]['seconds_a_seed']:.1f} s a seed", flush=True)  # fmt: skip
                if given.json is not None:
                    _write(given, zoo, target, parts[0], cells)
    print("all rows measured" if not left else f"{left} runs left for another call")


def _trained(
    zoo: ModelZoo, networks: Parts, name: str, given: argparse.Namespace, folder: Path
) -> Any:
    model = name.split(":")[0]
    data = networks.to(pick_device(given.device))
    experiment = Experiment(model, range(given.seeds), options=OPTIONS.get(name, {}), keep=False)
    return train_run(describe_zoo(zoo), data, experiment, folder)


def _cell(records: list[Any]) -> dict[str, Any]:
    figures = {key: [record.summary[key] for record in records] for key in FIGURES}
    return {
        "parameters": records[0].num_parameters,
        "seconds_a_seed": float(np.mean([record.seeds[0]["seconds"] for record in records])),
        "tau_se": standard_error(figures["tau"]),
        **{key: float(np.mean(values)) for key, values in figures.items()},
        "by_split": figures["tau"],
    }


def _title(name: str) -> str:
    model, _, part = name.partition(":")
    return model_name(model) + (f", {part} only" if part else "")


def _write(
    given: argparse.Namespace, zoo: ModelZoo, target: str, parts: Parts, cells: dict[str, Any]
) -> None:
    """The table of one zoo: a row for each model, the best first."""
    rows = []
    for name, cell in sorted(cells.items(), key=lambda item: -item[1]["tau"]):
        count = cell["parameters"]
        rows.append([
            _title(name), "trees" if count is None else f"{count:,}", tau_text(cell),
            f"{cell['tau_together']:.3f}", f"{cell['r2']:.3f}", f"{cell['seconds_a_seed']:.1f}",
        ])  # fmt: skip
    families = ", ".join(describe_zoo(zoo)["families"])
    counts = parts.counts
    table = {
        "title": f"{zoo.path.name}: {target.replace('_', ' ')} of {families} networks",
        "setting": f"{len(zoo):,} networks, {counts['train']} to train on, {counts['val']} to "
        f"select by and {counts['test']} to test on; {given.splits} splits, {given.seeds} seeds "
        "of each predictor.",
        "commands": [
            f"python benchmarks/family_table.py {zoo.path.name} --target {target} --splits "
            f"{given.splits} --seeds {given.seeds} --out DIR --json benchmarks/results"
        ],
        "columns": ["Model", "parameters", "τ", "τ, seeds together", "R²", "seconds a seed"],
        "rows": rows,
        "cells": cells,
    }
    given.json.mkdir(parents=True, exist_ok=True)
    text = json.dumps(table, indent=1, ensure_ascii=False)
    (given.json / f"family-{zoo.path.name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
