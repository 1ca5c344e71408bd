"""ONNX files as exporters write them: names kept, linear layers anonymous and transposed."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from transformers.models.bert import modeling_bert

import tiny_families
from onnx_files import write_onnx
from tnfn_command import tnfn
from transformer_nfn.checkpoints import open_model
from transformer_nfn.errors import CheckpointError


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub folder."""
    folder = tmp_path_factory.mktemp("bert") / "hub"
    return tiny_families.save(tiny_families.build("bert-base", dtype=torch.float32), folder)


class _Ids(nn.Module):
    """The model as a function of token ids alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).pooler_output


def test_an_export_is_the_model(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The exporter cannot follow how the library builds masks.
    for name in ("create_bidirectional_mask", "create_causal_mask"):
        monkeypatch.setattr(modeling_bert, name, lambda **_: None)
    model = _Ids(tiny_families.build("bert-base", dtype=torch.float32))
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (torch.ones(1, 5, dtype=torch.long),), str(tmp_path / "model.onnx"),
            dynamo=False,
        )  # fmt: skip
    names = [tensor.name for tensor in onnx.load(str(tmp_path / "model.onnx")).graph.initializer]
    assert any(name.startswith("onnx::MatMul_") for name in names)
    shutil.copy(bert / "config.json", tmp_path / "config.json")
    with open_model(tmp_path / "model.onnx") as exported, open_model(bert) as original:
        assert exported.description == original.description
        for name in original.names:
            assert torch.equal(exported[name], original[name]), name
    for path in (tmp_path, tmp_path / "model.onnx"):
        done = tnfn("compare", bert, path)
        assert done.returncode == 0, done
    done = tnfn("disguise", tmp_path / "model.onnx", "--out", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert tnfn("compare", bert, tmp_path / "other").returncode == 0


def test_weights_in_a_file_beside_it(bert: Path, tmp_path: Path) -> None:
    file = write_onnx(bert, tmp_path / "out", external="model.onnx_data")
    with open_model(file) as exported, open_model(bert) as original:
        assert all(torch.equal(exported[name], original[name]) for name in original.names)
    (tmp_path / "out/model.onnx_data").write_bytes(b"\0" * 100)
    with open_model(file) as exported, pytest.raises(CheckpointError, match="cut short"):
        exported["token"]
    (tmp_path / "out/model.onnx_data").unlink()
    os.mkfifo(tmp_path / "out/model.onnx_data")
    with open_model(file) as exported, pytest.raises(CheckpointError, match="not a regular file"):
        exported["token"]
    (tmp_path / "out/model.onnx_data").unlink()
    with open_model(file) as exported, pytest.raises(CheckpointError, match="which is missing"):
        exported["token"]


def test_what_cannot_be_known_is_refused(bert: Path, tmp_path: Path) -> None:
    cases = {
        "no node says which weight 'onnx::MatMul_": {"names": False},
        r"is quantised \(MatMulInteger\)": {"op": "MatMulInteger"},
    }
    for words, options in cases.items():
        with pytest.raises(CheckpointError, match=words):
            open_model(write_onnx(bert, tmp_path / "a", **options))
    file = write_onnx(bert, tmp_path / "b")
    model = onnx.load(str(file))
    kept = [t for t in model.graph.initializer if "encoder.layer.1.output" not in t.name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    onnx.save(model, str(file))
    with pytest.raises(CheckpointError, match=r"lacks 'encoder\.layer\.1\.output"):
        open_model(file)
    data = file.read_bytes()
    for bad in (b"", data[: len(data) // 2], b"\x08\x08" + b"\xff" * 40):
        file.write_bytes(bad)
        done = tnfn("inspect", file)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
        assert "is not a readable ONNX file" in done.stderr
