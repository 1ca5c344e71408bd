"""The on-chip kernels compute the loss and its gradient (emulated on the CPU, by g++)."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "emulated_kernels.py"
missing = importlib.util.find_spec("triton") is None or shutil.which("g++") is None
pytestmark = pytest.mark.skipif(missing, reason="no Triton or no g++")


def emulated(*arguments: str) -> Any:
    """What the script prints, in a process of its own with Triton's interpreter."""
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_loss_and_every_gradient_are_those_of_float64_up_to_bf16() -> None:
    found = emulated("w32-h2-d2", "mnist", "large_scores")
    assert found["large_scores"]["loss"][0] < 0.02
    assert found["mnist"].pop("loss")[0] < 1e-3
    # Rounding to bf16 gives 0.025 at most; leaving out the last token of 49, 0.058.
    assert max(ours for ours, _ in found["mnist"].values()) < 0.04, found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("size", "what", "most"),
    [("w32-h2-d1", "mnist", 0.02), ("w32-h2-d3", "mnist", 0.06), ("w32-h2-d2", "small", 0.07)],
)
def test_other_sizes(size: str, what: str, most: float) -> None:
    found = emulated(size, what)[what]
    assert max(ours for ours, _ in found.values()) < most, found


@pytest.mark.nightly
def test_an_epoch_is_that_of_the_plain_path() -> None:
    # A step more or less than the run has would change a third of it.
    assert max(emulated("training")) < 0.1
