"""The page of equations names every Φ of the paper, and every file and symbol it names exists."""

import re
from pathlib import Path

from paper_transcription import PHI_E, PHI_I

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")


def test_every_parameter_of_the_paper_is_listed() -> None:
    for name in (*PHI_E, *PHI_I):
        assert f"| `{name}` |" in PAGE, name


def test_every_file_and_symbol_named_exists() -> None:
    file, symbol = r"`((?:nn|tests|symmetry|functional)/[\w/]+\.py)`", r"`(\w+)(?:\.(\w+))?`"
    places = re.findall(f"{file}(?:, {symbol})?", PAGE)
    assert len(places) > 8
    for path, name, member in places:
        base = ROOT if path.startswith("tests") else ROOT / "src" / "transformer_nfn"
        text = (base / path).read_text(encoding="utf-8")
        for word in filter(None, (name, member)):
            assert re.search(rf"^\s*(def|class) {word}\b", text, re.MULTILINE), (path, word)
