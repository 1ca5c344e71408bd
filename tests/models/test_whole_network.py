"""`WholeNetwork` depends on the function and on invariants of the weights, and on nothing else."""

import json

import pytest
import torch

from transformer_nfn.functional import sinusoids, small_transformer
from transformer_nfn.io.assets import CHECKOUT
from transformer_nfn.models import Batch, WholeNetwork
from transformer_nfn.models.whole_network import probe_outputs, whole_invariants
from transformer_nfn.models.whole_network.probes import CHUNK, outputs_vary
from transformer_nfn.spaces import attention_block

TOKENS, CLASSES, PATCH = 7, 5, 6


def networks(count=3, d_model=8, heads=2, blocks=2, patch=PATCH, dtype=torch.float64, seed=0):
    made = small_transformer(TOKENS, CLASSES, patch, d_model, heads, 2 * d_model, blocks)
    generator = torch.Generator().manual_seed(seed)
    named = {
        name: torch.randn(count, *made.space.shape(name), generator=generator, dtype=dtype) * 0.5
        for name in made.space.tensors
    }
    return made, named


def block_space(d_model=8, heads=2):
    return attention_block(d_model, heads, d_model // heads, d_model // heads, 2 * d_model)


def model(named, **options):
    torch.manual_seed(0)
    images = "embedding.W" in named
    made = WholeNetwork(
        block_space(),
        tokens=TOKENS,
        width=PATCH if images else 8,
        classes=CLASSES,
        images=images,
        **{"probes": 6, "rank": 4, "hidden": 8, **options},
    ).double()
    made.standardise(Batch.of(named))
    return made


def test_the_default_is_the_shipped_model():
    (config,) = (CHECKOUT / "mnist-whole").glob("seed-*/config.json")
    assert WholeNetwork().config == json.loads(config.read_text())


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"d_model": 12, "heads": 3, "blocks": 1},
        {"blocks": 3},
        {"patch": 0},
    ],
)
def test_outputs_are_those_of_the_reference_forward(sizes):
    made, named = networks(**sizes)
    D = sizes.get("d_model", 8)
    inputs = torch.randn(4, TOKENS, sizes.get("patch", PATCH) or D, dtype=torch.float64)
    found = probe_outputs(Batch.of(named), inputs, sinusoids(TOKENS, D).double())
    for i in range(3):
        one = {name: w[i] for name, w in named.items()}
        for j, x in enumerate(inputs):
            expected = made.forward(one, x)
            torch.testing.assert_close(found.logits[i, j], expected, rtol=1e-9, atol=1e-9)
    assert found.similarity.shape == (3, 4, sizes.get("blocks", 2))


def test_outputs_of_many_networks_are_those_of_each():
    _, named = networks(CHUNK + 3)
    inputs = torch.randn(2, TOKENS, PATCH, dtype=torch.float64)
    where = sinusoids(TOKENS, 8).double()
    with torch.no_grad():
        together = probe_outputs(Batch.of(named), inputs, where)
        last = probe_outputs(Batch.of({k: w[-1:] for k, w in named.items()}), inputs, where)
    torch.testing.assert_close(together.logits[-1:], last.logits)
    torch.testing.assert_close(together.similarity[-1:], last.similarity)


def test_no_symmetry_of_the_whole_network_moves_a_prediction():
    made, named = networks()
    reader = model(named)
    element = made.space.group.random(torch.Generator().manual_seed(1), batch=3)
    moved = element.act({name: w.unsqueeze(1) for name, w in named.items()})
    other = {name: w.squeeze(1) for name, w in moved.items()}
    assert not torch.allclose(other["blocks.0.W_Q"], named["blocks.0.W_Q"])
    with torch.no_grad():
        before, after = reader(Batch.of(named)), reader(Batch.of(other))
    torch.testing.assert_close(after, before, rtol=1e-7, atol=1e-7)


def test_the_first_stream_is_permuted_together_with_the_positions():
    _, named = networks()
    reader = model(named)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    where = sinusoids(TOKENS, 8).double()
    other = dict(named)
    other["embedding.W"], other["embedding.b"] = (
        named["embedding.W"][..., order],
        named["embedding.b"][..., order],
    )
    for name in ("W_Q", "W_K", "W_V"):
        other[f"blocks.0.{name}"] = named[f"blocks.0.{name}"][:, :, order]
    with torch.no_grad():
        before = reader.logits(Batch.of(named))
        after = reader.logits(Batch.of(other), where[:, order])
        wrong = reader.logits(Batch.of(other))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
    assert float((wrong - before).abs().max()) > 1e-4


def test_scales_of_relu_neurons_are_not_seen():
    _, named = networks()
    reader = model(named)
    other = dict(named)
    scale = torch.rand(3, 16, dtype=torch.float64) + 0.5
    other["blocks.0.W_A"] = named["blocks.0.W_A"] * scale[:, None]
    other["blocks.0.b_A"] = named["blocks.0.b_A"] * scale
    other["blocks.0.W_B"] = named["blocks.0.W_B"] / scale[:, :, None]
    with torch.no_grad():
        torch.testing.assert_close(reader.logits(Batch.of(other)), reader.logits(Batch.of(named)))


def test_a_model_is_read_back_as_it_was_written(tmp_path):
    _, named = networks(dtype=torch.float32)
    reader = model({k: w.double() for k, w in named.items()}).float()
    reader.save_pretrained(tmp_path)
    again = WholeNetwork.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(Batch.of(named)), reader(Batch.of(named)))


def test_weights_count_only_where_outputs_differ_between_probes():
    _, named = networks()
    named["classifier.W_2"][0] = 0  # the outputs of the first are its biases
    network, reader = Batch.of(named), model(named)
    with torch.no_grad():
        share = outputs_vary(reader.head_inputs(network).computed["outputs"], 6, CLASSES)
        assert float(share[0]) == 0
        assert float(share[1:].min()) > 0.99
        before = reader.logits(network)
        reader.invariant_head[-1].bias += 3.0
        moved = reader.logits(network) - before
    assert float(moved[0]) == 0
    torch.testing.assert_close(moved[1:], 3 * share[1:])


def test_what_rounding_leaves_of_a_dead_neuron_is_not_seen():
    _, named = networks()
    positions = sinusoids(TOKENS, 8).double()
    before = whole_invariants(Batch.of(named), positions)
    named["blocks.0.W_A"][..., 0] = named["blocks.0.b_A"][..., 0] = 0
    dead = whole_invariants(Batch.of(named), positions)
    noise = torch.Generator().manual_seed(0)
    for name in ("blocks.0.W_A", "blocks.0.b_A"):
        left = named[name][..., 0]
        left += 1e-7 * torch.randn(left.shape, generator=noise, dtype=left.dtype)
    left = whole_invariants(Batch.of(named), positions)
    assert float((dead - before).abs().max()) > 1e-2
    assert float((left - dead).abs().max()) < 1e-6


def test_spectra_that_one_solver_gives_up_on_are_found_by_another(monkeypatch):
    _, named = networks()
    expected, solve = whole_invariants(Batch.of(named)), torch.linalg.eigvalsh
    asked = []

    def fails_first(gram):
        asked.append(len(gram))
        if len(asked) == 1:
            raise torch.linalg.LinAlgError("failed to converge")
        return solve(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", fails_first)
    assert torch.equal(whole_invariants(Batch.of(named)), expected)
