"""The shipped predictors: intact, accurate on unseen networks, not fooled by damaged ones."""

from pathlib import Path

import numpy as np
import pytest
from made_networks import assert_fields_are_checked

from tnfn_command import as_json
from transformer_nfn.io.assets import CHECKOUT, asset_folder, read_index
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.runs import RUN_FILE, RunRecord
from transformer_nfn.zoo import Zoo
from transformer_nfn.zoo.damage import damages

CHANCE, NEAR = 0.1, 0.1
NIGHTLY = ("mnist-whole", "mnist-nfn")
GUARDED = ["mnist-boosting", *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)]


def test_every_shipped_asset_is_intact(tmp_path: Path) -> None:
    for name, asset in read_index(CHECKOUT / "index.json").items():
        path = asset_folder(name, asset.kind)
        if asset.kind == "predictor":
            assert {RUN_FILE, *RunRecord.read(path).files} == {*asset.files}
    assert_fields_are_checked(CHECKOUT / "mnist-boosting", tmp_path / "copy")


@pytest.mark.parametrize(
    ("predictor", "sample", "least"),
    [
        pytest.param("mnist-whole", "mnist-sample", 0.93, marks=pytest.mark.nightly),
        ("mnist-nfn", "mnist-sample", 0.5),
        ("mnist-boosting", "mnist-sample", 0.83),
        ("ag-news-boosting", "ag-news-sample", 0.65),
    ],
)
def test_a_shipped_predictor_ranks_networks_it_never_saw(
    predictor: str, sample: str, least: float
) -> None:
    found = as_json("evaluate", predictor, sample)
    assert found["tau"] > least
    assert found["trained_on"] == found["selected_by"] == 0


def test_a_training_network_of_a_shipped_predictor_is_recognised() -> None:
    """By its run alone, where the run folder has no digests of weights."""
    from transformer_nfn.prediction.runs import read_predictions
    from transformer_nfn.prediction.training_set import TrainingDigests

    digests = TrainingDigests.load(CHECKOUT / "mnist-nfn")
    rows = read_predictions(CHECKOUT / "mnist-nfn")
    assert len(digests.selected_runs) == int((rows["split"] == "val").sum())
    assert len(digests.trained_runs) == 605


@pytest.mark.parametrize("name", GUARDED)
def test_networks_without_function_are_warned_of_or_predicted_at_chance(
    name: str, broken_mnist: Zoo
) -> None:
    found = predict(name, broken_mnist)
    kinds = np.array([damage.kind for damage in damages(broken_mnist)])
    warned = np.array([p.warning is not None for p in found])
    near = np.array([abs(p.value - CHANCE) <= NEAR for p in found])
    covered = np.array([p.low <= CHANCE <= p.high for p in found])
    for kind in ("shuffled", "untrained"):
        assert int((kinds == kind).sum()) == 160
        assert float((warned | near)[kinds == kind].mean()) >= 0.99
        assert float((warned | covered)[kinds == kind].mean()) >= 0.99


@pytest.mark.parametrize("name", GUARDED)
def test_few_healthy_networks_are_warned_of_and_intervals_cover(name: str) -> None:
    found = predict(name, "mnist-sample")
    warned = np.array([p.warning is not None for p in found])
    truth = np.array([p.recorded["test_accuracy"] for p in found if p.recorded is not None])
    covered = np.array([p.low <= t <= p.high for p, t in zip(found, truth, strict=True)])
    assert float(warned.mean()) <= 0.05
    assert float(covered.mean()) >= 0.95
