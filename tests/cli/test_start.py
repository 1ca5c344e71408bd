"""Asking the command what it is takes no PyTorch, and so no seconds."""

import os
import resource
import subprocess
import sys

import pytest
import typer

from transformer_nfn.cli.app import app

LIMIT = 1.0
"""Seconds of a processor, which other work on the machine does not lengthen much."""
PROGRAM = """
import sys
from transformer_nfn.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("torch" in sys.modules, "numpy" in sys.modules)
"""


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
    before = seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True
    )
    assert seconds_of_children() - before < LIMIT
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


@pytest.mark.nightly
def test_no_start_of_predict_is_aborted() -> None:
    """200 starts, most of them into an error, with as many threads as there are cores."""
    ways = (
        (("mnist-boosting", "mnist-sample#0"), 0),
        (("mnist-boosting", "mnist-sample#99999"), 2),
        (("mnist-boosting", "nowhere.pt"), 2),
        (("nothing", "mnist-sample#0"), 2),
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    for number in range(200):
        words, code = ways[number % len(ways)]
        command = [sys.executable, "-m", "transformer_nfn", "predict", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == code, (number, words, done.returncode, done.stderr)
        assert len(done.stderr.splitlines()) == (1 if code else 0), done.stderr
