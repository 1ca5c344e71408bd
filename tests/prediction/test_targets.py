"""Predictors of any target: shares, numbers and classes, from the column to the prediction."""

from pathlib import Path

import numpy as np
import pytest

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.prediction.evaluate import evaluate
from transformer_nfn.prediction.metrics import class_scores
from transformer_nfn.prediction.predict import predict
from transformer_nfn.prediction.runs import RunError, RunRecord, find_runs, read_predictions
from transformer_nfn.prediction.target import GAP, Target, target_values
from transformer_nfn.zoo import Zoo


def test_the_kind_of_a_target_is_read_from_its_values() -> None:
    assert Target.of("acc", np.array([0.1, 0.9])).kind == "share"
    assert Target.of("loss", np.array([0.1, 1.9])).kind == "number"
    assert Target.of("rate", np.array([1e-4, 1e-1])).logarithmic
    assert Target.of("optimizer", np.array(["sgd", "adam"] * 2, dtype=object)).classes == (
        "adam",
        "sgd",
    )
    assert Target.of("poisoned", np.array([0, 0, 1, 1])).classes == ("0", "1")
    assert Target.of("poisoned", np.array([True, False] * 2)).outputs == ("True",)


def test_an_accuracy_is_a_share_by_its_name_and_values() -> None:
    """Whatever it spans: not a logarithm, and never predicted above 1."""
    source = np.random.default_rng(0)
    for column in ("accuracy", "valAcc", "test_top1_accuracy", "acc@1"):
        for low, high in ((0.0, 1.0), (1e-3, 0.8), (0.97, 0.99), (0.5, 0.5 + 1e-6)):
            values = source.uniform(low, high, 40)
            target = Target.of(column, values)
            assert target.is_accuracy
            assert target.kind == "share"
            encoded = target.encode(values)
            assert target.in_unit(target.decode(encoded)) == pytest.approx(values, abs=1e-9)
            assert float(np.ptp(encoded)) > 0.05, "differences are not lost"
            assert target.clip(np.array([1.2])) == 1
            assert Target.from_json(target.to_json() | {"classes": []}, "run.json") == target
        assert not Target.of(column, 100 * source.random(40)).is_accuracy, "in percent"
    for column in ("loss", "access", "error", "train_fraction"):
        assert not Target.of(column, source.random(40)).is_accuracy
    assert not Target.of("accuracy", np.array(["low", "high"] * 2, dtype=object)).is_accuracy
    assert Target().is_accuracy


@pytest.mark.parametrize("values", [[-3.0, 0.5, 40.0], [1e-5, 1e-3, 2.0]])
def test_numbers_survive_the_way_to_the_unit_interval_and_back(values: list[float]) -> None:
    numbers = np.array(values)
    target = Target.of("x", numbers)
    encoded = target.encode(numbers)
    assert ((encoded > 0) & (encoded < 1)).all()
    assert target.in_unit(target.decode(encoded)) == pytest.approx(numbers, rel=1e-9)
    assert Target.from_json(target.to_json() | {"classes": []}, "run.json") == target


def test_targets_with_nothing_to_predict_are_one_sentence() -> None:
    with pytest.raises(RunError, match="'x' is 2 for all networks"):
        Target.of("x", np.array([2.0, 2.0]))
    with pytest.raises(RunError, match="'x' has one class only, 'adam'"):
        Target.of("x", np.array(["adam", "adam"], dtype=object))
    with pytest.raises(RunError, match="'x' is 'b' for one network only: a class needs two"):
        Target.of("x", np.array(["a", "a", "b"], dtype=object))
    for numbers in ([-1e308, 1e308, 1e308], [1e-320, 2e-320, 3e-320]):
        with pytest.raises(RunError, match="expected numbers with a standard deviation"):
            Target.of("x", np.array(numbers))


def test_scores_of_classes_agree_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    source = np.random.default_rng(0)
    truth = source.integers(0, 3, 200)
    raw = source.random((3, 200)) + 0.6 * (np.arange(3)[:, None] == truth)
    probabilities = raw / raw.sum(0)
    found = class_scores(truth, probabilities)
    area = metrics.roc_auc_score(truth, probabilities.T, multi_class="ovr")
    assert found["auroc"] == pytest.approx(area, abs=1e-12)
    assert found["accuracy"] == metrics.accuracy_score(truth, probabilities.argmax(0))
    always = np.where(np.arange(3)[:, None] == truth, 1.0, 0.0)
    assert class_scores(truth, always)["calibration_error"] == 0


@pytest.fixture(scope="module")
def rates(digits_zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("targets") / "rates"
    words = ["--model", "invariant_mlp", "--target", "learning_rate", "--seeds", 2]
    printed("train", digits_zoo.path, *words, "--out", out)
    return out


def test_a_number_is_predicted_in_its_unit(digits_zoo: Zoo, rates: Path) -> None:
    rows = digits_zoo.select(percent=75)
    known = target_values(digits_zoo, "learning_rate", rows)
    found = predict(rates, [f"{digits_zoo.path}#{row}" for row in rows])
    values = np.array([p.value for p in found])
    assert known.min() / 10 < values.min()
    assert values.max() < 10 * known.max()
    assert all(p.low <= p.value <= p.high and p.target == "learning_rate" for p in found)
    # A learning rate spans decades: errors are in decades, and intervals stay positive.
    residuals = np.log10(values) - np.log10(known)
    assert evaluate(rates, digits_zoo.path)["mae"] == pytest.approx(np.abs(residuals).mean(), 1e-6)
    assert all(p.low > 0 for p in found)
    columns = read_predictions(rates)
    assert set(np.round(columns["accuracy"], 9)) <= set(np.round(known, 9))
    assert "learning_rate of" in printed("evaluate", rates, digits_zoo.path)


def test_a_class_has_a_run_each_and_probabilities_that_add_up(
    digits_zoo: Zoo, tmp_path: Path
) -> None:
    out = tmp_path / "optimizers"
    words = ["--model", "invariant_mlp", "--target", "optimizer", "--seeds", 2, "--out", out]
    shown = printed("train", digits_zoo.path, *words)
    assert "AUROC" in shown
    record = RunRecord.read(out)
    names = sorted(set(target_values(digits_zoo, "optimizer", np.arange(len(digits_zoo)))))
    assert record.target is not None
    assert list(record.target["classes"]) == names
    assert list(find_runs([tmp_path])) == [out]
    rows = digits_zoo.select(percent=75)
    found = predict(out, [f"{digits_zoo.path}#{row}" for row in rows])
    for p in found:
        assert p.probabilities is not None
        assert sorted(p.probabilities) == names
        assert sum(p.probabilities.values()) == pytest.approx(1)
        assert p.label in p.labels
        assert p.probabilities[p.label] == max(p.probabilities.values())
    measured = evaluate(out, digits_zoo.path)
    truth = target_values(digits_zoo, "optimizer", rows)
    right = np.mean([p.label == name for p, name in zip(found, truth, strict=True)])
    assert measured["accuracy"] == pytest.approx(right)
    assert 0 <= measured["auroc"] <= 1
    # Again: the finished run is read.
    assert as_json("train", digits_zoo.path, *words)["summary"] == record.summary


def test_the_gap_and_the_columns_of_a_zoo_are_targets(digits_zoo: Zoo) -> None:
    rows = np.arange(4)
    table = digits_zoo.table
    gap = table["train_accuracy"][rows] - table["test_accuracy"][rows]
    assert np.array_equal(target_values(digits_zoo, GAP, rows), gap)
    names = as_json("train", digits_zoo.path, "--target", "list")
    assert {"learning_rate", "optimizer", "dropout", "epoch", GAP} <= {*names}
    assert "shard" not in names


def test_bad_targets_are_one_sentence(digits_zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("train", digits_zoo.path, "--model", "invariant_mlp", "--out", out, "--target")
    assert_refused("has no target 'colour'", *words, "colour")
    assert_refused("has no target 'shard'", *words, "shard")
    assert not out.exists()
    assert class_scores(np.zeros(3, int), np.ones((1, 3)))["auroc"] is None
