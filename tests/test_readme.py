"""What the README shows runs as it is printed, in its order, in an empty folder."""

import re
import shlex
from pathlib import Path

import pytest

from tnfn_command import printed

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", README, re.M | re.S)
    assert found is not None, title
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def shown_commands(text: str) -> list[list[str]]:
    """The commands of a console block, without outputs and comments."""
    lines = [line for block in blocks(text, "console") for line in block.splitlines()]
    # A comment begins after a space: mnist-sample#0 is a word.
    told = [re.sub(r"\s+#\s.*", "", line[2:]) for line in lines if line.startswith("$ ")]
    return [shlex.split(line) for line in told]


def test_every_python_snippet_runs() -> None:
    snippets = blocks(README, "python")
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def test_the_commands_on_named_assets_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = shown_commands(section("Predict an accuracy"))
    assert len(shown) >= 4
    assert all(program == "tnfn" for program, *_ in shown)
    for _, *words in shown:
        if words[0] != "evaluate":
            printed(*words)


@pytest.mark.nightly
def test_the_scores_of_a_shipped_predictor_are_those_shown() -> None:
    (words,) = (w[1:] for w in shown_commands(README) if w[1] == "evaluate")
    shown, scored = (
        next(line for line in text.splitlines() if line.startswith("│ all"))
        for text in (README, printed(*words))
    )
    assert re.findall(r"[\d.]+", shown) == re.findall(r"[\d.]+", scored)


def test_the_quick_demo_says_one_figure_everywhere() -> None:
    from transformer_nfn.cli.demo import QUICK_TIME

    shown = " ".join(README.split())
    assert f"`tnfn demo --quick` shows all steps in {QUICK_TIME}" in shown
    help_text = " ".join(printed("demo", "--help").split())
    assert QUICK_TIME in help_text.replace("│ │", "")
