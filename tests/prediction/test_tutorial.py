"""The tutorial on own networks runs as it stands in the docs."""

import re
from pathlib import Path

import pytest

from tnfn_command import as_json, printed

PAGE = Path(__file__).parents[2] / "docs" / "first-own-predictor.md"


@pytest.mark.nightly
def test_the_tutorial_on_own_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    commands = re.findall(r"^\$ tnfn (.*)$", page, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        printed(*command.split())
    assert "runs/optimizer (optimizer)" in Path("report.html").read_text(encoding="utf-8")
    assert as_json("evaluate", "runs/accuracy")["summary"]["r2"] > 0.3
    assert as_json("evaluate", "runs/optimizer")["summary"]["auroc"] > 0.8
