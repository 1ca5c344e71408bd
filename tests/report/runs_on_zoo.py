"""Zoos of checkpoints, and run folders on real zoos, whose predictions are made up."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from transformer_nfn.checkpoints import open_model
from transformer_nfn.prediction.data import describe_zoo
from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import (
    CONFIGURATION,
    RunRecord,
    read_predictions,
    write_predictions,
)
from transformer_nfn.testing import write_example_checkpoint
from transformer_nfn.zoo import SizeGroup, Zoo
from transformer_nfn.zoo.store.folder import write_groups

HELD_OUT = 48
NETWORKS = 24


def write_run_on(
    zoo: Zoo, folder: Path, model: str = "statnn", *, noise: float = 0.1, shift: int = 0
) -> None:
    """A run of one seed; rows are counted from ``shift``, as of a zoo packed otherwise."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.permutation(len(zoo))[:HELD_OUT])
    accuracy = zoo.table["test_accuracy"][rows].astype(float)
    predicted = np.clip(accuracy + noise * rng.standard_normal(HELD_OUT), 0, 1)
    split = np.array(["val", "test"] * (HELD_OUT // 2))
    folder.mkdir(parents=True)
    columns = {
        "seed": np.zeros(HELD_OUT, dtype=int),
        "split": split,
        "row": rows + shift,
        "accuracy": accuracy,
        "predicted": predicted,
        "low": np.clip(predicted - noise, 0, 1),
        "high": np.clip(predicted + noise, 0, 1),
        **{name: zoo.table[name][rows] for name in ("run", *CONFIGURATION)},
    }
    write_predictions(folder, columns)
    found = scores(accuracy[split == "test"], predicted[split == "test"])
    half = HELD_OUT // 2
    RunRecord(
        model=model,
        zoo=describe_zoo(zoo),
        selection={
            "percent": 75, "min_accuracy": 0.0, "augment": None,
            "train": len(zoo) - HELD_OUT, "val": half, "test": half,
        },
        protocol={**Protocol().to_json(), "options": {}, "identity": None},
        seeds=[{"seed": 0, "best_epoch": None, "seconds": 1.0, **found}],
        summary={
            **{key: found[key] for key in ("tau", "r2", "mae")}, "tau_se": None,
            "tau_together": found["tau"], "coverage": 0.9, "level": 0.9, "radius": noise,
        },
    ).write(folder)  # fmt: skip


def write_mixed(folder: Path) -> Path:
    """A mixed zoo of one size, and in ``runs`` a run on it, as training writes it."""
    zoo, kind = Zoo.open("mnist-sample"), "w32-h2-d2"
    mixed, run = folder / "mixed", folder / "runs" / "whole_network"
    mixed.mkdir(parents=True)
    write_groups(mixed, [SizeGroup.from_name(kind)], {"task": "mnist", "seeds": "each"})
    (mixed / kind).symlink_to(zoo.path)
    write_run_on(zoo, run, "whole_network")
    record, columns = RunRecord.read(run), read_predictions(run)
    write_predictions(run, {**columns, "kind": np.full(len(columns["row"]), kind, dtype=object)})
    about = describe_zoo(Zoo.open(mixed))
    counts = {name: record.selection[name] for name in ("train", "val", "test")}
    figures = {key: record.summary[key] for key in ("tau", "tau_se", "r2", "mae")}
    figures = {"networks": counts["test"], **figures}
    by_size = {"tau_within": figures["tau"], "kinds": {kind: figures}, "left_out": {}}
    replace(
        record, zoo=about, summary={**record.summary, **by_size, "widening": {}},
        selection={**record.selection, "kinds": {kind: counts}, "left_out": []},
    ).write(run)  # fmt: skip
    return mixed


def make_own_zoo(folder: Path, count: int = NETWORKS, seed: int = 0, **more: list[str]) -> Zoo:
    """Llamas, two checkpoints of each training; those of some trainings are equally accurate."""
    source = np.random.default_rng(seed)
    zoo = Zoo.create(folder / "zoo")

    def networks():
        for row in range(count):
            if row % 4 != 1:
                accuracy = float(source.random())
            targets = {"valAcc": accuracy, "loss": float(source.random()), "run": row // 2}
            targets["top1_accuracy"] = 100 * accuracy
            targets |= {name: values[row % len(values)] for name, values in more.items()}
            with open_model(write_example_checkpoint(folder / f"net-{row}", row)) as model:
                yield model, f"net-{row}", targets

    zoo.extend(networks())
    return zoo
