"""Sentence transformers: pooling and what follows it are part of the function."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny_families
from gguf_conversion import write_gguf
from tnfn_command import printed
from transformer_nfn.checkpoints import open_model, relate


def sentence_transformer(family: str, folder: Path, mode: str = "mean", dense: float = 0) -> Path:
    """A tiny model with a pooling module and, unless 0, a matrix of that number behind it."""
    tiny_families.save(tiny_families.build(family, dtype=torch.float32), folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Norm": "Normalize"}
    modules = [{"path": at, "type": f"sentence_transformers.models.{k}"} for at, k in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": mode == "cls", "pooling_mode_mean_tokens": mode == "mean"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    if dense:
        (folder / "2_Dense").mkdir()
        matrix = {"linear.weight": torch.full((2, 2), dense)}
        save_file(matrix, folder / "2_Dense" / "model.safetensors")
    return folder


def verdict(first: Path, second: Path) -> str:
    with open_model(first) as a, open_model(second) as b:
        return relate(a, b).verdict


def test_the_pooling_is_compared_with_folders_and_gguf(tmp_path: Path) -> None:
    mean = sentence_transformer("bert-base", tmp_path / "mean")
    assert verdict(mean, write_gguf(mean, tmp_path / "mean.gguf")) == "same"
    cls = sentence_transformer("bert-base", tmp_path / "cls", "cls")
    assert verdict(mean, cls) == "same backbone"
    assert verdict(mean, write_gguf(cls, tmp_path / "cls.gguf")) == "same backbone"
    shutil.rmtree(cls / "1_Pooling")
    assert verdict(mean, cls) == "same backbone"


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "bert-base"])
def test_a_disguise_keeps_the_stream_that_is_pooled(family: str, tmp_path: Path) -> None:
    """Even where the file is one of a language model, whose output matrix would hide its basis."""
    transformers = pytest.importorskip("transformers")
    home = sentence_transformer(family, tmp_path / "home", dense=0.5)
    printed("disguise", home, "--out", tmp_path / "out")
    ids = torch.arange(2, 12).reshape(1, -1)
    streams = [
        transformers.AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state
        for folder in (home, tmp_path / "out")
    ]
    torch.testing.assert_close(*streams, rtol=1e-3, atol=1e-3)
    assert verdict(home, tmp_path / "out") == "same"
    other = sentence_transformer(family, tmp_path / "other", dense=0.6)
    assert verdict(home, other) == "same backbone"
