"""The fused kernels compute what the plain path computes (here in Triton's interpreter)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from transformer_nfn.zoo import SizeGroup, ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.backends import describe_path

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def interpreted(what: str) -> dict[str, Any]:
    """Run `kernel_cases` with the interpreter, which is chosen when Triton is imported."""
    folders = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(HERE / "kernel_cases.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout)
    return out


NIGHTLY = ("images", "tiled", "shallow", "deep")


@pytest.mark.parametrize(
    "what", ["cropped", "texts", *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)]
)
def test_loss_and_every_gradient_equal_float64(what: str) -> None:
    for name, (fused, _) in interpreted(what).items():
        assert fused < 5e-6, (name, fused)


@pytest.mark.nightly
def test_epochs_equal_those_of_the_plain_path() -> None:
    errors = interpreted("training")
    assert errors["plain_rules"] < 1e-5
    assert errors["adaptive_rules"] < 1e-5
    assert errors["train_accuracy"] == 0
    assert errors["held_loss"] < 1e-3
    assert errors["held_hits"] == 0
    assert errors["test_loss"] < 1e-5
    assert errors["test_hits"] == 0


@pytest.mark.nightly
def test_equal_runs_of_one_seed_train_to_equal_weights() -> None:
    equal = interpreted("seeds")
    assert equal.pop("moved") == [True, True, True]
    for what, (shared, separate) in equal.items():
        assert (shared, separate) == (True, False), what


def test_the_fused_path_is_chosen_where_it_fits() -> None:
    images, texts = NetworkSizes(49, 10, 16), NetworkSizes(512, 4, 0)
    fused = ("fused", "steps by the fused kernels on cuda")
    assert describe_path("auto", "cuda", images, "bf16") == fused
    assert describe_path("auto", "cuda", images.resized(SizeGroup(depth=3)), "bf16") == fused
    assert describe_path("auto", "cuda", texts, "bf16") == fused
    assert "texts in bf16, not tf32" in describe_path("auto", "cuda", texts, "tf32")[1]
    path, note = describe_path("auto", "cuda", images, "float32")
    assert path == "compiled"
    assert "multiply in bf16 or tf32" in note
    path, note = describe_path("auto", "cuda", images.resized(SizeGroup(16)), "bf16")
    assert path == "compiled"
    assert "width 32 and 2 heads, not for width 16, 2 heads, 2" in note
    with pytest.raises(ZooError, match="path fused is not possible: the fused kernels are for"):
        describe_path("fused", "cpu", images, "bf16")
