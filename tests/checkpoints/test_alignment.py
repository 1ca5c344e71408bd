"""An aligned network computes what it did and lies nearer; a disguise is undone up to rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch

import tiny_families
from transformer_nfn.checkpoints import align
from transformer_nfn.checkpoints.alignment import Aligned
from transformer_nfn.checkpoints.disguises import disguise
from transformer_nfn.checkpoints.families import open_model


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def undone(model: Any, folder: Path, **how: Any) -> Aligned:
    """A model disguised, and the disguise aligned with the model."""
    model.save_pretrained(folder / "b")
    with open_model(folder / "b") as B:
        disguise(B, folder / "a", generator(1), **how)
        with open_model(folder / "a") as A:
            return align(A, B, folder / "out")


@tiny_families.every_family
def test_a_disguise_is_undone(family: str, tmp_path: Path) -> None:
    done = undone(tiny_families.build(family), tmp_path, condition=1e3, keep_tie=True)
    assert done.before > 1
    assert {part: away for part, (_, away) in done.parts.items() if away > 1e-9} == {}
    assert done.difference is not None
    assert done.difference < 1e-11


@pytest.mark.parametrize(
    "name",
    tiny_families.nightly_but_quick(
        n for n, tiny in tiny_families.TINY.items() if tiny.inputs != "pixels"
    ),
)
def test_a_disguise_is_undone_where_tokens_leave_the_stream_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_families.TINY[name]
    few = replace(tiny, options={**tiny.options, "vocab_size": 8})  # the stream has 32 directions
    monkeypatch.setitem(tiny_families.TINY, name, few)
    done = undone(tiny_families.build(name, dtype=torch.float32), tmp_path, condition=5)
    assert {part: away for part, (_, away) in done.parts.items() if away > 1e-6} == {}


@pytest.mark.parametrize(
    "case",
    [
        "opt post",
        *tiny_families.nightly_but_quick(["vit", "qwen3", "gpt_neox serial", "bert tokens"]),
    ],
)
def test_a_disguise_of_norms_with_small_gains_is_undone(case: str, tmp_path: Path) -> None:
    done = undone(tiny_checkpoints.build(case).double(), tmp_path, condition=5)
    assert done.after < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_disguise_in_half_precision_is_undone_up_to_rounding(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    done = undone(tiny_families.build("gpt2-untied", dtype=dtype), tmp_path, condition=3)
    with open_model(tmp_path / "out") as moved:
        assert moved.dtype == dtype
    assert done.after < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", tiny_families.nightly_but_quick(["gpt2", "llama", "bert", "vit"]))
def test_a_stranger_comes_nearer_and_loads_in_its_library(case: str, tmp_path: Path) -> None:
    models = []
    for seed, name in ((0, "b"), (1, "a")):
        torch.manual_seed(seed)
        models.append(tiny_checkpoints.CASES[case]())  # as its library initialises it
        models[-1].save_pretrained(tmp_path / name)  # type: ignore[operator]
    with open_model(tmp_path / "a") as A, open_model(tmp_path / "b") as B:
        done = align(A, B, tmp_path / "out")
    assert done.after < 0.95 * done.before
    original = models[1]
    model = type(original).from_pretrained(tmp_path / "out")  # type: ignore[attr-defined]
    if case == "vit":
        given = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator())}
    else:
        given = {"input_ids": torch.arange(8).reshape(1, 8)}
    with torch.no_grad():
        mine, theirs = (m.eval()(**given).logits for m in (model, original))
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


def test_untied_the_stream_has_more_room(tmp_path: Path) -> None:
    for seed, name in ((0, "b"), (1, "a")):
        tiny_checkpoints.build("gpt2", seed).save_pretrained(tmp_path / name)  # type: ignore[operator]
    with open_model(tmp_path / "a") as A, open_model(tmp_path / "b") as B:
        done = align(A, B, tmp_path / "out", untie=True)
    assert done.action == "orthogonal fixing ones"
    with open_model(tmp_path / "out") as moved:
        assert not moved.description.tied


