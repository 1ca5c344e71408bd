"""An inspection counts every symmetry a disguise has, and sees what is dead or there twice."""

import math
from pathlib import Path

import pytest
import tiny_checkpoints
import torch

from transformer_nfn.checkpoints import inspect
from transformer_nfn.checkpoints.disguises import Disguise, disguise
from transformer_nfn.checkpoints.families import open_model, write_model
from transformer_nfn.checkpoints.symmetries import symmetry_sizes
from transformer_nfn.checkpoints.units import matrix_spectrum, product_spectrum

CASES = ("gpt2", "gpt2 untied", "bert", "vit", "llama", "qwen3", "gemma2", "phi", "t5 v1.1")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    tiny_checkpoints.save("gpt2 untied", folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_rows_of_the_group_are_those_that_a_disguise_draws(case: str, tmp_path: Path) -> None:
    tiny_checkpoints.save(case, tmp_path)
    with open_model(tmp_path) as model:
        drawn = Disguise(model.description, model, torch.Generator().manual_seed(0), keep_tie=True)
        assert list(drawn)
        counted = {row.name for row in symmetry_sizes(model.description)}
    assert counted == {name for name, times in drawn.acted.items() if times}


def test_the_dimension_of_a_group_known_by_hand(gpt2: Path) -> None:
    with open_model(gpt2) as model:
        rows = {row.name: row for row in symmetry_sizes(model.description)}
    # two blocks, D = 16, four heads of width 4, 12 neurons
    assert rows["queries and keys re-based"].continuous == 2 * 4 * 4 * 4
    assert rows["stream: orthogonal fixing ones"].continuous == 15 * 14 // 2
    assert rows["neurons permuted"].finite == pytest.approx(2 * math.log10(math.factorial(12)))
    assert rows["key bias shifted"].continuous == 2 * 16


def test_embeddings_that_a_block_reads_without_a_norm_are_not_free(tmp_path: Path) -> None:
    tiny_checkpoints.save("opt post", tmp_path)
    with open_model(tmp_path) as model:
        rows = {row.name: row for row in symmetry_sizes(model.description)}
    # two blocks whose heads (16) and neurons (20) write, without biases
    assert rows["writers + u1ᵀ"].continuous == 2 * (16 + 20)


def test_spectra_are_those_of_the_products_and_the_same_for_a_disguise(
    gpt2: Path, tmp_path: Path
) -> None:
    left, right = torch.randn(3, 9, 4).double(), torch.randn(3, 9, 4).double()
    full = torch.linalg.svdvals(left @ right.mT)[:, :4]
    torch.testing.assert_close(product_spectrum(left, right), full)
    W = torch.randn(5, 40).double()
    torch.testing.assert_close(matrix_spectrum(W), torch.linalg.svdvals(W))
    with open_model(gpt2) as model:
        disguise(model, tmp_path / "other", torch.Generator().manual_seed(3))
        mine = inspect(model)
    with open_model(tmp_path / "other") as model:
        theirs = inspect(model)
    for a, b in zip(mine.blocks, theirs.blocks, strict=True):
        for name in ("QK", "VO"):  # heads may stand in another order
            x, y = (block.spectra[name] for block in (a, b))
            torch.testing.assert_close(
                x[x[:, 0].argsort()], y[y[:, 0].argsort()], rtol=1e-3, atol=1e-4
            )
        torch.testing.assert_close(a.spectra["W_A"], b.spectra["W_A"], rtol=1e-3, atol=5e-3)


def test_dead_and_double_heads_and_neurons_are_found(gpt2: Path, tmp_path: Path) -> None:
    with open_model(gpt2) as model:
        tensors = model.read(model.names)
        tensors["0.W_O"][1] = 0
        for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O"):
            tensors[f"1.{name}"][3] = tensors[f"1.{name}"][0]
        tensors["0.W_B"][5] = 0
        for name in ("W_A", "b_A"):
            tensors[f"1.{name}"][..., 7] = tensors[f"1.{name}"][..., 2]
        write_model(model, tensors, tmp_path / "made")
    with open_model(tmp_path / "made") as model:
        first, second = inspect(model).blocks
    assert first.heads[""].dead == (1,)
    assert not first.heads[""].duplicates
    assert [pair[:2] for pair in second.heads[""].duplicates] == [(0, 3)]
    assert first.neurons is not None
    assert second.neurons is not None
    assert first.neurons.dead == (5,)
    assert [pair[:2] for pair in second.neurons.duplicates] == [(2, 7)]
