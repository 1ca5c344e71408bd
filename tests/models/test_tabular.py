"""Predictors that fit themselves: they learn, come back from a folder, and say what is wrong."""

import hashlib
import json
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import kendalltau
from torch import Tensor
from whole_networks import batch_of

from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError, TransformerNFNError
from transformer_nfn.models import (
    Batch,
    InvariantBoosting,
    InvariantMLP,
    LightGBMPredictor,
    RandomForestPredictor,
    StatisticsLinear,
    Tabular,
    XGBoostPredictor,
)

SPACE = spaces.attention_block(6, 2, 3, 2, 5)
CASES: dict[str, Any] = {
    "xgboost": XGBoostPredictor,
    "lightgbm": partial(LightGBMPredictor, rounds=60),
    "forest": partial(RandomForestPredictor, rounds=60),
    "invariant_boosting": partial(InvariantBoosting, rounds=100),
    "invariant_mlp": partial(InvariantMLP, epochs=40),
    "statistics_linear": StatisticsLinear,
}
every = pytest.mark.parametrize("name", CASES)


def networks(n: int, seed: int) -> tuple[Batch, Tensor]:
    """Networks whose accuracy is a known function of how large their weights are."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.rand(n, generator=draw) + 0.2

    def some(*shape: int) -> Tensor:
        noise = torch.randn((n, *shape), generator=draw) * 0.5 + 1
        return noise * size.view(n, *[1] * len(shape))

    network = {
        "embedding": {"W": some(4, 6), "b": some(6)},
        "blocks": [
            {name: some(1, *shape) for name, shape in SPACE.shapes.items()} for _ in range(2)
        ],
        "classifier": {"W_1": some(6, 6), "W_2": some(6, 3), "b_1": some(6), "b_2": some(3)},
    }
    return batch_of(network), torch.sigmoid(4 * (size - 0.7))


def blocks_of(network: Batch) -> Batch:
    """The same networks without embedding and classifier."""
    return batch_of({"blocks": network.blocks()})


@cache
def fitted(name: str, seed: int = 0) -> Tabular:
    made: Tabular = CASES[name]()
    return made.fit(*networks(300, 0), validation=networks(80, 1), seed=seed)


@every
def test_a_known_function_of_the_weights_is_learned(name: str) -> None:
    network, accuracy = networks(100, 2)
    predicted = fitted(name).predict(network)
    assert predicted.shape == (100,)
    assert predicted.dtype == torch.float32
    assert kendalltau(predicted, accuracy).statistic > 0.6


@every
def test_few_networks_are_not_all_predicted_alike(name: str) -> None:
    few = CASES[name]().fit(*networks(20, 0), validation=networks(8, 1), seed=0)
    network, accuracy = networks(60, 2)
    predicted = few.predict(network)
    assert len(predicted.unique()) > 5
    assert kendalltau(predicted, accuracy).statistic > 0.3


@every
def test_one_seed_gives_one_predictor(name: str) -> None:
    again = CASES[name]().fit(*networks(300, 0), validation=networks(80, 1), seed=0)
    network, _ = networks(20, 3)
    assert torch.equal(again.predict(network), fitted(name).predict(network))


@every
def test_a_predictor_comes_back_the_same(name: str, tmp_path: Path) -> None:
    predictor = fitted(name)
    predictor.save(tmp_path / "new" / "folder")
    network, _ = networks(50, 3)
    for kind in (type(predictor), Tabular):
        back = kind.load(tmp_path / "new" / "folder")
        assert type(back) is type(predictor)
        assert back.settings == predictor.settings
        assert back.num_parameters == predictor.num_parameters
        assert torch.equal(back.predict(network), predictor.predict(network))
    files = sorted(p.suffix for p in (tmp_path / "new" / "folder").iterdir())
    assert len(files) == 2
    assert set(files) <= {".json", ".safetensors"}


def test_damaged_and_missing_files_are_one_sentence(tmp_path: Path) -> None:
    predictor = fitted("lightgbm")
    kind = type(predictor)
    with pytest.raises(TransformerNFNError, match=r"holds no predictor\.json"):
        kind.load(tmp_path)
    predictor.save(tmp_path)
    about = tmp_path / "predictor.json"
    (model,) = (p for p in tmp_path.iterdir() if p != about)
    whole = model.read_bytes()
    model.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TransformerNFNError, match=f"{model.name}' is damaged"):
        kind.load(tmp_path)
    model.unlink()
    with pytest.raises(TransformerNFNError, match=f"{model.name}' is missing"):
        kind.load(tmp_path)
    model.write_bytes(whole)
    text = about.read_text()
    about.write_text(text[:40])
    with pytest.raises(TransformerNFNError, match="is not JSON"):
        kind.load(tmp_path)
    about.write_text(json.dumps(json.loads(text) | {"format": 7}))
    with pytest.raises(TransformerNFNError, match="has format 7, expected 1"):
        kind.load(tmp_path)
    about.write_text(json.dumps(json.loads(text) | {"settings": {"colour": "red"}}))
    with pytest.raises(TransformerNFNError, match="no readable predictor"):
        kind.load(tmp_path)


def test_another_kind_of_predictor_is_refused(tmp_path: Path) -> None:
    fitted("xgboost").save(tmp_path)
    with pytest.raises(TransformerNFNError, match=r"kind XGBoostPredictor, expected LightGBM"):
        LightGBMPredictor.load(tmp_path)


@every
def test_other_networks_are_refused(name: str) -> None:
    network, _ = networks(5, 3)
    with pytest.raises(TransformerNFNError, match=r"learned from networks of \d+ numbers"):
        fitted(name).predict(blocks_of(network))
    with pytest.raises(TransformerNFNError, match="has to be fitted"):
        CASES[name]().predict(network)


def test_bad_training_data_is_refused(tmp_path: Path) -> None:
    network, accuracy = networks(30, 0)
    with pytest.raises(TransformerNFNError, match="one accuracy for each network"):
        XGBoostPredictor().fit(network, accuracy[:20])
    with pytest.raises(TransformerNFNError, match="not finite"):
        XGBoostPredictor().fit(network, accuracy * float("nan"))
    held = (blocks_of(network), accuracy)
    with pytest.raises(TransformerNFNError, match="validation networks"):
        LightGBMPredictor().fit(network, accuracy, validation=held)
    with pytest.raises(TransformerNFNError, match="has to be fitted before it is saved"):
        XGBoostPredictor().save(tmp_path)


def test_other_blocks_need_their_space() -> None:
    space = spaces.multi_head(4, 2, 2, 2)
    network = batch_of({"blocks": [space.randn(40)]})
    accuracy = torch.rand(40)
    with pytest.raises(SpaceError, match="argument `space`"):
        InvariantMLP().fit(network, accuracy)
    InvariantMLP(space, epochs=2).fit(network, accuracy).predict(network)


@pytest.mark.parametrize("name", ["xgboost", "lightgbm"])
def test_a_missing_library_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransformerNFNError, match=r"pip install 'transformer-nfn\[baselines\]'"):
        CASES[name]().fit(*networks(60, 0))


def test_trees_beyond_single_precision_predict_no_number(tmp_path: Path) -> None:
    """And no library warns of it on the way."""
    few = XGBoostPredictor(rounds=3).fit(*networks(20, 0), validation=networks(8, 1), seed=0)
    few.save(tmp_path)
    trees, record = tmp_path / "trees.safetensors", tmp_path / "predictor.json"
    save_file({n: w * 1e55 if n == "value" else w for n, w in load_file(trees).items()}, trees)
    metadata = json.loads(record.read_text())
    metadata["sha256"] = {trees.name: hashlib.sha256(trees.read_bytes()).hexdigest()}
    record.write_text(json.dumps(metadata))
    predicted = Tabular.load(tmp_path).predict(networks(20, 2)[0])
    assert not predicted.isfinite().any()


def test_a_stored_space_that_is_none_is_refused(tmp_path: Path) -> None:
    network, accuracy = networks(20, 3)
    InvariantMLP(epochs=1).fit(network, accuracy).save(tmp_path)
    record = tmp_path / "predictor.json"
    metadata = json.loads(record.read_text())
    metadata["settings"]["space"] = True
    record.write_text(json.dumps(metadata))
    with pytest.raises(TransformerNFNError, match="'space' expected a weight space, found True"):
        Tabular.load(tmp_path)
