"""Trees in files are checked before a library that trusts them reads them, and stay as they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xgboost

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.ubjson import UbjsonError, parse_ubjson
from transformer_nfn.models import LightGBMPredictor, XGBoostPredictor
from transformer_nfn.models.boosting import read_lightgbm
from transformer_nfn.models.tree_files import checked_lightgbm, checked_xgboost

WIDTH = 6
NETWORKS = {"classifier": torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(0))}
ACCURACY = NETWORKS["classifier"].sum(1).sigmoid()
SMALL = {
    LightGBMPredictor: {"rounds": 8, "params": {"min_data_in_leaf": 4}, "threads": 1},
    XGBoostPredictor: {"rounds": 8, "params": {"min_child_weight": 1}, "threads": 1},
}


@pytest.fixture(params=SMALL, ids=lambda kind: kind.__name__)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A predictor's folder."""
    kind = request.param
    kind(**SMALL[kind]).fit(NETWORKS, ACCURACY).save(tmp_path)
    return tmp_path


def model_file(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.name.startswith("model."))


def sign(folder: Path) -> None:
    about = json.loads((folder / "predictor.json").read_text())
    file = model_file(folder)
    about["sha256"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    (folder / "predictor.json").write_text(json.dumps(about))


def test_checked_trees_predict_bit_for_bit_what_the_library_predicts(saved: Path) -> None:
    file, x = model_file(saved), NETWORKS["classifier"].numpy()
    if file.suffix == ".txt":
        theirs = read_lightgbm(file.read_bytes()).predict(x)
        ours = read_lightgbm(checked_lightgbm(file.read_bytes(), WIDTH).encode()).predict(x)
    else:
        whole, checked = xgboost.Booster(), xgboost.Booster()
        whole.load_model(bytearray(file.read_bytes()))
        checked.load_model(bytearray(checked_xgboost(file.read_bytes(), WIDTH)))
        theirs, ours = whole.inplace_predict(x), checked.inplace_predict(x)
    assert np.ptp(ours) > 0.1
    np.testing.assert_array_equal(ours, theirs)


LINES: dict[str, tuple[Callable[[str], str], str]] = {
    "a child far off": (lambda t: t.replace("left_child=1", "left_child=99999", 1), "whole number"),
    "a circle": (lambda t: t.replace("left_child=1", "left_child=0", 1), "is no tree"),
    "a feature far off": (
        lambda t: t.replace("split_feature=", "split_feature=777 ", 1), "expected .* numbers"
    ),
    "a leaf too many": (lambda t: t.replace("num_leaves=", "num_leaves=1", 1), "expected"),
    "no leaf": (lambda t: t.replace("num_leaves=", "num_leaves=-", 1), "leaves"),
    "categories": (lambda t: t.replace("num_cat=0", "num_cat=1", 1), "has categories"),
    "no number": (lambda t: t.replace("leaf_value=", "leaf_value=nan ", 1), "expected"),
    "other width": (lambda t: t.replace("max_feature_idx=5", "max_feature_idx=4"), "'max_feature"),
    "fewer trees": (lambda t: t.replace("Tree=7", "Free=7"), "'tree_sizes'|stands in it twice"),
    "twice": (lambda t: t.replace("num_cat=0", "num_cat=0\nnum_cat=0", 1), "stands in it twice"),
    "cut": (lambda t: t[: len(t) // 2], "does not begin and end"),
    "nothing": (lambda t: "", "does not begin and end"),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_a_wrong_model_of_lightgbm_is_one_sentence(case: str, tmp_path: Path) -> None:
    LightGBMPredictor(**SMALL[LightGBMPredictor]).fit(NETWORKS, ACCURACY).save(tmp_path)
    change, words = LINES[case]
    file = tmp_path / "model.txt"
    before = file.read_text()
    file.write_text(change(before))
    assert file.read_text() != before
    sign(tmp_path)
    with pytest.raises(TransformerNFNError, match=words) as caught:
        LightGBMPredictor.load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_no_byte_of_a_model_brings_the_process_down(saved: Path) -> None:
    """Every flipped byte is refused, or the trees are still trees and predict numbers."""
    file = model_file(saved)
    data = file.read_bytes()
    chance = np.random.default_rng(0)
    kind = LightGBMPredictor if file.suffix == ".txt" else XGBoostPredictor
    refused = 0
    for place in chance.integers(len(data), size=150):
        broken = bytearray(data)
        broken[place] ^= 1 << int(chance.integers(8))
        file.write_bytes(broken)
        sign(saved)
        try:
            kind.load(saved).predict(NETWORKS)
        except TransformerNFNError:
            refused += 1
    assert 10 < refused < 150


def test_universal_binary_json_is_read_as_it_is_defined() -> None:
    assert parse_ubjson(b"{i\x01aSi\x02hii\x01b[$U#i\x03\x01\x02\xff}") == {
        "a": "hi", "b": [1, 2, 255]
    }  # fmt: skip
    assert parse_ubjson(b"[ZTFi\xffI\x01\x00l\x00\x01\x00\x00d\x3f\x80\x00\x00Cx]") == [
        None, True, False, -1, 256, 65536, 1.0, "x"
    ]  # fmt: skip
    for data in (b"", b"[", b"{", b"i", b"[$U#l\x7f\xff\xff\xff", b"[" * 100, b"ZZ", b"Q",
                 b"[$U\x01]", b"Si\xff", b"{i\x01aZi\x01aZ}"):  # fmt: skip
        with pytest.raises(UbjsonError):
            parse_ubjson(data)
