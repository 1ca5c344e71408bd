"""`tnfn inspect` and `tnfn align` as a user runs them; what is wrong is one sentence, exit 2."""

import json
import resource
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file

from tnfn_command import as_json, printed, tnfn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    tiny_checkpoints.save("gpt2", path / "gpt2")
    tiny_checkpoints.save("llama", path / "llama")
    return path


def test_inspect_tells_a_table_json_and_a_picture(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "spectra.png"
    out = printed("inspect", folder / "gpt2", "--figure", picture)
    assert "the output matrix is the token embedding" in out
    assert picture.stat().st_size > 1000
    code, out, _ = tnfn("inspect", folder / "llama", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["family"] == "llama"
    assert shown["group"]["continuous_parameters"] > 0
    assert len(shown["blocks"]) == 2
    assert len(shown["blocks"][0]["spectra"]["QK"]["values"]) == 4


def test_inspect_takes_rows_of_a_zoo() -> None:
    out = printed("inspect", "mnist-sample#0", "--json")
    assert [block["name"] for block in json.loads(out)["blocks"]] == ["0", "1"]


def test_align_writes_what_computes_the_same(folder: Path, tmp_path: Path) -> None:
    printed("disguise", folder / "gpt2", "--out", tmp_path / "a", "--keep-tie")
    shown = as_json("align", tmp_path / "a", folder / "gpt2", "--out", tmp_path / "out")
    assert shown["distance_after"] < 1e-3 < shown["distance_before"]
    printed("compare", tmp_path / "out", folder / "gpt2")
    assert (tmp_path / "out" / "config.json").is_file()


def test_align_without_room_names_the_place_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk, but for its name
    try:
        done = tnfn("align", folder / "gpt2", folder / "gpt2", "--out", "new/aligned")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'new/aligned/model.safetensors' cannot be written")
    assert not list(tmp_path.iterdir())


def test_align_takes_rows_of_a_zoo(tmp_path: Path) -> None:
    out = tmp_path / "aligned.safetensors"
    said = printed("align", "mnist-sample#0", "mnist-sample#1", "--out", out, "--rounds", "3")
    assert "distance" in said
    assert load_file(out)["blocks.0.W_Q"].dtype == torch.float16
    printed("inspect", out)


def test_what_cannot_be_aligned_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    tiny_checkpoints.save("gpt2", broken)
    weights = load_file(broken / "model.safetensors")
    key = next(k for k in weights if k.endswith("h.1.mlp.c_fc.weight"))
    weights[key][0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    gpt2 = folder / "gpt2"
    for words, said in (
        (("align", gpt2, folder / "llama", "--out", tmp_path / "out"), "cannot be aligned"),
        (("align", gpt2, broken, "--out", tmp_path / "out"), "NaN"),
        (("align", gpt2, tmp_path / "none", "--out", tmp_path / "out"), "none"),
        (("align", gpt2, "mnist-sample#0", "--out", tmp_path / "out"), "cannot be aligned"),
        (("align", gpt2, gpt2, "--out", full), "already there"),
        (("align", "mnist-sample#0", "mnist-sample#1", "--out", full), "already there"),
        (("inspect", broken), "NaN"),
        (("inspect", tmp_path / "none"), "none"),
        (("inspect", gpt2, "--figure", tmp_path / "x.nothing"), "could not be drawn"),
    ):
        code, _, err = tnfn(*words)
        assert code == 2, err
        assert err.startswith("error: ")
        assert said in err
        assert len(err.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken", "full"]
    assert [p.name for p in full.iterdir()] == ["mine.txt"]
