"""Imports run one way through the house, from the theory of spaces to the commands; no circle."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import transformer_nfn

ROOT = Path(__file__).resolve().parents[1] / "src" / "transformer_nfn"
PACKAGE = "transformer_nfn"

# A room imports those before it. What is not a folder stands among the rooms where it belongs.
HOUSE = (
    "errors", "notebook", "known_tasks", "spaces", "io", "native_code", "native_network",
    "processes", "ray_cluster", "functional", "symmetry", "testing", "checkpoints", "nn",
    "models", "zoo", "networks", "prediction", "paper", "report", "cli", "__main__",
)  # fmt: skip
# Of the zoo, these join what is on disk with how it is made; its store knows nothing of training.
ZOO_JOINS = {f"{PACKAGE}.zoo", f"{PACKAGE}.zoo.verify"}


def _modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of the package imported anywhere in a file, those for type checkers included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in MODULES or node.module in MODULES:
                    yield inner if inner in MODULES else str(node.module)


GRAPH = {
    name: set(imported(ast.parse(path.read_text(encoding="utf-8"))))
    for name, path in MODULES.items()
}


def room(module: str) -> str:
    """The room of a module; the package itself, which opens the first rooms, has none."""
    return module.split(".")[1] if "." in module else ""


def room_edges() -> dict[tuple[str, str], str]:
    """Which room imports which, with one import as evidence."""
    return {
        (room(name), room(target)): f"{name} imports {target}"
        for name, targets in GRAPH.items()
        for target in targets
        if room(name) and room(target) and room(name) != room(target)
    }


def test_every_room_has_its_place() -> None:
    assert {room(name) for name in MODULES if room(name)} <= set(HOUSE)


def test_rooms_import_only_what_stands_before_them() -> None:
    place = {name: i for i, name in enumerate(HOUSE)}
    backwards = {
        edge: evidence
        for edge, evidence in room_edges().items()
        if place[edge[0]] < place[edge[1]]
    }
    assert not backwards


def test_no_file_imports_itself_by_a_detour() -> None:
    graph = dict(GRAPH)
    while graph:
        free = {name for name, targets in graph.items() if not targets & graph.keys()}
        assert free, f"a circle among {sorted(graph)}"
        graph = {name: targets for name, targets in graph.items() if name not in free}


def test_the_store_of_a_zoo_knows_nothing_of_its_training() -> None:
    training = f"{PACKAGE}.zoo.training"
    assert not {
        f"{name} imports {target}"
        for name, targets in GRAPH.items()
        if room(name) == "zoo" and not name.startswith(training) and name not in ZOO_JOINS
        for target in targets
        if target.startswith(training)
    }


def test_no_name_is_both_a_module_and_something_else() -> None:
    """``symmetry.compare`` is a function, whatever was imported before."""
    both = set()
    for name, path in MODULES.items():
        if path.name != "__init__.py" or name == PACKAGE:
            continue
        public = getattr(importlib.import_module(name), "__all__", ())
        both |= {f"{name}.{inner}" for inner in public if f"{name}.{inner}" in MODULES}
    assert not both


OPTIONAL = (
    "gensim", "huggingface_hub", "lightgbm", "matplotlib", "pandas", "pooch", "pyarrow", "ray",
    "sklearn", "tensorboard", "transformers", "xgboost",
)  # fmt: skip


def test_every_package_resolves_after_importing_the_root() -> None:
    """In a fresh interpreter, with none of the optional dependencies."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
import transformer_nfn
assert "torch" not in sys.modules
for name in {transformer_nfn.__all__!r}:
    assert getattr(transformer_nfn, name).__doc__
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_public_packages_are_listed() -> None:
    internal = {"cli", "native_network"}
    packages = {room(name) for name, path in MODULES.items() if path.name == "__init__.py"}
    assert packages - {""} - internal <= set(transformer_nfn.__all__)
