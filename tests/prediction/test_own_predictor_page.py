"""The page on own predictors runs as it stands, with fewer splits."""

import re
import sys
from pathlib import Path

import pytest

from tnfn_command import printed

PAGE = Path(__file__).parents[2] / "docs" / "own-predictor.md"


@pytest.mark.nightly
def test_the_page_on_own_predictors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own, *code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    Path("own.py").write_text(own, encoding="utf-8")
    commands = re.findall(r"^\$ tnfn (.*)$", page, re.MULTILINE)
    for command in commands[:3]:
        printed(*command.split())
    assert "splits = 10" in code[-1]
    code[-1] = code[-1].replace("splits = 10", "splits = 2").replace('"epochs": 10', '"epochs": 1')
    scope: dict[str, object] = {}
    for block in code:
        exec(compile(block, str(PAGE), "exec"), scope)
    del sys.modules["own"]
    printed(*commands[3].split())
    report = Path("report.html").read_text(encoding="utf-8")
    assert "SetEncoder" in report
    assert "StatNN" in report
