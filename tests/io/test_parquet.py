"""Parquet files are read without a thread of Arrow's: such threads abort some processes at exit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.io.files import read_parquet, write_parquet

ASSETS = Path(__file__).parents[2] / "assets"
CODE = """
import os, sys
from pathlib import Path

import pytest
import pyarrow.parquet
from transformer_nfn.prediction.runs import read_predictions
from transformer_nfn.zoo import Zoo
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
assets = Path(sys.argv[1])
assert len(Zoo.open(assets / "mnist-sample")) == 160
assert len(read_predictions(assets / "mnist-boosting")["row"]) > 10
assert threads() == before, (before, threads())
pyarrow.parquet.read_table(assets / "mnist-boosting" / "predictions.parquet")
assert threads() > before, "Arrow's own way starts some, or this test says nothing"
"""


@pytest.mark.nightly
def test_reading_starts_no_thread() -> None:
    subprocess.run([sys.executable, "-c", CODE, str(ASSETS)], check=True)


def test_a_name_may_be_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.parquet")
    write_parquet(path, {"x": [1, 2]}, TransformerNFNError)
    assert read_parquet(path).to_pydict() == {"x": [1, 2]}
