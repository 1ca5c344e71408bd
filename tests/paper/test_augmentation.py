"""Networks in disguise are other weights of the same function, and Transformer-NFN says so."""

from dataclasses import replace

import pytest
import torch
from made_networks import made, parts

from transformer_nfn.models import map_network
from transformer_nfn.paper.augmentation import augmented, disguised
from transformer_nfn.prediction.predictors import module_builder
from transformer_nfn.prediction.strategies import Protocol
from transformer_nfn.prediction.training import train_seeds


def test_augmentation_keeps_the_originals_and_the_function():
    data = parts()
    twice = augmented(data, 10.0)
    assert twice.counts == {"train": 80, "val": 32, "test": 32}
    assert torch.equal(twice.train.accuracy[:40], twice.train.accuracy[40:])
    first = twice.train.network["blocks"][1]["W_Q"]
    assert torch.equal(first[:40], data.train.network["blocks"][1]["W_Q"])
    assert not torch.allclose(first[40:], first[:40], atol=0.1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("bound", [1.0, 10.0, 100.0])
def test_transformer_nfn_does_not_notice_the_augmentation(dtype, tolerance, bound):
    data = parts()
    build = module_builder("transformer_nfn", data.train, {"channels": [2]})
    module = train_seeds(build, data, Protocol(epochs=4), [0]).modules[0].to(dtype)
    plain = made(64, 7)
    wide = map_network(plain.network, lambda w: w.to(dtype))
    plain = replace(plain, network=wide)
    moved = disguised(plain, bound, seed=1)
    with torch.no_grad():
        apart = (module(plain.network) - module(moved.network)).abs().max()
    assert apart < tolerance
