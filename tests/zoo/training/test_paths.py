"""Which code computes a step, and that a user is told when it is the slow one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from transformer_nfn import native_code
from transformer_nfn.zoo import Recipe, ZooError, sample, train
from transformer_nfn.zoo.training import backends as native
from transformer_nfn.zoo.training.backends import describe_path

from ..conftest import random_images


def test_without_a_compiler_builds_say_so_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "find_compiler", lambda: None)
    native.library.cache_clear()
    try:
        path, words = describe_path("auto", "cpu")
        assert path == "torch"
        assert "no C compiler was found" in words
        assert "slower" in words
        assert len(train(random_images(8, 2, 16), sample(2), Recipe(1, 32)).rows) == 4
        with pytest.raises(ZooError, match="no C compiler"):
            describe_path("native", "cpu")
    finally:
        native.library.cache_clear()


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no licence >&2; exit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("TNFN_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    try:
        path, words = describe_path("auto", "cpu")
        assert path == "torch"
        assert "no licence" in words
        assert not list((tmp_path / "cache").rglob("*.so"))
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's compiler warns of itself
def test_compiled_steps_equal_plain_ones() -> None:
    """What CUDA takes, compiled for the CPU here: mixed train fractions, held networks."""
    task = random_images(8, 2, 16)
    runs = [c for c in sample(24) if c.optimizer in ("sgd", "sgdm")][:6]
    assert len({c.train_fraction for c in runs}) > 1
    plain = train(task, runs, Recipe(2, 32), path="torch")
    fused = train(task, runs, Recipe(2, 32), path="compiled")
    torch.testing.assert_close(plain.weights, fused.weights, rtol=0, atol=1e-4)


def test_holding_a_network_changes_nothing() -> None:
    from transformer_nfn.zoo.training.steps import HOLD, update

    p, g, m, v = (torch.randn(2, 5) for _ in range(4))
    v = v.abs()
    before = [t.clone() for t in (p, m, v)]
    update(p, g, m, v, torch.tensor([HOLD, HOLD]))
    assert all(torch.equal(a, b) for a, b in zip(before, (p, m, v), strict=True))
