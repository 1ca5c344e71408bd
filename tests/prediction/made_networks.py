"""Synthetic networks whose accuracy is a known function of their weights, and trainings on them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_damage import wrong_fields
from torch import nn

from tnfn_command import assert_refused
from transformer_nfn.errors import TransformerNFNError
from transformer_nfn.models import Batch
from transformer_nfn.prediction.data import Dataset, Parts, SizeGroups
from transformer_nfn.prediction.experiment import Experiment
from transformer_nfn.prediction.protocol import Protocol
from transformer_nfn.prediction.runs import CONFIGURATION, RUN_FILE, RunRecord
from transformer_nfn.prediction.training import Execution, train_seeds
from transformer_nfn.zoo import NetworkSizes

ARCH = NetworkSizes(tokens=4, classes=3, patch=4, d_model=8, heads=2, d_ff=6, blocks=2)
ABOUT = {
    "name": "made", "task": "digits", "networks": 72, "runs": 72, "seeds": "each",
    "architecture": ARCH.to_json(),
}  # fmt: skip
WIDE, DEEP = "w8-h2-d2", "w6-h3-d3"
# The compiled forward does not take the second size, so both forwards are in one training.
SIZES = {WIDE: ARCH, DEEP: replace(ARCH, d_model=6, heads=3, d_ff=10, blocks=3)}
MIXED_ABOUT = {
    "name": "made",
    "task": "digits",
    "networks": 100,
    "runs": 100,
    "seeds": "each",
    "architectures": {name: sizes.to_json() for name, sizes in SIZES.items()},
}
SMALL = {"probes": 6, "rank": 4, "hidden": 8}
"""Options of a small `WholeNetwork`."""


def made(n: int, seed: int = 0, sizes: NetworkSizes = ARCH) -> Dataset:
    """``n`` networks; the larger the scale of the classifier, the better they are."""
    source = torch.Generator().manual_seed(seed)
    scale = 0.2 + torch.rand(n, generator=source)
    named = {}
    for name, shape in sizes.space.shapes.items():
        factor = scale if name.startswith("classifier") else torch.ones(n)
        noise = torch.randn(n, *shape, generator=source)
        named[name] = 0.3 * factor.reshape(-1, *[1] * len(shape)) * noise
    columns = {key: np.full(n, 0.1) for key in CONFIGURATION}
    columns |= {
        "optimizer": np.array(["adam"] * n, dtype=object),
        "run": np.array([f"{seed}-{i}" for i in range(n)], dtype=object),
        "row": np.arange(n),
    }
    return Dataset(sizes.block_space, Batch.of(named), (scale - 0.1).clamp(0, 1), columns)


def assert_fields_are_checked(run: Path, copy: Path) -> None:
    """Every field of a record that is missing or of another type is refused by file and name."""
    shutil.copytree(run, copy)
    record = json.loads((copy / RUN_FILE).read_text())
    commands = cycle((
        ("evaluate", copy), ("predict", copy, "mnist-sample#0"), ("evaluate", copy, "mnist-sample"),
        ("report", copy, "--out", copy.with_suffix(".html")),
    ))  # fmt: skip
    seen = set()
    for name, wrong in wrong_fields(record):
        (copy / RUN_FILE).write_text(json.dumps(wrong))
        with pytest.raises(TransformerNFNError) as error:
            pytest.fail(f"{name}: {RunRecord.read(copy)}")
        assert f"'{copy / RUN_FILE}'" in str(error.value), name
        if name.startswith("files."):
            assert name.removeprefix("files.") in str(error.value)
        else:  # of sizes and families any name may be there, so what holds them is named
            places = (name, f"{name}.", name.rpartition(".")[0] + "'", name.partition("[")[0] + "'")
            assert any(f"'{place}" in str(error.value) for place in places), str(error.value)
        if name not in seen and len(seen) % 12 == 0:
            assert_refused(str(error.value), *next(commands))
        seen.add(name)
    assert len(seen) > 50


def parts(train: int = 40, val: int = 16, test: int = 16) -> Parts:
    return Parts(made(train, 0), made(val, 1), made(test, 2))


def sized(name: str, count: int, seed: int) -> Dataset:
    """Networks of one of `SIZES`."""
    return replace(made(count, seed, SIZES[name]), tokens=ARCH.tokens)


def groups(*, left_out: tuple[str, ...] = ()) -> SizeGroups:
    """Twice as many training networks of the first size as of the second."""
    names = [name for name in SIZES if name not in left_out]
    return SizeGroups(
        {
            name: Parts(
                sized(name, 40 if name == WIDE else 20, 0), sized(name, 12, 1), sized(name, 12, 2)
            )
            for name in names
        },
        {name: sized(name, 15, 3) for name in left_out},
    )


def experiment(model: str, seeds: tuple[int, ...] = (0,), **options: Any) -> Experiment:
    """A short training; keywords are those of `Experiment`."""
    return Experiment(model, list(seeds), **{"protocol": Protocol(epochs=4), **options})


def same_weights(ours: list[nn.Module], theirs: list[nn.Module]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        torch.equal(value, b.state_dict()[name])
        for a, b in pairs
        for name, value in a.state_dict().items()
    )


class KilledError(Exception):
    """Stands for SIGKILL."""


def check_killed_and_resumed(
    build: Callable[[], nn.Module],
    data: Parts | SizeGroups,
    protocol: Protocol,
    folder: Path,
    epoch: int = 2,
) -> None:
    """A training of two seeds killed in an epoch and resumed ends with the same weights."""

    def kill(line: dict[str, Any]) -> None:
        if line.get("epoch") == epoch:
            raise KilledError

    whole = train_seeds(build, data, protocol, [0, 1])
    killed = Execution(folder, "x", kill, save_every=0)
    with pytest.raises(KilledError):
        train_seeds(build, data, protocol, [0, 1], killed)
    resumed = train_seeds(build, data, protocol, [0, 1], Execution(folder, "x"))
    assert resumed.best_epoch == whole.best_epoch
    assert same_weights(resumed.modules, whole.modules)
