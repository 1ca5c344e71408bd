import os
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from transformer_nfn.zoo import BuildOptions, Zoo, build

# One thread a worker: the tests run side by side, and small products gain nothing from more.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("nightly", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def no_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that is installed but finds no cluster."""

    def nobody(**_: object) -> None:
        raise ConnectionError("nobody answers")

    ray = SimpleNamespace(is_initialized=lambda: False, init=nobody)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def digits_zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A digits zoo of 48 runs with a seed each; tests must not change it."""
    path = tmp_path_factory.mktemp("zoo") / "digits"
    return build(path, BuildOptions(task="digits", runs=48, epochs=4, samples=500, workers=1))
