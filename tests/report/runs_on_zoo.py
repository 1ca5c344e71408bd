"""Run folders whose networks are rows of a real zoo; their predictions are made up."""

from pathlib import Path

import numpy as np

from transformer_nfn.prediction.metrics import scores
from transformer_nfn.prediction.runs import CONFIGURATION, RunRecord, write_predictions
from transformer_nfn.zoo import Zoo

HELD_OUT = 48


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
        zoo={"task": "mnist", "name": "mnist-sample", "runs": len(zoo), "networks": len(zoo)},
        selection={
            "percent": 75, "min_accuracy": 0.0, "augment": None,
            "train": len(zoo) - HELD_OUT, "val": half, "test": half,
        },
        protocol={},
        seeds=[{"seed": 0, "best_epoch": None, **found}],
        summary={**{key: found[key] for key in ("tau", "r2", "mae")}, "tau_se": float("nan")},
    ).write(folder)  # fmt: skip
