"""Shipped predictors that have a guard are not fooled by the first broken network one tries."""

from __future__ import annotations

import pytest
import torch

from transformer_nfn.files.assets import CHECKOUT, read_index
from transformer_nfn.files.safetensors_file import write_tensors
from transformer_nfn.prediction.guard import GUARD_FILE
from transformer_nfn.prediction.predict import predict
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.training.damage import Patient, damage

SAMPLES = {"mnist": "mnist-sample", "ag-news": "ag-news-sample"}
SHIPPED = read_index(CHECKOUT / "index.json")
GUARDED = [name for name in SHIPPED if (CHECKOUT / name / GUARD_FILE).is_file()]
NETWORKS = 16


@pytest.mark.parametrize("kind", ["shuffled", "untrained"])
@pytest.mark.parametrize("name", GUARDED)
def test_networks_beyond_repair_are_warned_of_or_predicted_near_chance(name, kind, tmp_path):
    zoo = Zoo.open(SAMPLES[name.rpartition("-")[0]])
    best = zoo.table["test_accuracy"].argsort()[::-1][:NETWORKS].copy()
    weights = zoo.weights(best)
    for i, row in enumerate(best):
        patient = Patient(
            zoo.arch, {key: w[i].float() for key, w in weights.items()},
            float(zoo.table["init_std"][row]), f"row {row}",
        )  # fmt: skip
        broken, _ = damage(patient, kind, 1.0, torch.Generator().manual_seed(i))
        write_tensors(tmp_path / f"{i}.safetensors", {k: w.contiguous() for k, w in broken.items()})
    chance = 1 / zoo.arch.classes
    for found in predict(name, tmp_path / "*.safetensors"):
        assert found.warning is not None or abs(found.accuracy - chance) <= 0.1, found
