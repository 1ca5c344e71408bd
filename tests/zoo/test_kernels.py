"""The fused kernels compute what the plain path computes (here in Triton's interpreter)."""

import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_nfn.zoo import SizeGroup, ZooError
from transformer_nfn.zoo.sizes import NetworkSizes
from transformer_nfn.zoo.training.backends import describe_path
from transformer_nfn.zoo.training.kernels import nvrtc

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def script(name: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a script beside this file prints, in a process of its own."""
    folders = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | environment
    command = [sys.executable, str(HERE / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def interpreted(*case: str) -> dict[str, Any]:
    """Run `kernel_cases` with the interpreter, which is chosen when Triton is imported."""
    return script("kernel_cases.py", *case, TRITON_INTERPRET="1")


NIGHTLY = [
    "cropped w32-h2-d2", "images w32-h2-d2", "tiled w32-h2-d2", "texts w32-h2-d2",
    "cropped w48-h3-d2",
    "images w32-h2-d3", "images w16-h1-d1", "images w16-h8-d1", "images w32-h4-d2",
    "tiled w48-h1-d1", "texts w48-h4-d1", "images w64-h8-d2", "short w64-h1-d2",
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        "images w32-h2-d1",
        *(pytest.param(case, marks=pytest.mark.nightly) for case in NIGHTLY),
    ],
)
def test_loss_and_every_gradient_equal_float64(case: str) -> None:
    for name, (fused, _) in interpreted(*case.split()).items():
        assert fused < 5e-6, (name, fused)


def check_chip(*case: str) -> None:
    """Compile kernels of `kernel_compile` and check that an H200 can run them."""
    report = script("kernel_compile.py", *case)
    assert report
    for kernel, needs in report.items():
        assert needs["shared"] <= 227 * 1024, (kernel, needs)
        assert needs["spilled"] <= 3072, (kernel, needs)


@pytest.mark.nightly
def test_a_size_that_was_not_measured_compiles_for_the_chip() -> None:
    check_chip("digits", "w48-h3-d1", "bf16", "rows_forward", "attention_backward")


IMAGES = product(
    ["w16-h8", "w32-h1", "w32-h8", "w48-h3", "w64-h1", "w64-h8"], ["bf16", "tf32", "tf32x3"]
)
TEXTS = product(["w32-h2", "w64-h1"], ["bf16", "tf32", "tf32x3"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "size", "precision"),
    [*(("mnist", *case) for case in IMAGES), *(("ag_news", *case) for case in TEXTS)],
)
def test_sizes_of_the_fused_path_compile_for_the_chip(task: str, size: str, precision: str) -> None:
    check_chip(task, f"{size}-d2", precision)


@pytest.mark.nightly
def test_epochs_equal_those_of_the_plain_path() -> None:
    errors = interpreted("training")
    assert errors["plain_rules"] < 1e-5
    assert errors["adaptive_rules"] < 1e-5
    assert errors["train_accuracy"] == 0
    assert errors["held_loss"] < 1e-3
    assert errors["held_hits"] == 0
    assert errors["test_loss"] < 1e-5
    assert errors["test_hits"] == 0


@pytest.mark.nightly
def test_equal_runs_of_one_seed_train_to_equal_weights() -> None:
    equal = interpreted("seeds")
    assert equal.pop("moved") == [True, True, True]
    for what, (shared, separate) in equal.items():
        assert (shared, separate) == (True, False), what


def on_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int], nvrtc_found: bool) -> None:
    """As if there were a GPU of this compute capability, with NVRTC or without."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(nvrtc, "library", lambda: object() if nvrtc_found else None)


def test_the_fused_path_is_chosen_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (8, 0), nvrtc_found=True)
    images, texts = NetworkSizes(49, 10, 16), NetworkSizes(512, 4, 0)
    fused = ("fused", "steps by the fused kernels on cuda")
    assert describe_path("auto", "cuda", images, "bf16") == fused
    assert describe_path("auto", "cuda", images.resized(SizeGroup(depth=3)), "bf16") == fused
    assert describe_path("auto", "cuda", texts, "bf16") == fused
    assert describe_path("auto", "cuda", texts, "tf32") == fused
    path, note = describe_path("auto", "cuda", images, "float32")
    assert path == "compiled"
    assert "multiply in bf16 or tf32" in note
    for group in (SizeGroup(16, 1), SizeGroup(48, 3), SizeGroup(64, 8)):
        assert describe_path("auto", "cuda", images.resized(group), "bf16") == fused
        assert describe_path("auto", "cuda", texts.resized(group), "bf16") == fused
    for group in (SizeGroup(24), SizeGroup(80), SizeGroup(64, 16)):
        path, note = describe_path("auto", "cuda", images.resized(group), "bf16")
        assert path == "compiled"
        assert "widths 16, 32, 48 and 64 with at most 8 heads and 128 neurons" in note
        assert f"not for {group}" in note
    with pytest.raises(ZooError, match="path fused is not possible: the fused kernels are for"):
        describe_path("fused", "cpu", images, "bf16")


def test_the_on_chip_kernels_are_chosen_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    images, texts = NetworkSizes(49, 10, 16), NetworkSizes(512, 4, 0)
    on_gpu(monkeypatch, (9, 0), nvrtc_found=True)
    on_chip = ("on-chip", "steps by the on-chip kernels on cuda")
    assert describe_path("auto", "cuda", images, "bf16") == on_chip
    assert describe_path("auto", "cuda", images.resized(SizeGroup(depth=3)), "bf16") == on_chip
    # The Triton kernels can be chosen, and train everything else.
    fused = ("fused", "steps by the fused kernels on cuda")
    assert describe_path("fused", "cuda", images, "bf16") == fused
    assert describe_path("auto", "cuda", images, "tf32") == fused
    assert describe_path("auto", "cuda", texts, "bf16") == fused
    large = NetworkSizes(64, 10, 16), NetworkSizes(49, 10, 48)
    groups = SizeGroup(16), SizeGroup(32, 4), SizeGroup(depth=4)
    for other in (*large, *(images.resized(group) for group in groups)):
        assert describe_path("auto", "cuda", other, "bf16") == fused
        with pytest.raises(ZooError, match="path on-chip is not possible: the on-chip kernels are"):
            describe_path("on-chip", "cuda", other, "bf16")
    on_gpu(monkeypatch, (8, 0), nvrtc_found=True)
    assert describe_path("auto", "cuda", images, "bf16") == fused
    with pytest.raises(ZooError, match="for GPUs of compute capability 9"):
        describe_path("on-chip", "cuda", images, "bf16")


def test_a_build_says_why_it_does_without_the_on_chip_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = NetworkSizes(49, 10, 16)
    on_gpu(monkeypatch, (9, 0), nvrtc_found=False)
    path, note = describe_path("auto", "cuda", images, "bf16")
    assert path == "fused"
    assert "NVRTC, which compiles the on-chip kernels, is not installed" in note
    assert describe_path("auto", "cuda", images, "tf32")[1] == "steps by the fused kernels on cuda"
    with pytest.raises(ZooError, match="path on-chip is not possible: NVRTC"):
        describe_path("on-chip", "cuda", images, "bf16")
