"""The commands a user types."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from transformer_nfn.cli.app import app
from transformer_nfn.zoo import Zoo

from .test_authors import write_theirs

runner = CliRunner()


def tnfn(*words: object) -> tuple[int, str]:
    result = runner.invoke(app, ["zoo", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_build_prints_what_it_made_and_resumes(tmp_path: Path) -> None:
    words = ("build", "--task", "digits", "--out", tmp_path / "z", "--runs", 4, "--epochs", 1)
    words += ("--batch", 256, "--workers", 1)
    code, text = tnfn(*words)
    assert code == 0
    assert "4 runs" in text
    code, text = tnfn(*words, "--json")
    found = json.loads(text)
    assert (code, found["runs"], found["finished"]) == (0, 4, True)


def test_info_shows_counts_and_a_histogram(small_zoo: Zoo) -> None:
    code, text = tnfn("info", small_zoo.path)
    assert code == 0
    assert "12 and 0 crashed" in text
    assert "a seed each" in text
    assert "█" in text
    code, text = tnfn("info", small_zoo.path, "--json")
    found = json.loads(text)
    assert (found["task"], found["checkpoints"]) == ("digits", 36)
    assert sum(found["histogram"]["counts"]) == 36


def test_one_seed_for_all_is_built_resumed_and_shown(tmp_path: Path) -> None:
    words = ("build", "--out", tmp_path / "z", "--runs", 4, "--epochs", 1, "--batch", 256)
    words += ("--workers", 1, "--seeds", "one", "--json")
    for _ in range(2):
        code, text = tnfn(*words)
        assert (code, json.loads(text)["seeds"]) == (0, "one")
    _, text = tnfn("info", tmp_path / "z")
    assert "one seed for all" in text


@pytest.mark.parametrize(
    ("seeds", "kind", "words"),
    [((3, 3, 3), "one", "one seed for all"), (None, "unknown", "seeds unknown")],
)
def test_info_says_what_is_known_of_imported_seeds(
    tmp_path: Path, seeds: tuple[object, ...] | None, kind: str, words: str
) -> None:
    tnfn("import", write_theirs(tmp_path / "t", "mnist", seeds=seeds), "--out", tmp_path / "z")
    assert words in tnfn("info", tmp_path / "z")[1]
    assert json.loads(tnfn("info", tmp_path / "z", "--json")[1])["seeds"] == kind


def test_plot_draws_the_histogram(small_zoo: Zoo, tmp_path: Path) -> None:
    for name in ("h.png", "h.svg"):
        code, _ = tnfn("plot", small_zoo.path, "--out", tmp_path / name)
        assert code == 0
        assert (tmp_path / name).stat().st_size > 2000
    assert "Digits: 36 checkpoints, a seed each" in (tmp_path / "h.svg").read_text()


def test_verify_exits_1_on_damage(small_zoo: Zoo, tmp_path: Path) -> None:
    code, text = tnfn("verify", small_zoo.path, "--sample", 2)
    assert (code, "all well" in text) == (0, True)
    assert "2 run again (largest difference 0 of 400 test samples, tolerance 2)" in text
    code, text = tnfn("verify", small_zoo.path, "--sample", 2, "--tolerance", 7, "--json")
    found = json.loads(text)
    assert (code, found["tolerance"], found["worst_samples"]) == (0, 7, 0)
    _, text = tnfn("verify", small_zoo.path, "--sample", 0)
    assert "36 networks checked, 0 run again; all well" in text
    out = Path(shutil.copytree(small_zoo.path, tmp_path / "z"))
    shard = out / "shards" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    code, text = tnfn("verify", out, "--json")
    assert code == 1
    assert "00000.safetensors" in json.loads(text)["problems"][0]


def test_import_and_export(tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path / "theirs", "mnist")
    code, text = tnfn("import", theirs, "--out", tmp_path / "z")
    assert code == 0
    assert "stray key 'encoder.0.attention.queries.bias' in 5 files" in text
    code, text = tnfn("export", tmp_path / "z", "--out", tmp_path / "back")
    assert (code, "15 state dicts" in text) == (0, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["build", "--task", "cifar", "--out", "z"], "error: unknown task 'cifar'"),
        (
            ["build", "--seeds", "two", "--out", "z"],
            "error: seeds must be one or each, found 'two'",
        ),
        (["info", "no/where"], "error: 'no/where' is not a zoo: it has no zoo.json"),
        (["info", "nowhere"], "error: there is no folder 'nowhere' and no zoo of that name"),
        (["import", "nowhere"], "error: 'nowhere' does not exist"),
        (
            ["verify", "no/where", "--tolerance", "-1"],
            "error: tolerance must be at least 0 test samples, found -1",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    code = "from transformer_nfn.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "zoo", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_gives_examples() -> None:
    for command in ("build", "info", "plot", "verify", "import", "export"):
        code, text = tnfn(command, "--help")
        assert code == 0
        assert "Example" in text
