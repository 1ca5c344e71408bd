"""Asking the command what it is takes no PyTorch, and so no seconds."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import typer

from transformer_nfn.cli.app import app

# Long for a slow machine with other work; on two idle Arm cores it takes 0.5 s.
LIMIT = 3.0
PROGRAM = """
import sys
from transformer_nfn.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("torch" in sys.modules, "numpy" in sys.modules)
"""


def commands() -> list[list[str]]:
    found: list[list[str]] = []

    def walk(command: object, words: list[str]) -> None:
        found.append(words)
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*words, name])

    walk(typer.main.get_command(app), [])
    return found


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_the_first_question_is_answered_without_torch(word: str) -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True
    )
    assert time.perf_counter() - start < LIMIT
    assert done.stdout.splitlines()[-1] == "False False"


def test_no_command_needs_torch_to_say_what_it_does() -> None:
    words = commands()
    assert ["zoo", "rows"] in words
    assert ["compare"] in words
    program = f"""
import sys
from transformer_nfn.cli import main
for words in {words!r}:
    sys.argv = ["tnfn", *words, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
