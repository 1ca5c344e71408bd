"""The API reference lists every public name, and only names that exist."""

import importlib
import re
from pathlib import Path

import pytest

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
PACKAGES = (
    "architectures", "files", "models", "nn", "prediction", "spaces", "symmetry", "zoo",
)  # fmt: skip


def entries(package):
    """Paths of the objects that the page of a package documents or links to."""
    text = (REFERENCE / f"{package}.md").read_text(encoding="utf-8")
    return re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE) + re.findall(
        r"\.md#(transformer_nfn\.[\w.]+)", text
    )


def find(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_every_package_has_a_page():
    assert sorted(path.stem for path in REFERENCE.glob("*.md")) == sorted(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_lists_every_public_name(package):
    listed = {path.rsplit(".", 1)[1]: find(path) for path in entries(package)}
    module = importlib.import_module(f"transformer_nfn.{package}")
    for name in getattr(module, "__all__", ()):
        assert listed.get(name) is getattr(module, name), f"{name} is not in {package}.md"
