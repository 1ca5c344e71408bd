"""Docstrings: examples run and print what they show, and first lines are statements."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "transformer_nfn"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
WITH_EXAMPLES = [path for path, text in SOURCES.items() if ">>> " in text]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=module_name)
def test_examples_of_a_module(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(module_name(path)), optionflags=OPTIONS)
    assert result.failed == 0
