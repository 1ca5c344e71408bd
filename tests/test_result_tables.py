"""Tables of results in README and docs are those of benchmarks/results/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_pages_are_generated_from_the_result_files() -> None:
    command = [sys.executable, str(ROOT / "tools" / "result_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_stay_short() -> None:
    assert (ROOT / "docs" / "results.md").stat().st_size <= 25 * 1024
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
