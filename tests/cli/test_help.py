"""What a command is: `--help` on 80 columns, without PyTorch and so without seconds."""

import inspect
import os
import resource
import subprocess
import sys

import pytest
import typer

from tnfn_command import printed
from transformer_nfn.cli.app import PANELS, app

COLUMNS = 80
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


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def commands() -> dict[tuple[str, ...], str]:
    """The docstring of every command, by the words that call it."""
    found: dict[tuple[str, ...], str] = {}

    def walk(command: object, words: tuple[str, ...]) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found[words] = inspect.cleandoc(getattr(command, "help", None) or "")
        for name, each in (inner or {}).items():
            walk(each, (*words, name))

    walk(typer.main.get_command(app), ())
    return found


def test_every_command_stands_in_a_panel_with_its_description_on_one_line() -> None:
    names = {words[0] for words in commands()}
    assert names == {name for panel in PANELS.values() for name in panel}
    lines = [line.strip("│ ") for line in printed("--help").splitlines()]
    titles = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert titles == ["Options", *PANELS]
    for words, text in commands().items():
        first = text.splitlines()[0]
        assert first.endswith(".")
        assert text.splitlines()[1:2] in ([], [""]), f"{words}: the summary is one line"
        shown = lines if len(words) == 1 else _lines(*words[:-1], "--help")
        assert any(line.split(maxsplit=1) == [words[-1], first] for line in shown), words


def test_flags_have_no_type_and_examples_keep_their_lines() -> None:
    for words, text in {(): "", ("zoo",): "", **commands()}.items():
        help_text = printed(*words, "--help")
        assert "<bool>" not in help_text
        assert "\b" not in help_text
        shown = [line.strip() for line in help_text.splitlines()]
        kept = [line.strip() for line in text.splitlines() if line.startswith(" ")]
        assert kept == [line for line in shown if line in kept], words


def _lines(*words: str) -> list[str]:
    return [line.strip("│ ") for line in printed(*words).splitlines()]


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_the_first_question_is_answered_without_torch(word: str) -> None:
    before = seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True
    )
    assert seconds_of_children() - before < LIMIT
    assert done.stdout.splitlines()[-1] == "False False"


def test_no_command_needs_torch_to_say_what_it_does() -> None:
    words = [(), ("zoo",), *commands()]
    assert ("zoo", "rows") in words
    assert ("compare",) in words
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
