"""`--help` on a terminal of 80 columns: grouped commands, whole examples, no types of flags."""

import inspect

import pytest
import typer

from tnfn_command import printed
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
