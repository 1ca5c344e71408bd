import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

# A name that is no path here asks the hub, which no test may do but that with a `hub` of its own.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"

import pytest
import torch
from hypothesis import HealthCheck, settings

from hub_server import Hub, running_hub
from transformer_nfn.io.hub import commit_of
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, for the client in this process, with a cache in ``tmp_path``."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with running_hub() as hub:
        address = hub.address
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        commit_of.cache_clear()
        close_session()
        yield hub
    for thread in threading.enumerate():
        if thread.name == "hub":  # given up; it would close the connections of the next test
            thread.join()
    close_session()
    commit_of.cache_clear()
