"""The commands ``tnfn zoo …``."""

import shutil
from pathlib import Path

import pytest

from tnfn_command import as_json, assert_refused, printed
from transformer_nfn.zoo import Zoo

from .test_authors import write_theirs


def test_build_prints_a_summary_and_resumes(tmp_path: Path) -> None:
    words = ("build", "--out", tmp_path / "z", "--runs", 4, "--epochs", 1, "--batch", 256)
    words += ("--workers", 1, "--seeds", "one")
    assert "4 runs, 8 checkpoints" in printed("zoo", *words)
    summary = as_json("zoo", *words)
    assert (summary["runs"], summary["finished"], summary["seeds"]) == (4, True, "one")
    assert "one seed for all" in printed("zoo", "info", tmp_path / "z")


@pytest.mark.nightly
def test_a_predictor_trains_on_a_zoo_of_three_epochs(tmp_path: Path) -> None:
    options = ("--runs", 40, "--epochs", 3, "--samples", 64, "--workers", 1)
    printed("zoo", "build", "--out", tmp_path / "zoo", *options)
    words = ("--model", "random_forest", "--seeds", 1, "--out", tmp_path / "run")
    printed("train", tmp_path / "zoo", *words)


def test_info_shows_counts_and_a_histogram(small_zoo: Zoo) -> None:
    text = printed("zoo", "info", small_zoo.path)
    assert "12 and 0 crashed" in text
    assert "a seed each" in text
    assert "█" in text
    summary = as_json("zoo", "info", small_zoo.path)
    assert (summary["task"], summary["checkpoints"]) == ("digits", 36)
    assert sum(summary["histogram"]["counts"]) == 36


def test_plot_draws_the_histogram(small_zoo: Zoo, tmp_path: Path) -> None:
    for name in ("h.png", "h.svg"):
        printed("zoo", "plot", small_zoo.path, "--out", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 2000
    assert "Digits: 36 checkpoints, a seed each" in (tmp_path / "h.svg").read_text()


def test_verify_exits_1_on_damage(small_zoo: Zoo, tmp_path: Path) -> None:
    text = printed("zoo", "verify", small_zoo.path, "--sample", 2)
    assert "2 run again (largest difference 0 of 400 test samples, tolerance 2); all well" in text
    verdict = as_json("zoo", "verify", small_zoo.path, "--sample", 2, "--tolerance", 7)
    assert (verdict["tolerance"], verdict["worst_samples"]) == (7, 0)
    text = printed("zoo", "verify", small_zoo.path, "--sample", 0)
    assert "36 networks checked, 0 run again; all well" in text
    out = Path(shutil.copytree(small_zoo.path, tmp_path / "z"))
    shard = out / "shards" / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "00000.safetensors" in as_json("zoo", "verify", out, code=1)["problems"][0]


def test_import_and_export(tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path / "theirs", "mnist")
    text = printed("zoo", "import", theirs, "--out", tmp_path / "z")
    assert "stray key 'encoder.0.attention.queries.bias' in 5 files" in text
    assert "seeds unknown" in printed("zoo", "info", tmp_path / "z")
    assert "15 state dicts" in printed("zoo", "export", tmp_path / "z", "--out", tmp_path / "back")


def test_mistakes_exit_2_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ("build --task cifar --out z", "unknown task 'cifar'"),
        ("build --seeds two --out z", "seeds must be one or each, found 'two'"),
        ("build --width 8,x --out z", "--width must look like 32 or 16,32,48, found '8,x'"),
        ("info no/where", "'no/where' is not a zoo: it has no zoo.json"),
        ("info nowhere", "there is no folder 'nowhere' and no zoo of that name"),
        ("import nowhere", "'nowhere' does not exist"),
        ("build --vectors v.bin --out z", "there is no"),
        ("build --data . --out z", "data is for other tasks: the digits come with scikit-learn"),
        ("build --address auto --out z", "an address is for the engine ray, found local"),
        ("verify no/where --tolerance -1", "tolerance must be at least 0 test samples, found -1"),
    ):
        assert_refused(message, "zoo", *words.split())
    assert list(tmp_path.iterdir()) == []
