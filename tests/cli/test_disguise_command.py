"""`tnfn disguise` on checkpoints of real transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiny_families import build, inputs_of, run_library, save
from tnfn_command import printed, tnfn

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("gpt2", dtype=torch.float32), tmp_path_factory.mktemp("gpt2"))


def test_a_checkpoint_is_written_so_that_its_library_loads_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "disguised"
    code, said, error = tnfn("disguise", folder, "--out", out, "--seed", 3, "--condition", 5)
    assert (code, error) == (0, "")
    for words in ("heads permuted", "stream: orthogonal fixing ones", "is its own now"):
        assert words in said
    kind = transformers.GPT2LMHeadModel
    before, after = (kind.from_pretrained(x).eval() for x in (folder, out))
    expected, found = (run_library(model, inputs_of("gpt2")) for model in (before, after))
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_ties_are_kept_if_asked_for(folder: Path, tmp_path: Path) -> None:
    said = printed("disguise", folder, "--out", tmp_path / "b", "--keep-tie")
    assert "stream: permutation and sign" in said
    assert "is its own now" not in said
    first, second = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "b"))
    assert first.keys() == second.keys()
    assert not any(torch.equal(w, second[key]) for key, w in first.items() if w.ndim > 1)


def test_the_seed_decides(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        printed("disguise", folder, "--out", tmp_path / name, "--seed", seed)
    a, b, c = ((tmp_path / x / "model.safetensors").read_bytes() for x in "abc")
    assert a == b != c


def test_a_folder_that_holds_files_is_left_alone(folder: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    assert tnfn("disguise", folder, "--out", full)[0] == 0, "an empty folder is as good as none"
    for name in ("model.safetensors", "notes.md"):
        for path in full.iterdir():
            path.unlink()
        (full / name).write_text("mine")
        code, said, error = tnfn("disguise", folder, "--out", full)
        assert (code, said) == (2, "")
        assert error == f"error: '{full}' holds other files ('{name}'): name an empty folder\n"
        assert [path.name for path in full.iterdir()] == [name]
        assert (full / name).read_text() == "mine"


def test_what_cannot_be_disguised_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (strange / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    for words, part in (
        ((strange, "--out", out), "model_type"),
        ((folder, "--out", folder), "choose another place"),
        ((folder, "--out", out, "--condition", "0.5"), "condition must be at least 1"),
        ((tmp_path / "nothing", "--out", out), "nothing"),
    ):
        code, _, error = tnfn("disguise", *words)
        assert code == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert part in error
        assert not out.exists()
