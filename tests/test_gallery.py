"""Every example of the gallery runs and draws, and the page shows the files that run."""

import re
import runpy
import sys
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
EXAMPLES = ("disguise", "predicted_accuracy", "equivariance", "spectra", "who_is_who")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_draws_its_picture(name, tmp_path, monkeypatch):
    picture = tmp_path / "picture.png"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(picture)])
    matplotlib.use("Agg")
    try:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    finally:
        matplotlib.pyplot.close("all")
    data = picture.read_bytes()
    assert data.startswith(PNG)
    assert len(data) > 5_000
    assert list(tmp_path.iterdir()) == [picture]


def test_the_page_includes_the_files_and_no_other_code():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert blocks == [f'--8<-- "examples/{name}.py"\n' for name in EXAMPLES]


def test_every_example_has_a_small_picture_on_the_page():
    pictures = re.findall(r"!\[[^]]+\]\((gallery/[^)]+)\)", PAGE)
    assert pictures == [f"gallery/{name.replace('_', '-')}.png" for name in EXAMPLES]
    for picture in pictures:
        data = (ROOT / "docs" / picture).read_bytes()
        assert data.startswith(PNG)
        assert len(data) < 80_000
