"""Rivals: what they ignore of a network, files, gradients, and training on planted targets."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_networks import ABOUT, ARCH, DEEP, MIXED_ABOUT, WIDE, experiment, groups, made
from torch import Tensor

from literal_network import literal_logits
from transformer_nfn.errors import RunError, SpaceError
from transformer_nfn.functional import small_transformer
from transformer_nfn.models import Batch, HiddenProbe, NeuralGraph, ProbeGen
from transformer_nfn.prediction.data import Dataset, Parts
from transformer_nfn.prediction.experiment import train_run
from transformer_nfn.prediction.predictors import load_predictors
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import predictions_on_test, read_predictions
from transformer_nfn.zoo import NetworkSizes
from transformer_nfn.zoo.module import to_state_dict

TOKENS, CLASSES, PATCH, D = 9, 5, 4, 8
PROBES = {"probes": 6, "latent": 3, "channels": 2, "hidden": 8, "layers": 3}
OPTIONS: dict[str, dict[str, int]] = {
    "probegen": PROBES,
    "hidden_probe": {
        "probes": 6,
        "stream_tokens": 3,
        "codes": 4,
        "hidden": 8,
        "heads": 2,
        "neurons": 8,
    },
    "neural_graph": {"hidden": 8, "edges": 4, "layers": 2},
}
CLASSES_OF = {"probegen": ProbeGen, "hidden_probe": HiddenProbe, "neural_graph": NeuralGraph}
every = pytest.mark.parametrize("name", OPTIONS)
Named = dict[str, Tensor]


def networks(patch: int = PATCH, blocks: int = 2, d_model: int = D) -> tuple[Any, Named]:
    made = small_transformer(TOKENS, CLASSES, patch, d_model, 2, 2 * d_model, blocks)
    draw = torch.Generator().manual_seed(0)
    shapes = made.space.shapes.items()
    named = {
        name: torch.randn(3, *shape, generator=draw, dtype=torch.float64) * 0.5
        for name, shape in shapes
    }
    return made, named


def model(name: str, images: bool = True) -> Any:
    torch.manual_seed(0)
    width = PATCH if images else D
    sizes = dict(tokens=TOKENS, width=width, classes=CLASSES, images=images)
    if name == "hidden_probe":
        sizes["d_model"] = D
    return CLASSES_OF[name](**sizes, **OPTIONS[name]).double().eval()


def change(reader: Any, named: Named, moved: Named) -> float:
    with torch.no_grad():
        before, after = (reader.logits(Batch.of(x)) for x in (named, moved))
    return float((after - before).abs().max())


def permuted(named: Named) -> Named:
    """Heads, units within them, neurons, stream channels and hidden units in another order."""
    order = torch.Generator().manual_seed(1)
    heads, qk, vo = (torch.randperm(n, generator=order) for n in (2, 4, 4))
    feature, stream, hidden = (torch.randperm(D, generator=order) for _ in range(3))
    neuron = torch.randperm(2 * D, generator=order)
    out = dict(named)
    for i in range(2):
        w = {k: named[f"blocks.{i}.{k}"] for k in ("W_Q", "W_K", "W_V", "W_O", "W_A", "b_A", "W_B")}
        w |= {k: w[k][:, heads][..., units] for k, units in (("W_Q", qk), ("W_K", qk), ("W_V", vo))}
        w["W_O"] = w["W_O"][:, heads][:, :, vo][..., feature]
        w["W_A"] = w["W_A"][:, feature][..., neuron]
        w["b_A"], w["W_B"] = w["b_A"][:, neuron], w["W_B"][:, neuron]
        out |= {f"blocks.{i}.{k}": x for k, x in w.items()}
    out["blocks.0.W_B"] = out["blocks.0.W_B"][..., stream]
    out["blocks.0.b_B"] = out["blocks.0.b_B"][..., stream]
    for k in ("W_Q", "W_K", "W_V"):
        out[f"blocks.1.{k}"] = out[f"blocks.1.{k}"][:, :, stream]
    out["classifier.W_1"] = named["classifier.W_1"][..., hidden]
    out["classifier.b_1"] = named["classifier.b_1"][..., hidden]
    out["classifier.W_2"] = named["classifier.W_2"][:, hidden]
    return out


def rescaled(named: Named) -> Named:
    """Each neuron of the first block scaled, its output divided by that."""
    scale = torch.linspace(0.5, 2, 2 * D, dtype=torch.float64)
    out = {"W_A": named["blocks.0.W_A"] * scale, "b_A": named["blocks.0.b_A"] * scale}
    out["W_B"] = named["blocks.0.W_B"] / scale[:, None]
    return {**named, **{f"blocks.0.{k}": x for k, x in out.items()}}


def rotated(named: Named) -> Named:
    """The stream between the blocks rotated about the all-ones vector, which LayerNorm allows."""
    draw = torch.randn(D, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    draw[:, 0] = 1
    basis = torch.linalg.qr(draw).Q
    turn = torch.linalg.qr(draw[1:, 1:]).Q
    R = basis @ torch.block_diag(torch.ones(1, 1, dtype=torch.float64), turn) @ basis.mT
    out = dict(named)
    out["blocks.0.W_B"], out["blocks.0.b_B"] = named["blocks.0.W_B"] @ R, named["blocks.0.b_B"] @ R
    for k in ("W_Q", "W_K", "W_V"):
        out[f"blocks.1.{k}"] = R.mT @ named[f"blocks.1.{k}"]
    return out


def in_the_group(named: Named) -> Named:
    """Any element of the group of the network: permutations, and matrices inside heads."""
    space = networks()[0].space
    element = space.group.random(torch.Generator().manual_seed(1), batch=3)
    moved = element.act({name: w.unsqueeze(1) for name, w in named.items()})
    return {name: w.squeeze(1) for name, w in moved.items()}


SYMMETRIES: list[Callable[[Named], Named]] = [permuted, rescaled, in_the_group]


@pytest.mark.parametrize(
    ("name", "move"),
    [*product(["probegen", "hidden_probe"], SYMMETRIES), ("probegen", rotated)],
)
def test_what_keeps_the_function_keeps_the_prediction(name: str, move: Any) -> None:
    made, named = networks()
    moved, reader = move(named), model(name)
    X = torch.randn(TOKENS, PATCH, dtype=torch.float64)
    torch.testing.assert_close(made.forward(moved, X), made.forward(named, X), rtol=0, atol=1e-9)
    assert change(reader, named, moved) < 1e-9
    other = {**named, "blocks.1.W_A": named["blocks.0.W_A"]}
    assert change(reader, named, other) > 1e-6


@pytest.mark.parametrize("images", [True, False])
def test_hidden_probe_is_its_description(images: bool) -> None:
    """One network at a time, by the literal network and PyTorch's modules."""
    patch = PATCH if images else 0
    _, named = networks(patch)
    sizes = NetworkSizes(TOKENS, CLASSES, patch, D, 2, 2 * D, 2)
    reader = model("hidden_probe", images)
    probes = {kind: generator().detach() for kind, generator in reader.generator.items()}
    assert probes["stream"].shape == (5 if images else 6, 3, D)
    assert ("images" in probes) == images
    expected = []
    for i in range(3):
        state = to_state_dict(sizes, {name: w[i] for name, w in named.items()})
        behind: list[list[Tensor]] = [[], [], []]
        logits = []
        for kind, x in probes.items():
            read, where = dict(state), sizes.positions().double()
            if kind == "stream":
                read = {k: w for k, w in state.items() if not k.startswith("embedding.")}
                where = torch.zeros(3, D, dtype=torch.float64)
            else:  # patches of 2 × 2 in a grid of 3 × 3
                x = F.fold(x.mT, 6, 2, stride=2)
            neurons: list[Tensor] = []
            logits.append(literal_logits(read, x, where, 2, neurons))
            for block, inside in enumerate(neurons):
                at = f"encoder.{block}.fc2"
                out = F.linear(inside.relu(), state[f"{at}.weight"], state[f"{at}.bias"])
                behind[block].append(out.flatten(0, 1))
        first, last = torch.cat(behind[0]), torch.cat(behind[1])
        codes = [reader.encoder(x.mT) for x in (first, last, F.layer_norm(last, (D,)))]
        tokens = torch.cat([
            reader.summary[0],
            codes[0] + reader.types[0],
            reader.join(torch.cat(codes[1:], -1)) + reader.types[1],
            reader.logit_encoder(torch.cat(logits)) + reader.identities + reader.types[2],
        ])  # fmt: skip
        x = reader.blocks(tokens[None])[0]
        assert len(x) == 1 + 2 * D + 6
        expected.append(reader.head(torch.cat([x[0], x[1:].mean(0), x[1:].max(0).values])))
    found = reader.logits(Batch.of(named))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-9)


def test_hidden_probe_refuses_networks_of_another_width() -> None:
    sizes = NetworkSizes(TOKENS, CLASSES, PATCH, D, 2, 2 * D, 2)
    for stream, expected in ((None, "expected width 8, found 12"), (0, None)):
        reader = HiddenProbe(probes=6, stream=stream)
        assert reader.misfit(replace(sizes, d_model=12), sizes) == expected
        assert reader.misfit(replace(sizes, blocks=3, heads=4), sizes) is None
    with pytest.raises(RunError, match="networks of one width, found 6, 8: give --option stream=0"):
        HiddenProbe.of_all(groups().train, probes=6)
    for wrong in ({"stream": 7}, {"images": False, "stream": 3}, {"heads": 5}, {"probes": 0}):
        with pytest.raises(SpaceError, match="expected"):
            HiddenProbe(**{"probes": 6, **wrong})


def test_trajectories_of_channels_see_a_rotated_stream() -> None:
    _, named = networks()
    assert change(model("hidden_probe"), named, rotated(named)) > 1e-6


def test_a_graph_has_no_order_of_neurons_and_heads() -> None:
    _, named = networks()
    reader = model("neural_graph")
    assert change(reader, named, permuted(named)) < 1e-9
    # Controls: scales, and units of a head permuted in one of its matrices alone, are seen.
    assert change(reader, named, rescaled(named)) > 1e-6
    swapped = named["blocks.0.W_Q"][..., [1, 0, 2, 3]]
    assert change(reader, named, {**named, "blocks.0.W_Q": swapped}) > 1e-6


@every
@pytest.mark.parametrize("images", [True, False])
def test_every_parameter_learns(name: str, images: bool) -> None:
    _, named = networks(PATCH if images else 0)
    reader = model(name, images)
    reader.logits(Batch.of(named)).square().sum().backward()
    idle = [
        key
        for key, p in reader.named_parameters()
        if p.grad is None or not bool(p.grad.abs().sum() > 0)
    ]
    # States of edges behind the last layer are not read.
    assert [key for key in idle if not key.startswith("layers.1.edge.")] == []


@every
def test_networks_of_other_sizes_have_as_many_features(name: str) -> None:
    reader = model(name)
    found = {
        reader.features(Batch.of(networks(blocks=blocks, d_model=width)[1])).shape
        for blocks, width in ((1, D), (3, D), (2, 12))
        if name != "hidden_probe" or width == D
    }
    assert len(found) == 1
    _, named = networks()
    with torch.no_grad():
        repeated = {k: w.repeat(7, *[1] * (w.ndim - 1)) for k, w in named.items()}
        together = reader.features(Batch.of(repeated))
        torch.testing.assert_close(together[-3:], reader.features(Batch.of(named)))


def test_sequences_that_are_no_squares_are_generated_too() -> None:
    made = ProbeGen(tokens=6, width=3, classes=2, **PROBES)
    assert made.generator().shape == (6, 6, 3)
    assert float(made.generator().detach().abs().max()) < 1


@every
def test_a_model_comes_back_from_its_folder(name: str, tmp_path: Path) -> None:
    reader = model(name).float()
    network = Batch.of({k: w.float() for k, w in networks()[1].items()})
    reader.save_pretrained(tmp_path)
    again = type(reader).from_pretrained(tmp_path)
    assert again.config == reader.config
    with torch.no_grad():
        assert torch.equal(again(network), reader(network))


def planted(n: int, seed: int) -> Dataset:
    """Networks as good as their first logit is large, on any input."""
    data = replace(made(n, seed), tokens=ARCH.tokens)
    last = 10 * data.network.views["classifier.b_2"]
    network = data.network.with_weights({"classifier.b_2": last})
    return replace(data, network=network, accuracy=torch.sigmoid(last[:, 0]))


@pytest.mark.nightly
@every
def test_a_planted_target_is_found(name: str, tmp_path: Path) -> None:
    data = Parts(planted(48, 0), planted(16, 1), planted(24, 2))
    short = Protocol(epochs=8, batch=8, lr=5e-3)
    run = train_run(ABOUT, data, experiment(name, protocol=short, options=OPTIONS[name]), tmp_path)
    assert run.summary["tau"] > 0.5
    _, predicted = predictions_on_test(read_predictions(tmp_path))
    (loaded,) = load_predictors(tmp_path, run)
    again = loaded.predict(data.test.network).double()
    torch.testing.assert_close(again, torch.from_numpy(predicted[0]), rtol=0, atol=1e-5)


@every
def test_several_sizes_are_trained_together(name: str, tmp_path: Path) -> None:
    options = OPTIONS[name] | ({"stream": 0} if name == "hidden_probe" else {})
    short = experiment(name, (0, 1), protocol=Protocol(epochs=1), options=options)
    run = train_run(MIXED_ABOUT, groups(), short, tmp_path)
    assert set(run.summary["kinds"]) == {WIDE, DEEP}
    assert run.summary["widening"]["kind"] >= 1
