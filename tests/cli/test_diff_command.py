"""`tnfn diff` on checkpoints, and on what is none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tnfn_command import tnfn
from transformer_nfn.testing import write_example_checkpoint


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and a copy with an adapter of rank one in a value matrix."""
    folders = [write_example_checkpoint(tmp_path / name) for name in "ab"]
    file = folders[1] / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.self_attn.v_proj.weight"] += 0.1 * torch.ones(8, 8)
    save_file(weights, file)
    return folders[0], folders[1]


def test_a_change_is_explained_drawn_and_written(pair, tmp_path):
    a, b = pair
    figure, page = tmp_path / "changes.svg", tmp_path / "changes.html"
    done = tnfn("diff", a, b, "--figure", figure, "--page", page)
    assert done.returncode == 0, done.stderr
    assert "Change of rank 1 on v of block 1." in done.stdout
    assert figure.is_file()
    assert page.is_file()
    stored = json.loads(tnfn("diff", a, b, "--json").stdout)
    assert [t["tensor"] for t in stored["tensors"] if t["kind"] != "unchanged"] == ["W_V"]


def test_changes_of_vectors_take_a_line_for_each_name(pair):
    file = pair[1] / "model.safetensors"
    weights = load_file(file)
    for block, factor in (("0", 1.25), ("1", 1.5)):
        weights[f"model.layers.{block}.input_layernorm.weight"] *= factor
    save_file(weights, file)
    assert "norm_1.g: 0.25 to 0.5 in blocks 0 to 1\n" in tnfn("diff", *pair).stdout + "\n"


def test_a_copy_is_the_same(pair):
    done = tnfn("diff", pair[0], pair[0])
    assert done.stdout == "A and B are the same: both hold the same bytes.\n"


def test_outputs_that_cannot_be_written_leave_nothing(pair, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    figure = tmp_path / "new" / "changes.svg"
    done = tnfn("diff", *pair, "--figure", figure, "--page", blocked / "page.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert "page.html' cannot be written" in done.stderr
    assert not figure.parent.exists()
