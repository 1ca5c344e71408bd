"""200 starts of `tnfn predict`, most of them into an error: none is aborted on its way out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WAYS = (
    (("mnist-boosting", "mnist-sample#0"), 0),
    (("mnist-boosting", "mnist-sample#99999"), 2),
    (("mnist-boosting", "nowhere.pt"), 2),
    (("nothing", "mnist-sample#0"), 2),
)
"""What is predicted, and how that ends."""


@pytest.mark.parametrize("starts", [4, pytest.param(200, marks=pytest.mark.nightly)])
def test_no_start_of_predict_is_aborted(starts: int) -> None:
    # As users run it, with as many threads as there are cores.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    for number in range(starts):
        words, code = WAYS[number % len(WAYS)]
        done = subprocess.run(
            [sys.executable, "-m", "transformer_nfn", "predict", *words],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == code, (number, words, done.returncode, done.stderr)
        if code:
            assert len(done.stderr.splitlines()) == 1, done.stderr
