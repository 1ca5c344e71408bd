"""The zoo's network is a family like the others, though it has no residuals and no gains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from memory_model import MemoryModel, disguised, noisy
from safetensors.torch import save_file

from tiny_families import save_zoo_module
from transformer_nfn.checkpoints import open_model, relate
from transformer_nfn.checkpoints.alignment import align
from transformer_nfn.checkpoints.fingerprints import compare_fingerprints, take_fingerprint
from transformer_nfn.functional import small_transformer
from transformer_nfn.functional.transformer import transformer
from transformer_nfn.networks import resolve_network, save_network

ROWS = ("mnist-sample#5", "mnist-sample#128", "ag-news-sample#2")
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


def row(name: str, dtype: torch.dtype = HALF) -> MemoryModel:
    model = resolve_network(name).open_model()
    assert model is not None
    return MemoryModel.of(model).to(dtype)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_reference_forward_is_that_of_the_module(tmp_path: Path) -> None:
    module = save_zoo_module(tmp_path / "module.safetensors")
    images = torch.randn(3, 1, 6, 6, generator=generator(0), dtype=DOUBLE)
    patches = torch.nn.functional.unfold(images, 2, stride=2).mT
    with open_model(tmp_path / "module.safetensors") as model, torch.no_grad():
        out = transformer(model.description, model, patches)
        assert torch.allclose(out, module(images), rtol=0, atol=1e-9)


def test_words_are_read_without_an_embedding(tmp_path: Path) -> None:
    made = small_transformer(tokens=6, classes=3, patch=0, d_model=8, heads=2, d_ff=12)
    weights = made.space.randn(1, generator=generator(1), dtype=DOUBLE)
    save_network(tmp_path / "words.safetensors", made.space, weights)
    X = torch.randn(2, 6, 8, generator=generator(2), dtype=DOUBLE)
    with open_model(tmp_path / "words.safetensors") as model:
        out = transformer(model.description, model, X)
    expected = made.forward({n: w[0, 0] for n, w in weights.items()}, X)
    assert torch.allclose(out, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("dtype", "condition"), [(DOUBLE, 10), (SINGLE, 100), (HALF, 300)])
def test_a_disguise_is_the_same_function(name: str, dtype: torch.dtype, condition: float) -> None:
    model = row(name, dtype)
    found = relate(model, disguised(model, 1, condition=condition))
    assert (found.verdict, found.same_function) == ("same", True), found.reason
    assert found.proof is not None
    assert len(found.proof.checks) > len(model.names)


@pytest.mark.parametrize("name", ["0.W_O", "0.b_A", "1.W_Q", "1.W_B", "classifier.W_A"])
def test_an_edit_is_never_the_same(name: str) -> None:
    model = row(ROWS[0])
    edited = noisy(model, 0.01, {name})
    assert relate(model, disguised(edited, 2, condition=10)).same_function is False
    assert relate(model, disguised(edited, 2, condition=300)).same_function is not True


def test_strangers_differ_on_an_input_that_is_shown() -> None:
    found = relate(row(ROWS[0]), row("mnist-sample#6"))
    assert found.verdict == "different"
    assert found.proof is not None
    assert found.proof.witness is not None
    assert found.proof.witness.difference > 100 * found.proof.witness.noise
    assert relate(row(ROWS[0]), row(ROWS[2])).same_function is False


def test_without_a_proof_there_is_no_verdict() -> None:
    model = row(ROWS[0])
    found = relate(model, disguised(model), prove=False)
    assert (found.verdict, found.same_function, found.score) == ("unclear", None, None)


@pytest.mark.parametrize("name", ROWS)
def test_a_fingerprint_survives_disguises_and_shows_edits(name: str) -> None:
    model = row(name)
    first = take_fingerprint(model)
    for condition in (10.0, 300.0):
        other = take_fingerprint(disguised(model, 3, condition=condition))
        assert compare_fingerprints(first, other).distance == 0
    edited = take_fingerprint(noisy(model, 0.1, {"1.W_A"}))
    assert 0 < compare_fingerprints(first, edited).distance < 0.5
    stranger = take_fingerprint(row("mnist-sample#6" if "mnist" in name else "ag-news-sample#9"))
    assert compare_fingerprints(first, stranger).distance > 0.6


def test_alignment_undoes_a_disguise_and_brings_strangers_nearer() -> None:
    model, other = row(ROWS[0], DOUBLE), row("mnist-sample#6", DOUBLE)
    back = align(disguised(model, 4, condition=5), model)
    assert back.before > 0.5
    assert back.after < 1e-6
    done = align(model, other)
    assert done.after < 0.9 * done.before
    moved = MemoryModel(model.description, dict(done.tensors or {}))
    assert relate(model, moved).verdict == "same"


def test_inputs_lower_the_barrier_and_keep_the_function(tmp_path: Path) -> None:
    made = small_transformer(4, 3, 4, d_model=8, heads=2, d_ff=12)
    files = [tmp_path / f"{i}.safetensors" for i in (0, 1)]
    for i, file in enumerate(files):
        save_network(file, made.space, made.space.randn(1, generator=generator(i), dtype=DOUBLE))
    X = torch.randn(32, 4, 4, generator=generator(7), dtype=DOUBLE)
    with open_model(files[0]) as A, open_model(files[1]) as B:
        done = align(A, B, inputs=X, rounds=30)
        a, b, config = A.read(A.names), B.read(B.names), A.description
    assert done.tensors is not None
    outputs = [transformer(config, w, X) for w in (a, b, done.tensors)]
    assert torch.allclose(outputs[2], outputs[0], rtol=0, atol=1e-9)
    aim = (torch.softmax(outputs[0], -1) + torch.softmax(outputs[1], -1)) / 2

    def barrier(w: dict[str, torch.Tensor]) -> torch.Tensor:
        between = {n: (w[n] + b[n]) / 2 for n in b}
        return -(aim * torch.log_softmax(transformer(config, between, X), -1)).sum(-1).mean()

    assert barrier(done.tensors) < barrier(a)


def test_positions_that_are_not_the_fixed_ones_are_refused(tmp_path: Path) -> None:
    from transformer_nfn.errors import CheckpointError

    state = save_zoo_module(tmp_path / "a.safetensors").state_dict()
    state["embedding.pos_embedding"] = state["embedding.pos_embedding"] + 0.1
    save_file(state, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="is not the fixed sinusoidal table"):
        resolve_network(tmp_path / "b.safetensors").open_model()
