"""The CUDA kernels of `benchmarks/on_chip` compute the loss and its gradient (emulated, by g++)."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "on_chip" / "on_chip.py"
missing = importlib.util.find_spec("triton") is None or shutil.which("g++") is None
pytestmark = pytest.mark.skipif(missing, reason="no Triton or no g++")


def test_loss_and_every_gradient_are_those_of_float64_up_to_bf16() -> None:
    command = [sys.executable, str(SCRIPT), "--emulate"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("autocast") == 19
