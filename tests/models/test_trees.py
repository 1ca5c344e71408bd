"""Tree ensembles as arrays: equal to the library that grew them, and checked when loaded."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.models import (
    Batch,
    LightGBMPredictor,
    RandomForestPredictor,
    XGBoostPredictor,
)

WIDTH = 6
ROWS = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(0))
NETWORKS = Batch.of({"classifier.b_1": ROWS})
ACCURACY = ROWS.sum(1).sigmoid()
FRESH = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(1))
Arrays = dict[str, np.ndarray]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a fitted predictor."""
    made = LightGBMPredictor(rounds=8, threads=1)
    return made.fit(NETWORKS, ACCURACY).save(tmp_path)


def write(folder: Path, data: bytes) -> None:
    """Replace the trees of a predictor, with the right checksum."""
    path = folder / "predictor.json"
    metadata = json.loads(path.read_text())
    metadata["sha256"] = {"trees.safetensors": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(metadata))
    (folder / "trees.safetensors").write_bytes(data)


@pytest.mark.parametrize("made", [LightGBMPredictor, RandomForestPredictor])
def test_lightgbm_trees_predict_what_lightgbm_predicts(
    made: type[LightGBMPredictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    boosters, train = [], lightgbm.train
    monkeypatch.setattr(lightgbm, "train", lambda *a, **k: boosters.append(train(*a, **k)) or
                        boosters[-1])  # fmt: skip
    ours = made(rounds=20, threads=1).fit(NETWORKS, ACCURACY)
    theirs = boosters[0].predict(FRESH.numpy())
    assert np.ptp(theirs) > 0.1
    np.testing.assert_allclose(ours.predict(Batch.of({"classifier.b_1": FRESH})), theirs, atol=1e-7)


def test_xgboost_trees_predict_what_xgboost_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    xgboost = pytest.importorskip("xgboost")
    boosters, train = [], xgboost.train
    monkeypatch.setattr(xgboost, "train", lambda *a, **k: boosters.append(train(*a, **k)) or
                        boosters[-1])  # fmt: skip
    ours = XGBoostPredictor(rounds=20, threads=1).fit(NETWORKS, ACCURACY)
    # Rows that meet thresholds exactly decide which side is which.
    text = json.loads(bytes(boosters[0].save_raw("json")))
    tree = text["learner"]["gradient_booster"]["model"]["trees"][0]
    at_threshold = FRESH.clone()
    at_threshold[:, tree["split_indices"][0]] = tree["split_conditions"][0]
    for rows in (FRESH, at_threshold):
        theirs = boosters[0].inplace_predict(rows.numpy())
        assert np.ptp(theirs) > 0.1
        found = ours.predict(Batch.of({"classifier.b_1": rows}))
        np.testing.assert_allclose(found, theirs, atol=1e-6)


def test_saved_trees_predict_without_their_library(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = LightGBMPredictor.load(saved).predict(NETWORKS)
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    assert torch.equal(LightGBMPredictor.load(saved).predict(NETWORKS), expected)


def change(name: str, place: int, value: float) -> Callable[[Arrays], None]:
    def apply(arrays: Arrays) -> None:
        arrays[name][place] = value

    return apply


HOSTILE: dict[str, tuple[Callable[[Arrays], Any], str]] = {
    "a child far away": (change("left", 0, 99_999), "'left' points outside"),
    "a circle": (change("right", 3, 0), "'right' points outside"),
    "a negative child": (change("left", 3, -1), "'left' points outside"),
    "a feature far away": (change("feature", 0, WIDTH), "'feature' points outside"),
    "a root far away": (change("root", 0, 1 << 40), "'root' points outside"),
    "a node with one child": (change("right", 0, 0), "a node has one child"),
    "not a number": (change("value", 0, float("nan")), "'value' holds values that are not finite"),
    "infinite": (change("threshold", 0, float("inf")), "not finite"),
    "no roots": (lambda a: a.update(root=a["root"][:0]), "'root' expected 0 numbers"),
    "fewer leaves": (lambda a: a.update(value=a["value"][:-1]), "expected .* numbers"),
    "another type": (lambda a: a.update(left=a["left"].astype(np.int32)), "found .* in int32"),
    "missing": (lambda a: a.pop("base"), "holds feature, left, right"),
    "more": (lambda a: a.update(more=a["base"]), "holds base, feature"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_arrays_that_are_no_trees_are_rejected(case: str, saved: Path) -> None:
    apply, words = HOSTILE[case]
    arrays = safetensors.numpy.load((saved / "trees.safetensors").read_bytes())
    arrays = {name: array.copy() for name, array in arrays.items()}
    apply(arrays)
    write(saved, safetensors.numpy.save(arrays))
    with pytest.raises(TransformerNFNError, match=words) as caught:
        LightGBMPredictor.load(saved)
    assert len(str(caught.value).splitlines()) == 1
