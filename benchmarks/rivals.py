"""Rivals side by side: every model on the same training, validation and test networks of a zoo.

Trains at several numbers of training networks and writes a table of Kendall's τ and R² on the test
part (mean over seeds, standard error), parameters and seconds a seed. Finished rows are kept in
DIR, so an interrupted call resumes; after --minutes no new row is started. Models whose library is
not installed are left out and named. These models use a small part of a large GPU: --jobs trains so
many rows side by side, each in a process of its own, the largest first:

    python benchmarks/rivals.py ZOO [ZOO …] --out DIR [--train 256,1434] [--seeds 3]
        [--device auto] [--models whole_network,probegen,…] [--epochs N] [--minutes N]
        [--jobs N] [--json FOLDER]

FOLDER/rivals-ZOO.json is a table of `tools/result_tables.py`, with all numbers under "cells".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_nfn.cli.options import pick_device
from transformer_nfn.known_tasks import seeds_text, task_title
from transformer_nfn.models.predictor import find, model_name
from transformer_nfn.prediction.data import Selection, describe_zoo, load_parts
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.zoo import Zoo

ONE_CHECKPOINT = ":one"
"""Ending of a model that is given no other checkpoints than its rivals."""
LIBRARIES = {
    "xgboost": "xgboost", "lightgbm": "lightgbm", "invariant_boosting": "lightgbm",
    "statistics_boosting": "lightgbm",
}  # fmt: skip
MODELS = (
    "whole_network", f"whole_network{ONE_CHECKPOINT}", "probegen", "hidden_probe", "neural_graph",
    "transformer_nfn", "statnn", "mlp", "xgboost", "invariant_boosting", "invariant_mlp",
    "statistics_linear",
)  # fmt: skip


def main() -> None:
    """Trains what is missing, and writes a table for each zoo after every row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("zoos", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", default="256,1434", help="numbers of training networks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--epochs", type=int, help="of neural models (by model)")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1, help="rows to train side by side")
    parser.add_argument("--json", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    names = [name for name in given.models.split(",") if installed(name)]
    if given.jobs > 1:
        _side_by_side(given, names, end)
    cells: dict[Path, dict[str, dict[str, Any]]] = {path: {} for path in given.zoos}
    left = 0
    for size in map(int, given.train.split(",")):
        for path in given.zoos:
            zoo = Zoo.open(path)
            selection = Selection(max_train=size, all_checkpoints=True)
            parts = load_parts(zoo, selection)
            on_device = parts.to(pick_device(given.device))
            print(f"{path.name}, {len(parts.train)} training networks", flush=True)
            for name in names:
                folder = row_folder(given.out, path, size, name)
                if time.monotonic() > end and not (folder / "run.json").is_file():
                    left += 1
                    continue
                model = name.removesuffix(ONE_CHECKPOINT)
                protocol = Protocol.of(model, given.epochs)
                data = on_device
                if name != model or not find(model).every_checkpoint:
                    data = replace(data, more=None)
                experiment = Experiment(
                    model, range(given.seeds), protocol, {}, selection.to_json(), keep=False
                )
                record = train_run(describe_zoo(zoo), data, experiment, folder)
                cell = {
                    "parameters": record.num_parameters,
                    "seconds_a_seed": record.seeds[0]["seconds"],
                    "epochs": None if hasattr(find(model), "fit") else protocol.epochs,
                    "networks": {**parts.counts},
                    **{key: record.summary[key] for key in ("tau", "tau_se", "r2", "tau_together")},
                }
                if math.isnan(cell["tau_se"]):  # one seed
                    cell["tau_se"] = None
                cells[path].setdefault(name, {})[str(size)] = cell
                print(f"  {name:24} τ {tau_text(cell)}  R² {cell['r2']:.3f}  "
                      f"{cell['seconds_a_seed']:.1f} s a seed", flush=True)  # fmt: skip
                if given.json is not None:
                    _write(given, zoo, cells[path])
    print("all rows measured" if not left else f"{left} rows left for another run")


def row_folder(out: Path, zoo: Path, size: int, name: str) -> Path:
    """Folder of the run of one row."""
    return out / zoo.name / str(size) / name.replace(":", "-")


def _side_by_side(given: argparse.Namespace, names: list[str], end: float) -> None:
    """Train the missing rows in processes of their own, the largest first."""

    def train(row: tuple[int, Path, str]) -> None:
        size, path, name = row
        folder = row_folder(given.out, path, size, name)
        if time.monotonic() > end or (folder / "run.json").is_file():
            return
        options = [f"--{key}={getattr(given, key)}" for key in ("out", "seeds", "device")]
        if given.epochs is not None:
            options.append(f"--epochs={given.epochs}")
        command = [sys.executable, __file__, str(path), *options, f"--train={size}"]
        done = subprocess.run(
            [*command, f"--models={name}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            sys.exit(f"{folder}: {last}")
        print(f"  trained {folder}", flush=True)

    sizes = sorted(map(int, given.train.split(",")), reverse=True)
    rows = [(size, path, name) for size in sizes for path in given.zoos for name in names]
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(train, rows))


def installed(name: str) -> bool:
    """Whether the library of a model is there; a line says so if not."""
    library = LIBRARIES.get(name)
    there = library is None or importlib.util.find_spec(library) is not None
    if not there:
        print(f"{name} is left out: {library} is not installed")
    return there


def tau_text(cell: dict[str, Any]) -> str:
    """Kendall's τ and its standard error, if there is one."""
    error = cell["tau_se"]
    return f"{cell['tau']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _write(given: argparse.Namespace, zoo: Zoo, cells: dict[str, dict[str, Any]]) -> None:
    """The table of one zoo: a row for each model, the best at the largest size first."""
    sizes = given.train.split(",")
    columns = ["Model", "parameters"]
    for size in sizes:
        columns += [f"τ, {int(size):,} networks", "R²", "seconds a seed"]
    largest = max((size for cell in cells.values() for size in cell), key=int)
    ranked = sorted(cells, key=lambda name: -cells[name].get(largest, {"tau": -2})["tau"])
    rows = []
    for name in ranked:
        model = model_name(name.removesuffix(ONE_CHECKPOINT))
        known = next(iter(cells[name].values()))
        count = known["parameters"]
        title = model + (", one checkpoint a run" if name.endswith(ONE_CHECKPOINT) else "")
        row = [title, "trees" if count is None else f"{count:,}"]
        for size in sizes:
            cell = cells[name].get(size)
            row += ["–"] * 3 if cell is None else [
                tau_text(cell), f"{cell['r2']:.3f}", f"{cell['seconds_a_seed']:.1f}"
            ]  # fmt: skip
        rows.append(row)
    description = describe_zoo(zoo)
    tests = known["networks"]["test"]
    epochs = int(zoo.table["epoch"].max())
    table = {
        "title": f"Rivals, {task_title(description['task'])}, {seeds_text(zoo.seeds)}",
        "setting": f"{description['runs']:,} runs of at most {epochs} epochs; {tests} test "
        f"networks, {given.seeds} seeds of each predictor.",
        "commands": [
            f"python benchmarks/rivals.py {zoo.path.name} --train {given.train} "
            f"--seeds {given.seeds} --out DIR --json benchmarks/results"
        ],
        "columns": columns,
        "rows": rows,
        "cells": cells,
    }
    given.json.mkdir(parents=True, exist_ok=True)
    text = json.dumps(table, indent=1, ensure_ascii=False)
    (given.json / f"rivals-{zoo.path.name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
