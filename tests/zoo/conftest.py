"""What the zoo's tests share: small tasks, and one small zoo built once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from transformer_nfn.zoo import Settings, Zoo, build
from transformer_nfn.zoo.training.tasks import ImageTask, Task, TextTask, WordVectors, image_task
from transformer_nfn.zoo.training.tasks.text import ag_news

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_images(side: int, patch: int, white: int = 255, n: int = 300) -> ImageTask:
    """Random images that a network can tell apart by their brightness."""
    draw = torch.Generator().manual_seed(side)
    labels = torch.randint(0, 10, (n,), generator=draw)
    noise = torch.randint(0, white // 4, (n, side, side), generator=draw)
    images = (noise + labels[:, None, None] * (white // 14)).to(torch.uint8)
    half = n * 2 // 3
    return image_task(
        "digits" if side == 8 else "mnist",
        (images[:half], labels[:half]),
        (images[half:], labels[half:]),
        side=patch,
        white=white,
        padding=0 if side == 8 else 2,
        epochs=2,
        held=0.1,
        samples=None,
        provenance={},
    )


def write_news(folder: Path, rows: int = 300, header: bool = False) -> Path:
    """An AG News folder of invented sentences, whose words give the class away."""
    draw = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in (("train", rows), ("test", rows // 2)):
        lines = ['"class","title","description"'] if header else []
        for _ in range(n):
            label = int(torch.randint(1, 5, (), generator=draw))
            length = int(torch.randint(1, 24, (), generator=draw))
            picks = torch.randint(0, 6, (length,), generator=draw).tolist()
            words = " ".join(f"w{label}{p}" if p < 4 else f"Common{p}" for p in picks)
            lines.append(f'"{label}","a title","{words}"')
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def random_vectors() -> WordVectors:
    """Vectors for most words of `write_news`; some stay unknown."""
    words = [f"w{c}{p}" for c in range(1, 5) for p in range(4)] + ["Common4"]
    draw = torch.Generator().manual_seed(2)
    return WordVectors(tuple(words), torch.randn(len(words), 32, generator=draw), "test")


@pytest.fixture(scope="session")
def news(tmp_path_factory: pytest.TempPathFactory) -> TextTask:
    """The text task on invented sentences."""
    folder = write_news(tmp_path_factory.mktemp("news"))
    return ag_news(folder, 0.1, None, random_vectors())


@pytest.fixture(params=["digits", "mnist", "fashion_mnist", "ag_news"])
def any_task(request: pytest.FixtureRequest, news: TextTask) -> Task:
    """One task of every kind of network there is."""
    if request.param == "ag_news":
        return news
    return random_images(8, 2, 16) if request.param == "digits" else random_images(28, 4)


SMALL = Settings("digits", runs=12, epochs=2, batch=128, shard_runs=4, seed=3)


@pytest.fixture(scope="session")
def small_zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A digits zoo of 12 runs in 3 shards; tests must not change it."""
    return build(tmp_path_factory.mktemp("zoo") / "small", SMALL, workers=1)


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment for processes a test starts: one thread each."""
    return os.environ | {"OMP_NUM_THREADS": "1"}
