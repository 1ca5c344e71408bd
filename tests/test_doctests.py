"""The examples in docstrings run and print what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "transformer_nfn"
PACKAGES = ("spaces", "functional", "symmetry", "nn", "io", "checkpoints", "models", "zoo")
# Kernels need Triton to be imported; they have no examples.
MODULES = [
    info.name
    for package in PACKAGES
    for info in pkgutil.walk_packages([str(ROOT / package)], f"transformer_nfn.{package}.")
    if ".kernels" not in info.name and not info.name.endswith(".ray")
] + ["transformer_nfn.testing"]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_a_module(module: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(module), optionflags=OPTIONS)
    assert result.failed == 0


