"""A command that fails says so in one sentence, with a code that no command answers with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tnfn_command import tnfn
from transformer_nfn.cli.compare import EXIT
from transformer_nfn.cli.endings import INTERNAL_FAULT, INTERRUPTED, PIPE_CLOSED, REFUSED
from transformer_nfn.errors import SpaceError

VERDICTS = set(EXIT.values()) | {0, 1}
"""Of `tnfn compare` and `tnfn zoo verify`."""
ENDINGS: dict[str, tuple[BaseException, int, str]] = {
    "refused": (SpaceError("no"), REFUSED, "error: no\n"),
    "many lines": (SpaceError("a\nb\x1b[0m\ud800"), REFUSED, r"error: a b\x1b[0m\ud800" + "\n"),
    "no place": (
        PermissionError(13, "Permission denied", "/x"), REFUSED, "error: '/x': Permission denied\n"
    ),
    "memory": (MemoryError(), REFUSED, "error: there is not enough memory for this\n"),
    "torch's memory": (
        RuntimeError("[enforce fail at x.cpp] . DefaultCPUAllocator: can't allocate memory: y"),
        REFUSED, "error: there is not enough memory for this\n",
    ),
    "interrupted": (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
    "end of input": (EOFError(), INTERNAL_FAULT, "internal error: EOFError"),
    "GPU": (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        INTERNAL_FAULT,
        "internal error: the GPU broke off (CUDA error: an illegal memory access was",
    ),
    "fault": (RuntimeError("?"), INTERNAL_FAULT, "internal error: RuntimeError (?)"),
    "index": (IndexError("out of range"), INTERNAL_FAULT, "internal error: IndexError (out of"),
    "recursion": (RecursionError("deep"), INTERNAL_FAULT, "internal error: RecursionError"),
}  # fmt: skip
COMMANDS = {
    "compare": ("transformer_nfn.cli.compare.named_network", ("compare", "a", "b", "--part", "c")),
    "verify": ("transformer_nfn.zoo.verify.verify", ("zoo", "verify", "mnist-sample")),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", ENDINGS)
def test_an_error_never_ends_with_the_code_of_a_verdict(case: str, command: str) -> None:
    error, code, words = ENDINGS[case]
    place, asked = COMMANDS[command]
    with patch(place, side_effect=error):
        done = tnfn(*asked)
    assert done.returncode == code
    assert code not in VERDICTS
    assert done.stderr.startswith(words)
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_the_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    place, asked = COMMANDS["compare"]
    with patch(place, side_effect=RuntimeError("here")):
        assert "set TNFN_TRACEBACK=1 and run it again" in tnfn(*asked).stderr
        monkeypatch.setenv("TNFN_TRACEBACK", "1")
        shown = tnfn(*asked).stderr
    assert "Traceback (most recent call last)" in shown
    assert "compare_command" in shown


def test_mistakes_in_the_command_line_itself_end_with_2() -> None:
    for words in (("compare", "--nothing"), ("sample",), ("zoo", "verify"), ("nothing",)):
        assert tnfn(*words).returncode == REFUSED


def test_a_reader_that_goes_away_is_no_verdict() -> None:
    words = "from transformer_nfn.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", words, "space", "attention_block:4,2,2,2,8", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait() == PIPE_CLOSED
    assert told == b""


def test_an_import_that_fails_is_explained(tmp_path: Path) -> None:
    """Also what goes wrong before a command is chosen."""
    (tmp_path / "rich.py").write_text("raise ImportError('half installed')")
    done = subprocess.run(
        [sys.executable, "-m", "transformer_nfn", "compare", "a", "b"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == INTERNAL_FAULT
    assert "half installed" in done.stderr
    assert len(done.stderr.splitlines()) == 1
