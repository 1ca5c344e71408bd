"""Every command has a page in the documentation, which shows all its options."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "command_pages.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("command_pages", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_has_a_page(tool: ModuleType) -> None:
    pages = tool.pages()
    words = {name for name, _ in tool.commands()}
    assert {("predict",), ("zoo", "rows"), ("compare",), ("demo",)} <= words
    for name, command in tool.commands():
        text = pages[tool.page_path(name)]
        assert text.startswith(f"# `tnfn {' '.join(name)}`")
        assert f"$ tnfn {' '.join(name)}" in text
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert f"`{parameter.opts[0]}`" in text
        assert f"]({'-'.join(name)}.md)" in pages["commands/index.md"]
