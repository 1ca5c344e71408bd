"""Tiny checkpoints of every family in memory, made once for each test process."""

from collections.abc import Callable

import pytest
import torch
from memory_model import MemoryModel

from tiny_families import build, save
from transformer_nfn.checkpoints.families import open_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[..., MemoryModel]:
    """``tiny(family, dtype, seed)``: a tiny model with random weights."""
    made: dict[tuple[str, int], MemoryModel] = {}

    def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> MemoryModel:
        if (name, seed) not in made:
            folder = tmp_path_factory.mktemp("tiny") / name
            with open_model(save(build(name, seed=seed), folder)) as model:
                made[name, seed] = MemoryModel.of(model)
        return made[name, seed].to(dtype)

    return make
