"""Models that other people trained; without a package index the tests that need them skip."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_command import fetched

from real_weights import models


@pytest.fixture(scope="session")
def sceptr() -> dict[str, Path]:
    """The 16 state dicts by name."""
    return fetched(models.sceptr_models)


@pytest.fixture(scope="session")
def sapiens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hub folders of the RoBERTas for heavy (h) and light (l) chains."""
    place = tmp_path_factory.mktemp("sapiens")
    return {c: fetched(lambda c=c: models.write_sapiens(c, place / c)) for c in "hl"}  # type: ignore[misc]


@pytest.fixture(scope="session")
def rxnfp() -> dict[str, Path]:
    """The three BERTs of reactions by name."""
    return fetched(models.rxnfp_models)


@pytest.fixture(scope="session")
def rxnmapper() -> Path:
    """The ALBERT of reactions."""
    return fetched(models.rxnmapper_model)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The sentence-transformers folder."""
    return fetched(models.minilm_model)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2 as a hub folder, 540 MB; removed afterwards."""
    place = tmp_path_factory.mktemp("smollm2")
    yield fetched(lambda: models.write_smollm2(place / "model"))
    shutil.rmtree(place)
