"""Imports run one way: from the theory of spaces to decisions and layers, never back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "transformer_nfn"
ORDER = ["spaces", "functional", "architectures", "symmetry", "nn", "models"]
EXCEPTIONS: set[tuple[str, str]] = set()
"""Edges from an earlier package to a later one that are known and not yet gone."""


def modules() -> dict[str, Path]:
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = ["transformer_nfn", *path.relative_to(ROOT).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere in a file, in functions too, but not for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imported(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module
        else:
            yield from imported(node)


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


GRAPH = {
    name: {m for m in imported(ast.parse(path.read_text(encoding="utf-8"))) if m in MODULES}
    for name, path in MODULES.items()
}


@pytest.mark.parametrize("later", range(len(ORDER)), ids=ORDER)
def test_a_package_imports_only_what_stands_before_it(later: int) -> None:
    wrong = {
        (name, target)
        for name, targets in GRAPH.items()
        for target in targets
        if package(name) in ORDER[:later] and package(target) == ORDER[later]
    }
    assert wrong - EXCEPTIONS == set()


def test_no_module_of_these_packages_imports_itself_by_a_detour() -> None:
    graph = {
        name: {t for t in targets if package(t) in ORDER and t != name}
        for name, targets in GRAPH.items()
        if package(name) in ORDER
    }
    # A package's __init__ re-exports its modules; those name each other directly, never it.
    for name in [n for n in graph if (ROOT.parent / n.replace(".", "/")).is_dir()]:
        inside = {n for n, targets in graph.items() if n.startswith(f"{name}.") and name in targets}
        assert inside == set()
    while graph:
        leaves = {name for name, targets in graph.items() if not targets & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        graph = {name: targets for name, targets in graph.items() if name not in leaves}


def test_the_package_brings_its_layers() -> None:
    code = "import transformer_nfn; transformer_nfn.nn.Equivariant; transformer_nfn.spaces"
    subprocess.run([sys.executable, "-c", code], check=True)
