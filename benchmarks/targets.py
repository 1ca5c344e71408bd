"""Which properties of a network can be read from its weights: one predictor for each target.

    python benchmarks/targets.py zoos/one zoos/each --out runs --json targets.json

Every column of the zoos that says how a network was trained, and what came of it, is learned from
the weights; a run that is there already is read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformer_nfn.cli.options import pick_device
from transformer_nfn.known_tasks import seeds_text
from transformer_nfn.models.predictor import find
from transformer_nfn.prediction.data import Selection, describe_zoo, load_networks
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.runs import RunError, RunRecord
from transformer_nfn.prediction.target import CHECKPOINT_COLUMNS
from transformer_nfn.zoo import Zoo

TARGETS = (
    "test_accuracy", "test_loss", "generalisation_gap", "optimizer", "learning_rate", "l2",
    "init_std", "dropout", "train_fraction", "epoch",
)  # fmt: skip


def main() -> None:
    """Train every model on every target of every zoo, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("zoos", nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--models", default="invariant_mlp,whole_network")
    parser.add_argument("--train", type=int, help="number of training networks (all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    rows = []
    for path in given.zoos:
        zoo = Zoo.open(path)
        for column in given.targets.split(","):
            for model in given.models.split(","):
                row = measure(zoo, column, model, given)
                rows.append(row)
                print(text(row), flush=True)
                if given.json is not None:
                    given.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(zoo: Zoo, column: str, model: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train one model on one target, or read its run."""
    row = {"zoo": zoo.path.name, "seeds": zoo.seeds, "target": column, "model": model}
    selection = Selection(
        None if column in CHECKPOINT_COLUMNS else 75,
        max_train=given.train,
        target=column,
        all_checkpoints=find(model).every_checkpoint and column not in CHECKPOINT_COLUMNS,
    )
    try:
        networks = load_networks(zoo, selection).to(pick_device(given.device))
        experiment = Experiment(model, range(given.seeds), selection=selection.to_json())
        out = given.out / zoo.path.name / f"{column}-{model}"
        record = train_run(describe_zoo(zoo), networks, experiment, out)
    except RunError as error:
        return {**row, "error": str(error)}
    return {**row, **figures(record)}


def figures(record: RunRecord) -> dict[str, Any]:
    """What is reported of a run."""
    names = ("tau", "tau_se", "r2", "mae", "accuracy", "accuracy_se", "auroc", "chance",
             "calibration_error", "coverage")  # fmt: skip
    found = {name: record.summary[name] for name in names if name in record.summary}
    kind = "share" if record.target is None else record.target["kind"]
    return {"kind": kind, "train": record.selection["train"], **found}


def text(row: dict[str, Any]) -> str:
    """One line for people."""
    where = f"{row['zoo']} ({seeds_text(row['seeds'])}), {row['target']}, {row['model']}"
    if "error" in row:
        return f"{where}: {row['error']}"
    if "auroc" in row:
        return (
            f"{where}: accuracy {row['accuracy']:.3f} (most frequent class {row['chance']:.3f}), "
            f"AUROC {row['auroc']:.3f}"
        )
    return f"{where}: τ {row['tau']:.3f}, R² {row['r2']:.3f}, mean error {row['mae']:.3g}"


if __name__ == "__main__":
    main()
