"""Networks made up for tests: their accuracy is a known function of their weights."""

from __future__ import annotations

import numpy as np
import torch

from transformer_nfn.models import network_of
from transformer_nfn.prediction.dataset import Dataset, Parts
from transformer_nfn.prediction.records import CONFIGURATION
from transformer_nfn.zoo import NetworkSizes

ARCH = NetworkSizes(tokens=4, classes=3, patch=4, d_model=8, heads=2, d_ff=6, blocks=2)


def made(n: int, seed: int = 0, arch: NetworkSizes = ARCH) -> Dataset:
    """``n`` networks; the larger the scale of the classifier, the better they are."""
    source = torch.Generator().manual_seed(seed)
    scale = 0.2 + torch.rand(n, generator=source)
    named = {}
    for name, shape in arch.space.shapes.items():
        factor = scale if name.startswith("classifier") else torch.ones(n)
        noise = torch.randn(n, *shape, generator=source)
        named[name] = 0.3 * factor.reshape(-1, *[1] * len(shape)) * noise
    columns = {key: np.full(n, 0.1) for key in CONFIGURATION}
    columns |= {
        "optimizer": np.array(["adam"] * n, dtype=object),
        "run": np.array([f"{seed}-{i}" for i in range(n)], dtype=object),
        "row": np.arange(n),
    }
    return Dataset(arch.block_space, network_of(named), (scale - 0.1).clamp(0, 1), columns)


def parts(train: int = 40, val: int = 16, test: int = 16) -> Parts:
    return Parts(made(train, 0), made(val, 1), made(test, 2))


ABOUT = {"name": "made", "task": "digits", "networks": 72, "architecture": ARCH.to_json()}
