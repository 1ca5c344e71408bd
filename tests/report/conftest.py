"""A zoo of a user's own checkpoints, and runs that were trained on it."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from runs_on_zoo import make_own_zoo

from transformer_nfn.prediction.data import Selection, describe_zoo, load_parts
from transformer_nfn.prediction.experiment import Experiment, train_run
from transformer_nfn.prediction.runs import RunRecord
from transformer_nfn.prediction.target import Target
from transformer_nfn.zoo import Zoo


class Own(NamedTuple):
    """The zoo, its runs on accuracies, and records of runs on other targets."""

    zoo: Zoo
    runs: Path
    others: Path


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Own:
    """Tests must not change it."""
    folder = tmp_path_factory.mktemp("own")
    zoo = make_own_zoo(folder, optimizer=["adam", "lion", "sgd"])
    selection = Selection(None, target="valAcc")
    parts = load_parts(zoo, selection, model="statistics_linear")
    for model, seeds in (("statistics_linear", 3), ("random_forest", 1)):
        experiment = Experiment(model, range(seeds), selection=selection.to_json())
        train_run(describe_zoo(zoo), parts, experiment, folder / "runs" / model)
    record = RunRecord.read(folder / "runs" / "random_forest")
    for name in ("loss", "top1_accuracy", "optimizer"):
        target = Target.of(name, zoo.targets[name])
        (folder / "others" / name).mkdir(parents=True)
        other = replace(record, target=target.to_json())
        if target.classes:
            figures = {"accuracy": 0.5, "auroc": 0.5, "calibration_error": 0.1}
            more = {"together": figures, "accuracy_se": None, "chance": 0.4}
            rows = [{"seed": 0, "seconds": 1.0, **figures}]
            other = replace(other, seeds=rows, summary={**record.summary, **figures, **more})
        other.write(folder / "others" / name)
    return Own(zoo, folder / "runs", folder / "others")
