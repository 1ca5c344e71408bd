"""One file opens foreign files, one writes files whole, one knows the cache; none looks ahead."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "src" / "transformer_nfn"
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}

# A pattern, and where alone it may stand.
ONLY = {
    r"(?<!safetensors\.)torch\.load\(": {"io/tensor_files.py"},
    r"os\.replace\(": {"io/files.py"},
    r"os\.fsync\(": {"io/files.py"},
    r"\bsave_file\(": {"io/tensor_files.py"},
    r"pooch\.retrieve\(": {"io/downloads.py"},
    r"XDG_CACHE_HOME": {"io/downloads.py"},
    r'"TNFN_CACHE"': {"io/downloads.py"},
    r"safe_open\(": set(),
    r"\bload_file\(": set(),
    r"os_cache\(": set(),
    r"pickle\.load|np\.load\(|joblib": set(),
}


@pytest.mark.parametrize("pattern", ONLY)
def test_a_thing_is_done_in_one_place(pattern: str) -> None:
    found = {name for name, text in SOURCES.items() if re.search(pattern, text)}
    assert found == ONLY[pattern]


def test_files_know_nothing_that_comes_after_them() -> None:
    allowed = {"errors", "io", "spaces"}
    for name, text in SOURCES.items():
        if not name.startswith("io/"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer"):
                assert node.module is not None
                assert node.module.split(".")[1] in allowed, f"{name} imports {node.module}"
