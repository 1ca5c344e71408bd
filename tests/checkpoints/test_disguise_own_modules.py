"""PyTorch's own encoder and pickled state dicts: computed, disguised and loaded as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tiny_families import build, inputs_of, run_library, save
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.checkpoints.families import open_model
from transformer_nfn.functional.transformer import transformer


def encoder(*, norm_first: bool, activation: str, final: bool) -> nn.TransformerEncoder:
    """An encoder with random weights, none of them trivial."""
    layer = nn.TransformerEncoderLayer(
        24, 4, 40, activation=activation, batch_first=True, norm_first=norm_first
    )
    norm = nn.LayerNorm(24) if final else None
    module = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
            if "norm" in name and name.endswith("weight"):
                p.add_(1)
    return module


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(("norm_first", "final"), [(True, True), (True, False), (False, False)])
def test_an_encoder_of_pytorch(
    norm_first: bool, final: bool, activation: str, tmp_path: Path
) -> None:
    module = encoder(norm_first=norm_first, activation=activation, final=final)
    (tmp_path / "a").mkdir()
    save_file(module.state_dict(), tmp_path / "a/model.safetensors")
    config = {"nhead": 4, "norm_first": norm_first, "activation": activation}
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Gradients keep the module off its fast path, which has a forward of its own.
    expected = module(x).detach()
    with open_model(tmp_path / "a") as source:
        found = transformer(source.description, source, x)
        drawn = disguise(source, tmp_path / "b", torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert drawn.action == "none"  # the stream is input and output
    assert bool(drawn.acted["neurons scaled"]) == (activation == "relu")
    state = load_file(tmp_path / "b/model.safetensors")
    assert not any(torch.equal(w, state[k]) for k, w in module.state_dict().items() if w.ndim > 1)
    module.load_state_dict(state)
    torch.testing.assert_close(module(x).detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("keep_tie", [False, True])
def test_a_pickled_state_dict(keep_tie: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, inputs = build("bert", dtype=torch.float32), inputs_of("bert")
    expected = run_library(model, inputs)
    save(model, tmp_path / "a")
    (tmp_path / "a/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "a/pytorch_model.bin")
    with open_model(tmp_path / "a") as source:
        disguise(source, tmp_path / "b", torch.Generator().manual_seed(0), keep_tie=keep_tie)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "b").eval()
    found = run_library(loaded, inputs)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
