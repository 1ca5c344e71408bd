"""The symmetry of docs/add-a-symmetry.md: every driver treats it like the others."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from transformer_nfn.checkpoints import Model, OpenOptions, open_model, relate
from transformer_nfn.checkpoints.symmetries import SYMMETRIES
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.transformer import transformer
from transformer_nfn.spaces.actions import Drawing

ROOT = Path(__file__).resolve().parents[2]
FAMILY = OpenOptions(architecture=ROOT / "examples" / "llama_adapter.toml")


@pytest.fixture
def example() -> Iterator[ModuleType]:
    """The example as a module; the list of symmetries is as before afterwards."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/adapter_symmetry.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = list(SYMMETRIES)
    yield module
    SYMMETRIES[:] = before


@pytest.fixture
def model(example: ModuleType, tmp_path: Path) -> Iterator[Model]:
    with open_model(example.write_adapters(str(tmp_path / "a")), FAMILY) as opened:
        yield opened


def test_all_drivers_print_what_the_page_shows(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(str(tmp_path))
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/add-a-symmetry.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)[0].splitlines()
    assert printed[:5] == shown[:5]
    assert float(printed[5].split()[-2]) < 1e-4


def test_the_class_is_short(example: ModuleType) -> None:
    text = Path(example.__file__ or "").read_text(encoding="utf-8")
    assert len(text.partition("[start:class]")[2].partition("[end:class]")[0].splitlines()) <= 60


def test_the_contract_holds(example: ModuleType, model: Model) -> None:
    symmetry = example.AdapterBasis()
    weights = model.read(model.names, torch.float64)
    ids = torch.arange(9).unsqueeze(0)
    before = transformer(model.description, weights, ids)
    for site in symmetry.sites(model.description):
        a = site.pick(weights)
        g = symmetry.draw(site, a, Drawing(torch.Generator().manual_seed(1), condition=10.0))
        b = a | symmetry.act(site, a, g)
        for moved in (symmetry.act(site, a, g), symmetry.reduce(site, a)):
            after = transformer(model.description, weights | site.put(moved), ids)
            assert float((after - before).abs().max()) < 1e-9 * float(before.abs().max())
        torch.testing.assert_close(symmetry.fit(site, a, b), g, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            symmetry.reduce(site, a), symmetry.reduce(site, b), rtol=1e-9, atol=1e-9
        )


def test_another_adapter_is_another_function(
    example: ModuleType, model: Model, tmp_path: Path
) -> None:
    file = Path(example.write_adapters(str(tmp_path / "b"))) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.low_rank_A.weight"] *= 1.1
    save_file(tensors, file)
    with open_model(file.parent, FAMILY) as other:
        with pytest.raises(SpaceError, match=r"W_A\.A' belongs to a low-rank term"):
            relate(model, other)
        SYMMETRIES.append(example.AdapterBasis())
        assert relate(model, other, prove=True).same_function is False
