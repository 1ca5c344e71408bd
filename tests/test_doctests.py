"""Docstrings: examples run and print what they show, and first lines are statements."""

from __future__ import annotations

import ast
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


def opens_with_a_question(docstring: str) -> bool:
    first = docstring.split("\n\n")[0].split(". ")[0].rstrip()
    return "?" in docstring.split("\n")[0] or first.endswith("?")


def test_no_docstring_opens_with_a_question() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    questions = [
        f"{module_name(path)}: {docstring.splitlines()[0]}"
        for path, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and (docstring := ast.get_docstring(node))
        if opens_with_a_question(docstring)
    ]
    assert not questions
