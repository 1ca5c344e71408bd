"""The whole-network predictor on checkpoints of any family: probes, batches, invariance."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tiny_families import build, inputs_of, network, nightly_but_quick, run_library, save
from transformer_nfn.checkpoints import disguise, open_model
from transformer_nfn.errors import SpaceError
from transformer_nfn.functional.transformer import transformer
from transformer_nfn.models import Batch, RowLayout, WholeCheckpoint
from transformer_nfn.models.whole_network import ProbeFormat
from transformer_nfn.models.whole_network.checkpoint_probes import checkpoint_outputs

TOKENS = ("gpt2", "bert", "albert", "esm", "t5", "llama", "opt")


@pytest.mark.parametrize("name", nightly_but_quick(TOKENS))
def test_a_mixture_of_one_token_is_that_token(name: str) -> None:
    net = network(name)
    inputs = inputs_of(name)
    ids, decoder = inputs["input_ids"], inputs.get("decoder_input_ids")

    def run(tokens: Tensor, decoded: Tensor | None) -> Tensor:
        return transformer(net.description, net.weights, tokens, decoder=decoded)

    def mixed(tokens: Tensor) -> Tensor:
        return one_hot(tokens, net.description.vocab or 0).double()

    expected = run(ids, decoder)
    found = run(mixed(ids), None if decoder is None else mixed(decoder))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_outputs_have_the_derivative_of_their_mixtures() -> None:
    net = network("gpt2")
    generator = torch.Generator().manual_seed(0)
    shape = (1, 5, net.description.vocab or 0)
    mixture = torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    towards = torch.randn(shape, generator=generator, dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return transformer(net.description, net.weights, x).square().mean()

    (gradient,) = torch.autograd.grad(value(mixture), mixture)
    step = 1e-5
    with torch.no_grad():
        slope = (value(mixture + step * towards) - value(mixture - step * towards)) / (2 * step)
    assert float((gradient * towards).sum()) == pytest.approx(float(slope), rel=1e-6)


def read(folder: Path) -> Batch:
    with open_model(folder) as model:
        tensors = {name: w[None].float() for name, w in model.read(model.names).items()}
        return Batch.of(tensors, model.description)


def test_networks_of_several_sizes_are_run_together(tmp_path: Path) -> None:
    models = [build("gpt2-class", seed=seed, size=1.0) for seed in range(3)]
    small = build("gpt2-class", seed=7, size=1.0)
    small.transformer.h = small.transformer.h[:1]  # type: ignore[index, union-attr]
    small.config.n_layer = 1  # type: ignore[union-attr]
    order = [models[0], small, *models[1:]]
    batch = Batch.join([read(save(m, tmp_path / str(i))) for i, m in enumerate(order)])
    ids = inputs_of("gpt2-class")["input_ids"]
    vocabulary = torch.arange(3, 61)
    found = checkpoint_outputs(batch, one_hot(ids - 3, 58).float(), vocabulary)
    expected = torch.stack([run_library(m, {"input_ids": ids}) for m in order])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vit", "bert-class", "gpt2-class", "gpt2"])
def test_a_disguise_changes_no_prediction(name: str, tmp_path: Path) -> None:
    original = save(build(name, size=1.0), tmp_path / "a")
    with open_model(original) as model:
        disguise(model, tmp_path / "b", torch.Generator().manual_seed(0))
    pair = Batch.join([read(original), read(tmp_path / "b")])
    assert not torch.allclose(pair.weights[0], pair.weights[1], atol=1e-2)
    pair = pair.plus("features", torch.zeros(2, 3, dtype=torch.float64))
    torch.manual_seed(0)
    predictor = WholeCheckpoint.of(SimpleNamespace(network=pair), probes=8)
    predictor.output_head.weight.normal_()
    with torch.no_grad():
        first, second = predictor.logits(pair)
        assert float(first.abs()) > 1e-2
        assert float(first) == pytest.approx(float(second), rel=1e-3)


def test_what_has_no_probes_says_so() -> None:
    def text(name: str) -> str:
        description = network(name).description
        return ProbeFormat.of(RowLayout(description.tensors, description)).text

    with pytest.raises(SpaceError, match="a whisper reads audio"):
        text("whisper")
    texts = {text(name) for name in ("vit", "bert", "gpt2")}
    assert texts == {
        "images of 3 × 12 × 12 and returns 7 logits",
        "24 tokens of 61 and returns 61 logits a token",
    }
