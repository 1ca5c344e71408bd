"""The grid is the paper's, and samples of it repeat."""

from __future__ import annotations

from collections import Counter

import pytest

from transformer_nfn.zoo import ZooError, grid, sample


def test_the_grid_has_the_papers_16000_configurations() -> None:
    every = grid()
    assert len(every) == 16_000
    assert len({c.run for c in every}) == 16_000
    values = {(c.optimizer, c.learning_rate, c.l2, c.init_std, c.dropout, c.train_fraction)
              for c in every}
    assert len(values) == 16_000
    assert Counter(c.optimizer for c in every) == dict.fromkeys(
        ("sgd", "sgdm", "adam", "rmsprop"), 4000
    )
    sgd = [c for c in every if c.optimizer == "sgdm"]
    assert {c.learning_rate for c in sgd} == {1e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2, 7e-2}
    adam = [c for c in every if c.optimizer == "adam"]
    assert {c.init_std for c in adam} == {0.1, 0.2, 0.3, 0.4, 0.5}


def test_run_ids_are_stable() -> None:
    """Changing these breaks every zoo that people have."""
    every = grid(seed=0)
    assert (every[0].run, every[15_999].run) == ("00000", "15999")
    assert every[12_345].learning_rate == 3e-4
    assert every[12_345].optimizer == "rmsprop"
    assert every[0].seed == grid(seed=0)[0].seed != grid(seed=1)[0].seed
    assert len({c.seed for c in every}) == 16_000


@pytest.mark.parametrize("runs", [1, 4, 10, 256])
def test_samples_are_balanced_nested_and_repeat(runs: int) -> None:
    chosen = sample(runs, seed=5)
    assert chosen == sample(runs, seed=5)
    assert len({c.run for c in chosen}) == runs
    counts = Counter(c.optimizer for c in chosen).values()
    assert max(counts) - min(counts) <= 1
    assert {c.run for c in chosen} <= {c.run for c in sample(2 * runs, seed=5)}
    if runs > 4:
        assert chosen != sample(runs, seed=6)


@pytest.mark.parametrize("runs", [0, -3, 16_001])
def test_impossible_samples_are_refused(runs: int) -> None:
    with pytest.raises(ZooError, match="between 1 and 16,000"):
        sample(runs)
