"""The two neural baselines: the paper's parameter counts, what they read, how they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap

from transformer_nfn import spaces
from transformer_nfn.errors import SpaceError
from transformer_nfn.models import MLP, Network, StatNN
from transformer_nfn.models.baselines import STATISTICS
from transformer_nfn.models.statistics import statistics

SPACE = spaces.attention_block(6, 2, 3, 2, 5)
PAPER = spaces.attention_block(32, 2, 16, 16, 64)
CLASSIFIER = {"W_1": (6, 6), "W_2": (6, 3), "b_1": (6,), "b_2": (3,)}
SIZES = [36, 18, 6, 3]


def networks(batch: int, space: spaces.WeightSpace = SPACE) -> Network:
    return {
        "embedding": {"W": torch.randn(batch, 4, 6), "b": torch.randn(batch, 6)},
        "blocks": [space.randn(batch) for _ in range(2)],
        "classifier": {name: torch.randn(batch, *shape) for name, shape in CLASSIFIER.items()},
    }


def small(kind: type[MLP] | type[StatNN]) -> MLP | StatNN:
    torch.manual_seed(0)
    if kind is MLP:
        return MLP(SPACE, embedding=30, classifier=63, hidden=7)
    return StatNN(SPACE, embedding=30, classifier=SIZES, hidden=8, embedding_hidden=4)


both = pytest.mark.parametrize("kind", [MLP, StatNN])


@pytest.mark.parametrize(
    ("kind", "task", "parameters"),
    [
        (MLP, "ag_news", 896_051),
        (MLP, "mnist", 933_251),
        (StatNN, "ag_news", 168_449),
        (StatNN, "mnist", 203_393),
    ],
)
def test_parameter_counts_of_the_paper(kind: type, task: str, parameters: int) -> None:
    model = kind.paper(task)
    assert sum(p.numel() for p in model.parameters()) == parameters
    classes = 10 if task == "mnist" else 4
    shapes = {"W_1": (32, 32), "W_2": (32, classes), "b_1": (32,), "b_2": (classes,)}
    network: Network = {
        "embedding": torch.randn(2, 544),
        "blocks": [PAPER.randn(2) for _ in range(2)],
        "classifier": {name: torch.randn(2, *shape) for name, shape in shapes.items()},
    }
    out = model(network)
    assert out.shape == (2,)
    assert bool(((out > 0) & (out < 1)).all())


@both
def test_unknown_tasks_are_named(kind: type) -> None:
    with pytest.raises(SpaceError, match="task must be one of mnist, ag_news, found 'cifar'"):
        kind.paper("cifar")


@both
def test_forward_is_the_sigmoid_of_the_logits(kind: type) -> None:
    model, network = small(kind), networks(3)
    assert torch.equal(model(network), torch.sigmoid(model.logits(network)))


@both
def test_a_model_comes_back_the_same(kind: type, tmp_path: Path) -> None:
    model, network = small(kind), networks(3)
    model.save_pretrained(tmp_path)
    back = kind.from_pretrained(tmp_path)
    assert back.config == model.config
    assert torch.equal(back(network), model(network))


@both
def test_a_malformed_config_is_refused(kind: type) -> None:
    config = small(kind).config
    with pytest.raises(SpaceError, match="config is malformed"):
        kind.from_config(config | {"colour": "red"})
    with pytest.raises(SpaceError, match="needs the key 'space'"):
        kind.from_config({})


@both
def test_every_parameter_learns(kind: type) -> None:
    model = small(kind)
    model.logits(networks(64)).sum().backward()
    assert all(bool((p.grad != 0).any()) for p in model.parameters())


@both
def test_several_seeds_train_together(kind: type) -> None:
    models, network = [small(kind), small(kind)], networks(4)
    with torch.no_grad():
        for p in models[1].parameters():
            p.mul_(1.5)
    state, buffers = stack_module_state(models)  # type: ignore[arg-type]

    def run(state: dict, buffers: dict, network: Network) -> torch.Tensor:
        out: torch.Tensor = functional_call(models[0], (state, buffers), (network,))
        return out

    shared = vmap(run, (0, 0, None))(state, buffers, network)
    for row, model in zip(shared, models, strict=True):
        assert torch.allclose(row, model(network), atol=1e-6)
    other = networks(4)
    stacked = torch.utils._pytree.tree_map(lambda a, b: torch.stack([a, b]), network, other)
    apart = vmap(run)(state, buffers, stacked)
    assert torch.allclose(apart[1], models[1](other), atol=1e-6)


@both
def test_other_networks_are_refused(kind: type) -> None:
    model = small(kind)
    wrong = networks(3, spaces.attention_block(8, 2, 3, 2, 5))
    with pytest.raises(SpaceError, match="W_Q"):
        model(wrong)
    with pytest.raises(SpaceError, match="reads 2 blocks, found 1"):
        model(networks(3) | {"blocks": [SPACE.randn(3)]})
    with pytest.raises(SpaceError, match="one batch size"):
        model(networks(3) | {"classifier": torch.randn(4, 63)})
    with pytest.raises(SpaceError, match="'embedding' must have 30 numbers"):
        model(networks(3) | {"embedding": torch.randn(3, 31)})
    with pytest.raises(SpaceError, match="one channel"):
        model(networks(3) | {"blocks": [SPACE.randn(3, 2) for _ in range(2)]})


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
def test_statistics_are_those_of_torch(size: int) -> None:
    x = torch.randn(4, size, dtype=torch.float64, requires_grad=True)
    found = statistics(x)
    q = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    assert torch.allclose(found[:, 0], x.mean(-1))
    assert torch.allclose(found[:, 1], x.var(-1, correction=0))
    assert torch.allclose(found[:, 2:], x.quantile(q, -1).mT)
    torch.autograd.gradcheck(statistics, (x,))


def test_statnn_features_are_computed_once() -> None:
    model, network = small(StatNN), networks(3)
    assert isinstance(model, StatNN)
    features = model.features(network)
    assert features.shape == (3, 2 * 8 * 7 + 4 * 7 + 30)
    assert torch.equal(model.logits_from_features(features), model.logits(network))
    kept = model.prepared(network)
    assert torch.equal(kept[STATISTICS], features)
    assert torch.equal(model.logits({STATISTICS: features}), model.logits(network))
    # What is kept is read, not computed again.
    kept["blocks"] = None
    assert torch.equal(model.prepared(kept)[STATISTICS], features)


def test_statnn_reads_a_classifier_flat_or_by_tensor() -> None:
    network, model = networks(3), small(StatNN)
    classifier = network["classifier"]
    assert isinstance(classifier, dict)
    flat = torch.cat([classifier[name].flatten(1) for name in sorted(classifier)], -1)
    assert torch.equal(model(network), model(network | {"classifier": flat}))
    torch.manual_seed(0)
    total = StatNN(SPACE, embedding=30, classifier=63, hidden=8, embedding_hidden=4)
    assert torch.equal(model(network), total(network))
    with pytest.raises(SpaceError, match="a dict of 4 tensors"):
        total(network | {"classifier": flat})
