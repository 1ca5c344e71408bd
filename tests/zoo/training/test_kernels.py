"""The fused kernels compute what the plain path computes (here in Triton's interpreter)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_nfn.zoo import ZooError, load_task
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.backends import describe_path
from transformer_nfn.zoo.training.kernels.arguments import layout

HERE = Path(__file__).parent


def interpreted(what: str) -> dict[str, Any]:
    folders = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(HERE / "interpreted_kernels.py"), what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout)
    return out


OTHER_DEPTHS = [pytest.param(what, marks=pytest.mark.nightly) for what in ("shallow", "deep")]


@pytest.mark.parametrize("what", ["images", "cropped", "tiled", "texts", *OTHER_DEPTHS])
def test_loss_and_every_gradient_equal_float64(what: str) -> None:
    errors = interpreted(what)
    for name, (fused, _) in errors.items():
        assert fused < 5e-6, (name, fused)


def test_epochs_equal_those_of_the_plain_path() -> None:
    found = interpreted("training")
    assert found["plain_rules"] < 1e-5
    assert found["adaptive_rules"] < 1e-5
    assert found["train_accuracy"] == 0
    assert found["held_loss"] < 1e-3
    assert found["held_hits"] == 0
    assert found["test_loss"] < 1e-5
    assert found["test_hits"] == 0


@pytest.mark.parametrize("patch", [16, 0])
def test_the_kernels_find_each_tensor_where_it_begins_in_a_flat_row(patch: int) -> None:
    arch = NetworkSizes(tokens=49, classes=10, patch=patch, blocks=3)
    views = arch.views(torch.arange(arch.num_weights)[None])
    first = {name: int(view.flatten()[0]) for name, view in views.items()}
    offsets = layout(arch)
    parts = {f"blocks.{i}": block for i, block in enumerate(offsets.blocks)}
    parts["classifier"] = offsets.classifier
    if offsets.embedding is not None:
        parts["embedding"] = offsets.embedding
    found = {f"{stem}.{k}": at for stem, part in parts.items() for k, at in part._asdict().items()}
    assert found == first
    assert offsets.size == arch.num_weights


def test_the_fused_path_says_why_it_cannot_be_taken() -> None:
    arch = load_task("digits", None).arch
    with pytest.raises(ZooError, match="path fused was asked for, but the fused kernels are for"):
        describe_path("fused", "cpu", arch, "bf16")
    texts = NetworkSizes(tokens=512, classes=4, patch=0)
    assert describe_path("auto", "cuda", texts, "bf16")[0] == "fused"
    assert "texts in bf16, not tf32" in describe_path("auto", "cuda", texts, "tf32")[1]
    path, sentence = describe_path("auto", "cuda", arch, "float32")
    assert path == "compiled"
    assert "multiply in bf16 or tf32" in sentence
    assert describe_path("auto", "cuda", arch, "bf16") == (
        "fused", "steps by the fused kernels on cuda"
    )  # fmt: skip
