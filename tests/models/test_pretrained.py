"""A model written to a folder comes back the same, in the convention of model hubs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from transformer_nfn import spaces
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.models import TransformerNFN

SPACE = spaces.rope_block(4, 2, 4, 2, 6)


@pytest.fixture
def model() -> TransformerNFN:
    torch.manual_seed(0)
    return TransformerNFN(SPACE, 2, [2, 3], classifier=5, gated=True)


def test_a_model_comes_back_the_same(model: TransformerNFN, tmp_path: Path) -> None:
    folder = model.save_pretrained(tmp_path / "new" / "model")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    back = TransformerNFN.from_pretrained(folder)
    assert back.config == model.config
    assert back.space == SPACE
    given = {"blocks": [SPACE.randn(3) for _ in range(2)], "classifier": torch.randn(3, 5)}
    assert torch.equal(back(given), model(given))


def test_the_files_are_those_of_a_hub(model: TransformerNFN, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["channels"] == [2, 3]
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == set(model.state_dict())


def test_a_folder_needs_no_hub(
    model: TransformerNFN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    model.save_pretrained(tmp_path)
    TransformerNFN.from_pretrained(tmp_path)
    with pytest.raises(TransformerNFNError, match=r"install transformer-nfn\[hub\]"):
        TransformerNFN.from_pretrained("somebody/some-model")


def test_folders_that_hold_no_model(model: TransformerNFN, tmp_path: Path) -> None:
    with pytest.raises(TransformerNFNError, match=r"holds no config\.json"):
        TransformerNFN.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"channels": [2, 4]}))
    with pytest.raises(TransformerNFNError, match="does not fit its config"):
        TransformerNFN.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"colour": "red"}))
    with pytest.raises(TransformerNFNError, match="config is malformed"):
        TransformerNFN.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TransformerNFNError, match="is not JSON"):
        TransformerNFN.from_pretrained(tmp_path)
