"""A new predictor of this library is one module: nothing else names it."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tnfn_command import as_json, printed
from transformer_nfn.models import predictor
from transformer_nfn.prediction import train
from transformer_nfn.testing import check_predictor, write_example_checkpoint
from transformer_nfn.zoo import Zoo

ZOO = Path(__file__).resolve().parents[2] / "assets" / "mnist-sample"
MODULE = """
import torch
from torch import nn

from transformer_nfn.models.batch import paper_block
from transformer_nfn.models.predictor import BUILT, CHECKPOINTS, predictor
from transformer_nfn.models.pretrained import Pretrained

@predictor("norms")
class Norms(Pretrained):
    title, place = "Norms of tensors", 9
    zoos = (BUILT, CHECKPOINTS)
    stacked = False

    def __init__(self, space=None, *, tensors=1):
        super().__init__()
        self.space = paper_block() if space is None else space
        self._config = {"tensors": tensors}
        self.net = nn.Linear(tensors, 1)

    @classmethod
    def of(cls, data, **options):
        return cls(data.block_space, tensors=len(data.network.layout.shapes), **options)

    def logits(self, batch):
        norms = torch.stack([w.flatten(1).norm(dim=1) for w in batch.views.values()], 1)
        return self.net(norms.log1p()).squeeze(-1)
"""


@pytest.fixture
def norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one module, which is imported as a package of predictors would be."""
    monkeypatch.setattr(predictor, "_REGISTRY", dict(predictor._REGISTRY))
    (tmp_path / "their_norms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("their_norms", None)
    __import__("their_norms")
    return "norms"


def test_one_module_is_a_predictor(norms: str, broken_mnist: Zoo, tmp_path: Path) -> None:
    check_predictor(norms)
    assert [row["title"] for row in as_json("models", "norms")] == ["Norms of tensors"]
    run, words = tmp_path / "run", ("--seeds", 1, "--epochs", 1)
    as_json("train", ZOO, "--model", norms, *words, "--out", run)
    assert len(as_json("predict", run, f"{ZOO}#0-2")) == 3
    assert as_json("evaluate", run, ZOO)["networks"] > 2
    guarded = tmp_path / "guarded"
    made = train(ZOO, norms, seeds=1, epochs=1, damaged=broken_mnist.path, out=guarded)
    assert made.record.summary["guarded"]
    (row,) = made.predict(f"{ZOO}#0")
    assert row.guarded
    rows = ("--models", norms, "--out", tmp_path / "cells", *words)
    printed("reproduce", "table7", ZOO, *rows)
    assert "Norms of tensors" in (tmp_path / "cells" / "table7.md").read_text()
    printed("report", run, "--out", tmp_path / "report.html")
    assert "Norms of tensors" in (tmp_path / "report.html").read_text()


def test_it_reads_checkpoints_too(norms: str, tmp_path: Path) -> None:
    zoo = Zoo.create(tmp_path / "zoo")
    for seed in range(40):
        path = write_example_checkpoint(tmp_path / f"net-{seed}", seed)
        config = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
        scaled = {name: w * (1 + seed / 20) for name, w in tensors.items()}
        zoo.add(scaled, f"net-{seed}", config=config, accuracy=seed / 40)
    run = tmp_path / "run"
    words = ("--target", "accuracy", "--seeds", 1, "--epochs", 2, "--out", run)
    as_json("train", zoo.path, "--model", norms, *words)
    (row,) = as_json("predict", run, f"{zoo.path}#3")
    assert 0 <= row["low"] <= row["value"] <= row["high"] <= 1
    assert as_json("evaluate", run, zoo.path)["networks"] == 40
    printed("report", run, "--out", tmp_path / "report.html")
    assert "Norms of tensors" in (tmp_path / "report.html").read_text()
