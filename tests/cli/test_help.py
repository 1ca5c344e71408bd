"""`--help` on a terminal of 80 columns: grouped commands, whole examples, no types of flags."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import typer

from tnfn_command import tnfn
from transformer_nfn.cli.app import PANELS, app

COLUMNS = 80


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
    lines = [line.strip("│ ") for line in tnfn("--help").stdout.splitlines()]
    titles = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert titles == ["Options", *PANELS]
    for words, text in commands().items():
        first = text.splitlines()[0]
        assert first.endswith(".")
        assert text.splitlines()[1:2] in ([], [""]), f"{words}: the summary is one line"
        shown = lines if len(words) == 1 else _lines(*words[:-1], "--help")
        assert any(line.split(maxsplit=1) == [words[-1], first] for line in shown), words


@pytest.mark.parametrize("words", [(), ("zoo",), *commands()], ids=" ".join)
def test_flags_have_no_type_and_examples_keep_their_lines(words: tuple[str, ...]) -> None:
    done = tnfn(*words, "--help")
    assert done.returncode == 0
    assert "<bool>" not in done.stdout
    assert "\b" not in done.stdout
    shown = [line.strip() for line in done.stdout.splitlines()]
    text = commands().get(words, "")
    kept = [line.strip() for line in text.splitlines() if line.startswith(" ")]
    assert kept == [line for line in shown if line in kept]


def test_paragraphs_fill_the_width() -> None:
    shown = tnfn("predict", "--help").stdout
    paragraph = shown.split("\n" + " " * COLUMNS + "\n")[2].splitlines()
    assert len(paragraph) > 2
    for line, following in pairwise(paragraph):
        assert len(line.rstrip()) + len(following.split()[0]) + 2 > COLUMNS


def _lines(*words: str) -> list[str]:
    return [line.strip("│ ") for line in tnfn(*words).stdout.splitlines()]
