"""Differences of τ on the same test networks, against SciPy on networks that are repeated."""

from dataclasses import replace

import numpy as np
import pytest
from run_folders import write_run
from scipy.stats import kendalltau

from transformer_nfn.paper.paired import SAMPLES, paired_rows
from transformer_nfn.prediction.metrics import resampled_taus
from transformer_nfn.prediction.runs import RunRecord, write_predictions

NETWORKS = 40


def write(folder, row, predicted, accuracy, runs, split=0, twins=None):
    """A run folder of one cell; ``predicted`` is ``[seeds, n]``."""
    seeds, count = predicted.shape
    columns = {
        "seed": np.repeat(np.arange(seeds), count),
        "split": np.full(seeds * count, "test", dtype=object),
        "run": np.tile(runs, seeds),
        "accuracy": np.tile(accuracy, seeds),
        "predicted": predicted.ravel(),
    }
    if twins is not None:
        columns["twin"] = np.tile(twins, seeds)
    place = write_run(folder / f"{row}-{split}", "mlp", networks=64, same_parts=True,
                      table={"table": "thresholds", "row": row, "column": "all"})  # fmt: skip
    record = RunRecord.read(place)
    write_predictions(place, columns)
    replace(record, selection={**record.selection, "split_seed": split}).write(place)
    return place


def test_resampled_taus_are_those_of_repeated_networks():
    draw = np.random.default_rng(3)
    accuracy, predicted = draw.integers(0, 12, NETWORKS) / 12, draw.random(NETWORKS)
    counts = draw.multinomial(NETWORKS, [1 / NETWORKS] * NETWORKS, 20)
    taus = resampled_taus(accuracy, predicted, counts)
    for tau, count in zip(taus, counts, strict=True):
        expected = kendalltau(np.repeat(accuracy, count), np.repeat(predicted, count)).statistic
        assert tau == pytest.approx(expected, abs=1e-6)


def test_the_difference_of_two_predictors_has_an_interval(tmp_path):
    draw = np.random.default_rng(0)
    runs = np.array([f"r{i // 2}" for i in range(NETWORKS)])  # two checkpoints of each
    folders, taus = [], {"good": [], "bad": []}
    for split in (0, 4):
        accuracy = draw.random(NETWORKS)
        for row, noise in (("good", 0.1), ("bad", 0.6)):
            predicted = accuracy + noise * draw.standard_normal((2, NETWORKS))
            folders.append(write(tmp_path, row, predicted, accuracy, runs, split))
            taus[row] += [kendalltau(accuracy, each).statistic for each in predicted]
    (pair,) = paired_rows(folders)
    assert (pair["row"], pair["against"], pair["column"]) == ("good", "bad", "all")
    assert (pair["splits"], pair["samples"]) == (2, SAMPLES)
    assert pair["difference"] == pytest.approx(np.mean(taus["good"]) - np.mean(taus["bad"]))
    assert 0 < pair["low"] < pair["difference"] < pair["high"]
    assert "difference_alone" not in pair, "no zoo said which networks have a twin"
    # Only the split that both have counts, and a cell without predictions is left out.
    (single,) = paired_rows([*folders[:2], folders[3], tmp_path / "nothing"])
    assert single["splits"] == 1


def test_networks_without_a_twin_are_compared_by_themselves(tmp_path):
    draw = np.random.default_rng(1)
    accuracy, twins = draw.random(NETWORKS), np.arange(NETWORKS) < 25
    runs = np.arange(NETWORKS)
    guess = draw.random((1, NETWORKS))
    copied = np.where(twins, accuracy, guess)  # knows the networks with a twin, and no others
    folders = [
        write(tmp_path, "copied", copied, accuracy, runs, twins=twins),
        write(tmp_path, "guess", guess, accuracy, runs, twins=twins),
        write(tmp_path, "same", guess, accuracy, runs, twins=twins),
    ]
    pairs = {(p["row"], p["against"]): p for p in paired_rows(folders)}
    assert pairs["copied", "guess"]["low"] > 0
    assert pairs["copied", "guess"]["difference_alone"] == 0
    same = pairs["guess", "same"]
    assert {same[key] for key in ("difference", "low", "high", "high_alone")} == {0.0}
